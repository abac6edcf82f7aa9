"""Windows of tokens, and the log-likelihood that a model gives their targets."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ..evaluation_mode import evaluation_mode
from ..validation import check_positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ScoredWindow(NamedTuple):
    """Tokens of one forward pass. Only the target's tokens are scored."""

    context: list[int]
    target: list[int]


def rolling_windows(tokens: list[int], context: int, stride: int) -> list[ScoredWindow]:
    """Windows that score every token but the first once.

    Args:
        tokens: the first is only seen.
        context: tokens that the model sees at once.
        stride: tokens that a window scores; the first window scores `context` of them.
    """
    windows = []
    start = 1
    end = min(context + 1, len(tokens))
    while start < len(tokens):
        windows.append(ScoredWindow(tokens[max(0, end - context - 1) : start], tokens[start:end]))
        start = end
        end = min(end + stride, len(tokens))
    return windows


def split_window(window: ScoredWindow, context: int) -> list[ScoredWindow]:
    """Windows that fit in `context` and score every target token once, each with all the context
    that fits.
    """
    tokens = window.context + window.target
    piece = context if len(window.target) <= context else context // 2
    windows = []
    for start in range(len(window.context), len(tokens), piece):
        end = min(start + piece, len(tokens))
        windows.append(ScoredWindow(tokens[max(0, end - context - 1) : start], tokens[start:end]))
    return windows


@torch.no_grad()
def log_likelihoods(
    model: "PreTrainedModel", windows: Sequence[ScoredWindow], batch_size: int
) -> list[float]:
    """The log-likelihood of each window's target, in nats. Computed in float32 from the logits.

    Args:
        model: a causal language model.
        windows: what is scored, in any order.
        batch_size: windows that the model sees at once.

    Raises:
        ValueError: the batch size is below 1, the model is not causal, or its logits are not
            finite.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    check_positive(batch_size=batch_size)
    check_causal(model)
    # Longest first: windows of a batch are of similar length, and a lack of memory shows at once.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].context + windows[i].target))
    scores = [0.0] * len(windows)
    starts = range(0, len(order), batch_size)
    with evaluation_mode(model):
        for start in tqdm(starts, "perplexity", unit="batch", disable=None):  # only on a terminal
            batch = order[start : start + batch_size]
            # The last token is predicted, never seen. Padding on the right changes nothing before.
            inputs = [torch.tensor((windows[i].context + windows[i].target)[:-1]) for i in batch]
            padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(model.device)
            logits = model(padded, use_cache=False).logits
            log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            for row, i in enumerate(batch):
                target = torch.tensor(windows[i].target, device=model.device)
                positions = slice(len(inputs[row]) - len(target), len(inputs[row]))
                of_target = log_probabilities[row, positions].gather(-1, target[:, None])
                scores[i] = of_target.sum().item()
    if any(math.isnan(score) for score in scores):
        raise ValueError("the model's logits are not finite: a weight may be NaN")
    return scores


@torch.no_grad()
def check_causal(model: "PreTrainedModel") -> None:
    """Raise a ValueError where the logits of a token depend on tokens after it, as in an encoder.

    Two short inputs that differ in their last token tell.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(4, device=model.device).repeat(2, 1) % vocab
    ids[1, -1] = (ids[1, -1] + 1) % vocab
    with evaluation_mode(model):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
    difference = (logits[0] - logits[1]).abs().max()
    rounding = 1e-5 if model.dtype == torch.float32 else 3e-2  # relative
    if difference > rounding * logits.abs().max():
        raise ValueError(
            f"{type(model).__name__} sees the tokens that it would be scored by: a token's logits "
            "depend on tokens after it"
        )


def context_limit(model: "PreTrainedModel") -> int | None:
    """The most tokens that a model sees at once, by its config; None where that does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_context(model: "PreTrainedModel", context: int | None) -> int:
    """The context given, or that of the model's config; a ValueError where it is none or out of
    range.
    """
    limit = context_limit(model)
    if context is None:
        context = limit
    if context is None:
        raise ValueError("the model's config has no max_position_embeddings; name a context")
    if limit is not None and not 2 <= context <= limit:
        raise ValueError(f"context must be from 2 to the model's {limit}, got {context}")
    if context < 2:
        raise ValueError(f"context must be at least 2, got {context}")
    return context


def find_first_token(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> int | None:
    """The token before a text: BOS, or one that ends a text where there is no BOS, or None."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return next(iter(end_tokens(tokenizer, model)), None)


def end_tokens(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> list[int]:
    """The tokens that end a text: the tokenizer's, or those of the model's config, or none."""
    given = tokenizer.eos_token_id
    if given is None:
        given = getattr(model.generation_config, "eos_token_id", None)
    ends = given if isinstance(given, list) else [given]
    return [token for token in ends if isinstance(token, int)]


def exp_or_inf(x: float) -> float:
    # The perplexity of an untrained model's words, or of a diverged run, may be no float.
    return math.inf if x >= 700 else math.exp(x)
