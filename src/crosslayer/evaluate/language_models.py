"""What a language model is asked before it scores or continues a text."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def check_logits(model: "PreTrainedModel") -> None:
    """Raise a ValueError where the logits of a token depend on tokens after it, as in an encoder,
    or have a NaN.

    Two short inputs that differ in their last token tell.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    length = min(4, context_limit(model) or 4)
    if length < 2:
        return  # there is no token after another
    ids = torch.arange(length, device=model.device).repeat(2, 1) % vocab
    ids[1, -1] = (ids[1, -1] + 1) % vocab
    with evaluation_mode(model):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
    check_no_nan(logits)
    difference = (logits[0] - logits[1]).abs().max()
    rounding = 1e-5 if model.dtype == torch.float32 else 3e-2  # relative
    if difference > rounding * logits.abs().max():
        raise ValueError(
            f"{type(model).__name__} sees the tokens that it would be scored by: a token's logits "
            "depend on tokens after it"
        )


def check_no_nan(values: Tensor) -> None:
    """Raise a ValueError where logits, or what was computed from them, have a NaN."""
    if values.isnan().any():
        raise ValueError("the model's logits have a NaN: one of its weights may be NaN")


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


def encode_without_end(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The tokens of a text, with those that the tokenizer puts before it and none after it.

    Where a text has none, there is none before it.
    """
    tokens = tokenizer.encode(text)
    plain = tokenizer.encode(text, add_special_tokens=False)
    added = len(tokens) - len(plain)
    for before in range(added + 1):
        if tokens[before : before + len(plain)] == plain:
            return tokens[: before + len(plain)]
    while tokens and tokens[-1] in tokenizer.all_special_ids:  # a text changes its own tokens
        tokens = tokens[:-1]
    return tokens


def find_first_token(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> int | None:
    """The token before a text: BOS, or one that ends a text where there is no BOS, or None."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return next(iter(end_tokens(tokenizer, model)), None)


def end_tokens(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> list[int]:
    """The tokens that end a text: the tokenizer's, or those of the model's generation config."""
    given = tokenizer.eos_token_id
    if given is None:
        given = getattr(model.generation_config, "eos_token_id", None)
    ends = given if isinstance(given, list) else [given]
    return [token for token in ends if isinstance(token, int)]
