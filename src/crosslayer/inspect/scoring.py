"""What a model is scored by: the next token of a text, or the class of an image.

A batch with `labels`, a class each, is scored by these; one with `input_ids` by its next tokens, or
by the `labels` of these, as transformers' language models are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .observation import LABELS, ModelInputs, cache_options, model_arguments

NO_TARGET = -100  # as in torch's cross-entropy


def score_targets(batch: ModelInputs) -> Tensor:
    """What each token of a batch should predict, `NO_TARGET` where it is nothing, [B T].

    For images [B 1]: the first token, which is the class token, predicts the class.

    Raises:
        ValueError: the batch has neither labels nor input_ids.
    """
    if LABELS in batch and not has_next_tokens(batch):
        return batch[LABELS][:, None]
    if "input_ids" not in batch:
        raise ValueError("there is no loss: the classes are not those of the model's classifier")
    ids = batch["input_ids"]
    wanted = batch.get(LABELS, ids)
    mask = batch.get("attention_mask", torch.ones_like(ids))
    targets = torch.full_like(ids, NO_TARGET)
    has_next = (mask[:, :-1] * mask[:, 1:]).bool()
    targets[:, :-1] = torch.where(has_next, wanted[:, 1:], NO_TARGET)
    return targets


def has_next_tokens(batch: ModelInputs) -> bool:
    """Whether a batch is scored by its next tokens, and not by a class for each example."""
    return "input_ids" in batch and (LABELS not in batch or batch[LABELS].dim() == 2)


def score_logits(model: Any, batch: ModelInputs) -> tuple[Tensor, Tensor]:
    """The logits of all tokens that have a target, [N classes] float32, and their targets [N].

    Raises:
        ValueError: the model makes no logits, or the batch has no targets.
    """
    find_head(model)
    device = next(model.parameters()).device
    targets = score_targets(batch).to(device)
    output = model(**model_arguments(batch, device), **cache_options(model))
    if not hasattr(output, "logits"):
        raise ValueError(
            f"{type(model).__name__} returns a {type(output).__name__}; a model that is scored "
            "returns an object with `logits`, as transformers' models do"
        )
    logits = output.logits.view(*targets.shape, -1)  # a classifier's are [B classes]
    chosen = targets != NO_TARGET
    return logits[chosen].float(), targets[chosen]


def check_scored(count: int) -> None:
    """Raise a ValueError where no token was scored."""
    if count == 0:
        raise ValueError("nothing was scored: give at least one batch of at least two tokens")


def find_head(model: Any) -> nn.Module:
    """The module that makes logits of hidden states.

    Raises:
        ValueError: the model has none.
    """
    of_tokens = getattr(model, "get_output_embeddings", lambda: None)
    head = of_tokens()
    if head is None:
        head = getattr(model, "classifier", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no head that makes logits: a language model returns it "
            "from get_output_embeddings(), a classifier of images has it as `classifier`"
        )
    return head
