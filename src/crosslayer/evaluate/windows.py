"""Windows of tokens, and the log-likelihood that a model gives their targets."""

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..evaluation_mode import evaluation_mode
from ..losses import cross_entropy
from ..validation import check_positive
from .language_models import check_logits, check_no_nan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG_SECONDS = 60  # between two lines of progress in a log file


class ScoredWindow(NamedTuple):
    """Tokens of one forward pass.

    Attributes:
        seen: tokens before the target.
        target: the tokens that are scored.
    """

    seen: list[int]
    target: list[int]

    @property
    def length(self) -> int:
        return len(self.seen) + len(self.target)


def rolling_windows(tokens: list[int], context: int, stride: int) -> list[ScoredWindow]:
    """Windows that score every token but the first once.

    Args:
        tokens: the first is only seen.
        context: tokens that the model sees at once.
        stride: tokens that a window scores; the first window scores `context` of them.
    """
    if len(tokens) < 2:
        return []
    return _cut_windows(tokens, [1, *range(context + 1, len(tokens), stride)], context)


def split_window(window: ScoredWindow, context: int) -> list[ScoredWindow]:
    """Windows that fit in `context` and score every target token once, each with all the context
    that fits.
    """
    tokens = window.seen + window.target
    piece = context if len(window.target) <= context else context // 2
    return _cut_windows(tokens, range(len(window.seen), len(tokens), piece), context)


def _cut_windows(tokens: list[int], starts: Iterable[int], context: int) -> list[ScoredWindow]:
    """Windows that fit in `context`. Each scores the tokens from its start to the next one's."""
    windows = []
    for start, end in pairwise([*starts, len(tokens)]):
        seen = tokens[max(0, end - context - 1) : start]
        windows.append(ScoredWindow(seen, tokens[start:end]))
    return windows


def nothing_to_score(tokens: int) -> str:
    """What is wrong with a text of so few tokens."""
    return f"the text has no token to score: of its {tokens}, none has another before it"


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
        ValueError: the batch size is below 1, the model is not causal, or its logits have a NaN.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    check_positive(batch_size=batch_size)
    check_logits(model)
    # Longest first: windows of a batch are of similar length, and a lack of memory shows at once.
    order = sorted(range(len(windows)), key=lambda i: -windows[i].length)
    scores = [0.0] * len(windows)
    starts = range(0, len(order), batch_size)
    with evaluation_mode(model):
        for start in tqdm(starts, "perplexity", unit="batch", **_progress_times()):
            batch = order[start : start + batch_size]
            # The last token is predicted, never seen. Padding on the right changes nothing before.
            inputs = [torch.tensor((windows[i].seen + windows[i].target)[:-1]) for i in batch]
            padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(model.device)
            logits = model(padded, use_cache=False).logits
            for row, i in enumerate(batch):
                target = torch.tensor(windows[i].target, device=model.device)
                positions = slice(len(inputs[row]) - len(target), len(inputs[row]))
                scores[i] = -cross_entropy(logits[row, positions], target).sum().item()
    check_no_nan(torch.tensor(scores))
    return scores


def _progress_times() -> dict[str, float]:
    """Of tqdm: a bar on a terminal; in a log file nothing at first, and then a line at times."""
    if sys.stderr.isatty():
        return {}
    return {"delay": _LOG_SECONDS, "mininterval": _LOG_SECONDS}
