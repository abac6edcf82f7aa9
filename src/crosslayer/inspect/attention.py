"""Which heads attend to content, and what their patterns look like.

Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, Figures 8, 10 and 11.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation_mode import evaluation_mode
from ..hf.attach import find_backbone
from .moments import RunningMoments
from .observation import ModelInputs, model_arguments, run_headless_model

# Tokens of the first sequence whose patterns are kept.
_PATTERN_TOKENS = 32


@dataclass
class HeadActivations:
    """Attention weights over tokens.

    Attributes:
        active: the share of active heads of each layer, mean over heads and tokens, [layers]. A
            head is active at a token where its largest weight is neither on one of the first two
            positions nor on a token that attracts attention without content.
        pattern_layer: the layer of `patterns`.
        patterns: the weights of all its heads over the first sequence's first tokens, [heads T T].
    """

    active: Tensor
    pattern_layer: int
    patterns: Tensor


@torch.no_grad()
def measure_head_activations(
    model: nn.Module,
    batches: Iterable[ModelInputs],
    sink_ids: Iterable[int] = (),
    pattern_layer: int | None = None,
) -> HeadActivations:
    """The share of active heads, and patterns. Attention runs eagerly for this analysis alone.

    Args:
        model: a transformers model whose attention can run eagerly, connected or not.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
        sink_ids: tokens that attract attention without content: BOS, "." and newlines in the
            paper.
        pattern_layer: whose patterns are kept; None for the one at three quarters of the depth,
            which is the paper's 25th of 32.

    Raises:
        ValueError: the model's attention gives no weights, it has no such layer, or the batches
            are no texts.
    """
    backbone, wiring = find_backbone(model)
    device = next(model.parameters()).device
    layers = wiring.find_layers(backbone)
    if pattern_layer is None:
        pattern_layer = 3 * len(layers) // 4
    if not 0 <= pattern_layer < len(layers):
        raise ValueError(f"expected a layer from 0 to {len(layers) - 1}, got {pattern_layer}")
    recorder = _HeadRecorder(len(layers), pattern_layer)
    sinks = torch.tensor(sorted(sink_ids), device=device)
    attentions = []
    for layer, layer_wiring in zip(layers, wiring.of_layers, strict=True):
        mixers = [sublayer.module for sublayer in layer_wiring.sublayers if sublayer.port != "mlp"]
        if len(mixers) != 1:
            raise ValueError(f"expected one attention in each layer, got {mixers}")
        attentions.append(layer.get_submodule(mixers[0]))
    if len(set(attentions)) < len(attentions):
        raise ValueError("layers share an attention, whose heads are then those of several layers")
    with evaluation_mode(model), _eager_attention(model), recorder.attached_to(attentions):
        for batch in batches:
            if "input_ids" not in batch:
                raise ValueError("active heads are defined for texts alone")
            ids = batch["input_ids"].to(device)
            mask = batch.get("attention_mask", torch.ones_like(ids)).to(device).bool()
            if not mask.any():
                continue
            recorder.mask = mask
            # Positions count from the first token that is not padding.
            recorder.is_sink = (mask.cumsum(-1) <= 2) | torch.isin(ids, sinks)
            run_headless_model(model, model_arguments(batch, device))
    if recorder.patterns is None:
        raise ValueError("the batches have no token")
    active = torch.stack([moments.mean for moments in recorder.active])
    return HeadActivations(active, pattern_layer, recorder.patterns)


class _HeadRecorder:
    """Takes what it needs of each layer's weights as they are made, one layer at a time.

    Attributes:
        mask, is_sink: [B T], of the batch that runs.
        active: of each layer.
        patterns: of the chosen layer and the first batch.
    """

    def __init__(self, layers: int, pattern_layer: int):
        self.pattern_layer = pattern_layer
        self.active = [RunningMoments() for _ in range(layers)]
        self.patterns: Tensor | None = None
        self.mask = torch.zeros(0)
        self.is_sink = torch.zeros(0)

    @contextmanager
    def attached_to(self, attentions: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer, module in enumerate(attentions):
                hooks.enter_context(module.register_forward_hook(partial(self._record, layer)))
            yield

    def _record(self, layer: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        A = outputs[1] if isinstance(outputs, tuple) and outputs[1:] else None  # [B H T T]
        if A is None:
            raise ValueError(f"{type(module).__name__} returns no attention weights")
        top = A.argmax(-1)  # [B H T]
        attends_content = ~self.is_sink[:, None].expand(-1, top.shape[1], -1).gather(-1, top)
        self.active[layer].add(attends_content.float().mean(1)[self.mask])
        if layer == self.pattern_layer and self.patterns is None:
            row = int(self.mask.any(-1).nonzero()[0])  # the first sequence that has a token
            first = self.mask[row].nonzero().flatten()[:_PATTERN_TOKENS]
            self.patterns = A[row][:, first][:, :, first].float().cpu()


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Attention that returns its weights; afterwards the implementation is what it was."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
