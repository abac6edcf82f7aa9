"""MLPs of a width of their own in every layer, and MUDD's choice of these: widths that grow with depth, the total as it
was (arXiv 2502.12170, Eq. 9)."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .families import Family


def growing_widths(layers: int, width: int) -> list[int]:
    """D_f'(i) = (0.5(L − i) + 1.5(i − 1))/(L − 1) · D_f for i = 1..L, rounded to the largest power of two up to 128
    that keeps the total within half a percent."""
    if layers == 1:
        return [width]
    exact = [
        (0.5 * (layers - i) + 1.5 * (i - 1)) / (layers - 1) * width for i in range(1, layers + 1)
    ]
    for multiple in (128, 64, 32, 16, 8, 4, 2, 1):
        rounded = [max(multiple, int(w / multiple + 0.5) * multiple) for w in exact]
        if abs(sum(rounded) - layers * width) <= 0.005 * layers * width:
            return rounded
    raise AssertionError("rounding to one keeps any total")


def mlp_hidden_width(body: Any, family: Family) -> int:
    """Of the first layer's MLP.

    Raises:
        ValueError: the family's row does not name its MLP's maps, as of a mixture of experts.
    """
    if not family.mlp.widens:
        raise ValueError(
            "reallocate does not know how to widen this family's MLP; its row names no maps for it"
        )
    mlp = getattr(getattr(body, family.layers)[0], family.mlp.module)
    return _linear_shape(getattr(mlp, family.mlp.narrows))[0]


def set_mlp_widths(body: Any, family: Family, widths: list[int]) -> None:
    """Give every layer's MLP its hidden width, with new weights from the model's own initialisation."""
    before = mlp_hidden_width(body, family)
    layers = getattr(body, family.layers)
    if len(widths) != len(layers):
        raise ValueError(
            f"crosslayer_widths must be one width a layer, {len(layers)} in all, got {len(widths)}"
        )
    for layer, width in zip(layers, widths, strict=True):
        mlp = getattr(layer, family.mlp.module)
        for name in (*family.mlp.widens, family.mlp.narrows):
            old = getattr(mlp, name)
            i, o = _linear_shape(old)
            # a map to a gate and a value side by side is twice as wide
            new = (
                _new_linear_like(old, width, o)
                if name == family.mlp.narrows
                else _new_linear_like(old, i, o // before * width)
            )
            setattr(mlp, name, new)
            if not new.weight.is_meta:
                with torch.no_grad():
                    body._init_weights(new)


def _linear_shape(projection: Any) -> tuple[int, int]:
    """Its width of inputs and of outputs."""
    shape = tuple(projection.weight.shape)
    return shape if isinstance(projection, Conv1D) else shape[::-1]


def _new_linear_like(old: Any, inputs: int, outputs: int) -> Any:
    with torch.device(old.weight.device):
        new = (
            Conv1D(outputs, inputs)
            if isinstance(old, Conv1D)
            else nn.Linear(inputs, outputs, old.bias is not None)
        )
    return new.to(old.weight.dtype)
