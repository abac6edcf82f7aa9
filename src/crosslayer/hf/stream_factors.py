"""Factors by which layers multiply their stream, as Gemma 4's do.

A connection's streams are without these factors, which the norms of the host must remove.
"""

import math
from typing import Any

import torch

from ..spec import ConnectionSpec
from ..validation import HALF_DTYPES, dtype_name, parse_dtype
from .attach import final_norm
from .families import ModelWiring
from .host_norms import find_attribute
from .initial_outputs import keeps_scale


def check_stream_factors(backbone: Any, wiring: ModelWiring, spec: ConnectionSpec) -> None:
    """Raise a ValueError where layers multiply the stream and a norm does not remove the factor.

    A connection's streams are without these factors. `_check_size_of_factors` has the limits of
    their values.
    """
    factor = next((w.stream_factor for w in wiring.of_layers if w.stream_factor), "")
    if not factor:
        return
    if spec.method.norms_its_stream:
        raise ValueError(
            f"its layers multiply their stream by {factor}, and {spec} norms its streams itself"
        )
    _check_size_of_factors(backbone, wiring, spec)
    norms = {f"its final norm, {wiring.final},": final_norm(backbone, wiring)}
    for number, (layer, layer_wiring) in enumerate(wiring.wired_layers(backbone)):
        for path in layer_wiring.input_norms:
            norms[f"the {path} of layer {number}"] = layer.get_submodule(path)
    for name, norm in norms.items():
        if norm is not None and keeps_scale(norm, wiring.dim):
            raise ValueError(
                f"its layers multiply their stream by {factor}, and {name} does not remove this "
                "factor, as connections need it"
            )


@torch.no_grad()
def _check_size_of_factors(backbone: Any, wiring: ModelWiring, spec: ConnectionSpec) -> None:
    """Raise a ValueError for factors that are not positive, because norms keep signs, or whose
    product leaves the range of the streams' dtype. Those on the meta device are not checked.
    """
    dtype = next(backbone.parameters()).dtype
    if spec.options.get("stream_dtype") is not None:
        dtype = parse_dtype(spec.options["stream_dtype"], "stream_dtype")
    largest = math.sqrt(torch.finfo(dtype).max)  # the streams need the other half of the range
    product = 1.0
    for number, (layer, layer_wiring) in enumerate(wiring.wired_layers(backbone)):
        name = layer_wiring.stream_factor
        if not name:
            continue
        factor = find_attribute(layer, name)
        if factor.is_meta:
            continue
        value = factor.item()
        if not value > 0:
            raise ValueError(
                f"layer {number} multiplies its stream by {name}, which is {value:.3g}; "
                "connections need positive factors"
            )
        product *= value
        if not 1 / largest < product < largest:
            remedy = "; try stream_dtype='float32'" if dtype in HALF_DTYPES else ""
            raise ValueError(
                f"up to layer {number} its layers multiply the stream by {product:.3g} in all "
                f"({name}), and {dtype_name(dtype)} has no range for its inverse{remedy}"
            )
