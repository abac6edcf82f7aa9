"""MUDD's re-allocation of parameters: MLPs that widen with depth, the total as it was (arXiv 2502.12170, Eq. 9)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .families import Family


def widths(layers: int, width: int) -> list[int]:
    """D_f'(i) = (0.5(L − i) + 1.5(i − 1))/(L − 1) · D_f for i = 1..L, rounded to the largest power of two up to 128
    that keeps the total within half a percent."""
    if layers == 1:
        return [width]
    exact = [(0.5 * (layers - i) + 1.5 * (i - 1)) / (layers - 1) * width for i in range(1, layers + 1)]
    for multiple in (128, 64, 32, 16, 8, 4, 2, 1):
        rounded = [max(multiple, int(w / multiple + 0.5) * multiple) for w in exact]
        if abs(sum(rounded) - layers * width) <= 0.005 * layers * width:
            return rounded
    raise AssertionError("rounding to one keeps any total")


def reallocate(body: Any, family: Family, widths: Sequence[int]) -> None:
    """Give every layer's MLP its hidden width, with new weights from the model's own initialisation."""
    layers = getattr(body, family.layers)
    if len(widths) != len(layers):
        raise ValueError(f"crosslayer_widths must be one width a layer, {len(layers)} in all, got {len(widths)}")
    for layer, width in zip(layers, widths, strict=True):
        mlp = getattr(layer, family.mlp.module)
        for name in (*family.mlp.widens, family.mlp.narrows):
            old = getattr(mlp, name)
            ends = (width, old.out_features) if name == family.mlp.narrows else (old.in_features, width)
            new = nn.Linear(ends[0], ends[1], old.bias is not None, old.weight.device, old.weight.dtype)
            setattr(mlp, name, new)
            if not new.weight.is_meta:
                with torch.no_grad():
                    body._init_weights(new)
