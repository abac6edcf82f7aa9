"""Which heads attend to content, and what their patterns look like.

Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, Figures 8, 10 and 11.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import find_backbone
from .moments import RunningMoments
from .observation import Batch, evaluation_mode

# Tokens of the first sequence whose patterns are kept.
PATTERN_TOKENS = 32


@dataclass
class HeadActivations:
    """Attention weights over tokens.

    Attributes:
        active: the share of active heads of each layer, mean over heads and tokens, [layers]. A
            head is active at a token where its largest weight is neither on one of the first two
            positions nor on a token that attracts attention without content.
        patterns: the weights of the first sequence's first tokens, [layers heads T T].
    """

    active: Tensor
    patterns: Tensor


@torch.no_grad()
def measure_head_activations(
    model: nn.Module, batches: Iterable[Batch], sink_ids: Iterable[int] = ()
) -> HeadActivations:
    """The share of active heads, and patterns. Attention runs eagerly for this analysis alone.

    Args:
        model: a transformers model whose attention can run eagerly, connected or not.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
        sink_ids: tokens that attract attention without content: BOS, "." and newlines in the
            paper.

    Raises:
        ValueError: the model's attention gives no weights, or the batches are no texts.
    """
    backbone, family = find_backbone(model)
    device = next(model.parameters()).device
    sinks = torch.tensor(sorted(sink_ids), device=device)
    layers = getattr(backbone, family.layers)
    active = [RunningMoments() for _ in layers]
    patterns: list[Tensor] = []
    for batch in batches:
        if "input_ids" not in batch:
            raise ValueError("active heads are defined for texts alone")
        ids = batch["input_ids"].to(device)
        mask = batch.get("attention_mask", torch.ones_like(ids)).to(device).bool()
        # Positions count from the first token that is not padding.
        is_sink = (mask.cumsum(-1) <= 2) | torch.isin(ids, sinks)
        arguments = {key: value.to(device) for key, value in batch.items()}
        with evaluation_mode(model), eager_attention(model):
            weights = _attention_weights(backbone, layers, family.attn.module, arguments)
        for moments, A in zip(active, weights, strict=True):
            top = A.argmax(-1)  # [B H T]
            attends_content = ~is_sink[:, None].expand(-1, top.shape[1], -1).gather(-1, top)
            moments.add(attends_content.float().mean(1)[mask])
        if not patterns:
            first = mask[0].nonzero().flatten()[:PATTERN_TOKENS]
            patterns = [A[0][:, first][:, :, first].float().cpu() for A in weights]
    return HeadActivations(
        active=torch.stack([moments.mean for moments in active]), patterns=torch.stack(patterns)
    )


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention that returns its weights; afterwards the implementation is what it was."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _attention_weights(
    backbone: nn.Module, layers: Iterable[nn.Module], name: str, arguments: dict[str, Any]
) -> list[Tensor]:
    """[B H T T] of each layer, in the order of depth."""
    weights: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
        found = outputs[1] if isinstance(outputs, tuple) else None
        if found is None:
            raise ValueError(f"{type(module).__name__} returns no attention weights")
        weights.append(found)

    handles = [layer.get_submodule(name).register_forward_hook(keep) for layer in layers]
    try:
        backbone(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return weights
