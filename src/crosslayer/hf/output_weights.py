"""The factor of the initial weights that write to the stream: the option `output_scale`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..partitioned import gathered_parameters
from .host_norms import find_attribute


@torch.no_grad()
def scale_output_weights(
    layers: Iterable[Any], is_new: Callable[[Tensor], bool] = lambda weight: True
) -> None:
    """Multiply the weights of each sub-layer's output projection by its `output_scale`, in place.

    `connect` does so once, and a model that is built from its config when it has initialised a
    layer. What is loaded afterwards replaces the weights.

    Args:
        layers: connected.
        is_new: whether a weight has its initial values.
    """
    weights = {}  # by id: layers may share sub-layers
    for layer in layers:
        for connection, sublayers in zip(layer.connections, layer.wiring.sites, strict=False):
            if connection.output_scale == 1:
                continue
            for sublayer in sublayers:
                path = f"{sublayer.module}.{sublayer.output_projection}"
                projection = find_attribute(layer, path)
                weight = getattr(projection, "weight", projection)
                if is_new(weight):
                    weights[id(weight)] = (weight, connection.output_scale)
    for weight, scale in weights.values():  # once all are found
        with gathered_parameters([weight], changes=True):
            weight.mul_(scale)
