"""MLPs whose hidden widths differ between layers, and MUDD's choice: widths that grow with depth.

Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, Eq. 9.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..partitioned import parameter_shape
from .connected_model import mark_as_initialised
from .families import LayerWiring, ModelWiring, Sublayer

_FIRST_FACTOR = 0.5  # width of the first layer's MLP, in units of the config's
_LAST_FACTOR = 1.5  # ... and of the last layer's
_MAX_TOTAL_CHANGE = 0.005  # of the sum of the widths, by rounding
_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)


def growing_widths(layers: int, width: int) -> list[int]:
    """The hidden widths of MUDD's Eq. 9, from half the config's width to one and a half.

        D_f'(i) = (0.5 (L − i) + 1.5 (i − 1)) / (L − 1) · D_f      i = 1 … L

    They are rounded to multiples of the largest power of two up to 128 that changes their sum by at
    most half a percent, or to whole numbers where each power changes it by more.

    Args:
        layers: L, the number of layers.
        width: D_f, the hidden width of the config.

    Returns:
        One width for each layer.
    """
    if layers == 1:
        return [width]
    exact = []
    for i in range(1, layers + 1):
        factor = (_FIRST_FACTOR * (layers - i) + _LAST_FACTOR * (i - 1)) / (layers - 1)
        exact.append(factor * width)
    for multiple in _MULTIPLES:
        rounded = [max(multiple, int(w / multiple + 0.5) * multiple) for w in exact]
        if abs(sum(rounded) - layers * width) <= _MAX_TOTAL_CHANGE * layers * width:
            return rounded
    return rounded


def mlp_hidden_width(backbone: Any, wiring: ModelWiring) -> int:
    """The hidden width of the first layer's MLP.

    Raises:
        ValueError: the names of an MLP's projections are not known, as in a mixture of experts.
    """
    mlps = [_find_mlp(layer) for layer in wiring.of_layers]
    first_layer = wiring.find_layers(backbone)[0]
    module = first_layer.get_submodule(mlps[0].module)
    hidden_width, _ = _linear_shape(getattr(module, mlps[0].output_projection))
    return hidden_width


def _find_mlp(layer: LayerWiring) -> Sublayer:
    """The one MLP of a layer, with the names of its projections."""
    mlps = [sublayer for sublayer in layer.sublayers if sublayer.port == "mlp"]
    if len(mlps) != 1 or not mlps[0].up_projections or not mlps[0].output_projection:
        raise ValueError(
            "reallocate cannot widen this model's MLPs: it needs one MLP a layer, a module whose "
            "projections have known names; leave reallocate out"
        )
    return mlps[0]


def set_mlp_widths(backbone: Any, wiring: ModelWiring, widths: list[int]) -> None:
    """Give each layer's MLP its hidden width, with new weights from the model's own initialisation.

    Args:
        backbone: the host's backbone, changed in place.
        wiring: of its layers, which names the MLPs' projections.
        widths: one hidden width for each layer.

    Raises:
        ValueError: the number of widths is not that of the layers, or the backbone has no
            initialisation.
    """
    layers = wiring.find_layers(backbone)
    if not hasattr(backbone, "_init_weights"):
        raise ValueError(
            f"reallocate makes new projections, and {type(backbone).__name__} has no _init_weights "
            "that gives them values"
        )
    if len(widths) != len(layers):
        raise ValueError(
            f"crosslayer_widths must be one width a layer, {len(layers)} in all, got {len(widths)}"
        )
    for layer, layer_wiring, width in zip(layers, wiring.of_layers, widths, strict=True):
        sublayer = _find_mlp(layer_wiring)
        mlp = layer.get_submodule(sublayer.module)
        old_width, _ = _linear_shape(getattr(mlp, sublayer.output_projection))
        for name in (*sublayer.up_projections, sublayer.output_projection):
            old = getattr(mlp, name)
            inputs, outputs = _linear_shape(old)
            if name == sublayer.output_projection:
                inputs = width
            else:  # A projection to gate and value together has two outputs a hidden unit.
                outputs = outputs // old_width * width
            projection = _new_linear_like(old, inputs, outputs)
            setattr(mlp, name, projection)
            if not projection.weight.is_meta:
                with torch.no_grad():
                    backbone._init_weights(projection)
                mark_as_initialised(projection, old)


def _linear_shape(projection: Any) -> tuple[int, int]:
    """The numbers of inputs and of outputs."""
    rows, columns = parameter_shape(projection.weight)
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def _new_linear_like(projection: Any, inputs: int, outputs: int) -> Any:
    """A layer of the same kind, device and dtype, with uninitialised weights or torch's own."""
    with torch.device(projection.weight.device):
        if isinstance(projection, Conv1D):
            new: Any = Conv1D(outputs, inputs)
        else:
            new = nn.Linear(inputs, outputs, projection.bias is not None)
    return new.to(projection.weight.dtype)
