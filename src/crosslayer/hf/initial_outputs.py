"""Whether a model computes the same as before once it is connected.

Some connections start as pre-norm up to a factor of what norms get. Most norms remove it.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import PRENORM_FUNCTIONS, Connection
from ..partitioned import gathered_parameters, parameter_shape
from .attach import final_norm
from .families import ModelWiring

# of methods that scale the stream, which a norm removes
_SCALING_FUNCTIONS = ("prenorm up to scales", "prenorm up to scale of readout")


class KeptScales(NamedTuple):
    """Which norms of a model return more where they get more."""

    final: bool = False  # the one before the head
    inputs: bool = False  # one before a sub-layer of the first layer


def find_kept_scales(backbone: Any, wiring: ModelWiring) -> KeptScales:
    """Try the norms of a model that is not connected yet."""
    final = final_norm(backbone, wiring)
    first_layer = wiring.find_layers(backbone)[0]
    paths = wiring.of_layers[0].input_norms
    return KeptScales(
        final=final is not None and keeps_scale(final, wiring.dim),
        inputs=any(keeps_scale(first_layer.get_submodule(path), wiring.dim) for path in paths),
    )


@torch.no_grad()
def keeps_scale(norm: nn.Module, dim: int) -> bool:
    """Whether what a norm returns grows with its input, as BatchNorm's and DyT's does.

    A copy of it is tried. False where that cannot be: on the meta device, or where a norm gets more
    than its input.
    """
    if any(parameter.is_meta for parameter in norm.parameters()):
        return False  # its weights may be offloaded, and a copy would have all of the model's
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with gathered_parameters(norm.parameters()):
            tried = copy.deepcopy(norm).to("cpu", torch.float64).eval()
        once, thrice = tried(x), tried(3 * x)
        return not torch.allclose(once, thrice, rtol=1e-2, atol=1e-2 * once.abs().max().item())
    except Exception:
        return False


def reason_for_change(
    connection: Connection[Any], wiring: ModelWiring, kept_scales: KeptScales
) -> str:
    """Why a connection changes what a model computes; empty where it does not.

    Args:
        connection: of the model.
        wiring: of its layers.
        kept_scales: by its norms, as they were before it was connected.
    """
    if connection.output_scale != 1:
        return "output_scale multiplies weights of the model"
    if wiring.is_post_norm:
        is_same = connection.initial_function == "bitwise postnorm"
        return "" if is_same else "its layers are post-norm: postnorm alone computes the same"
    if connection.initial_function not in PRENORM_FUNCTIONS:
        return "not equivalent to pre-norm at initialisation"
    scales_inputs = connection.initial_function == "prenorm up to scales"
    scales_readout = connection.initial_function in _SCALING_FUNCTIONS
    if scales_readout and wiring.final is None:
        return "it scales the hidden state, and no norm beside the layers removes that"
    if scales_inputs and not wiring.norms_inputs:
        return "it scales the inputs of sub-layers, and this family has no norm there"
    if (scales_readout and kept_scales.final) or (scales_inputs and kept_scales.inputs):
        return "it scales what norms get, and one of them keeps the scale of its input"
    return ""


def looks_pretrained(backbone: Any, wiring: ModelWiring) -> bool:
    """Whether the final norm has left its initial value; without its weight, a norm of the first
    layer.

    Where no norm has a weight: whether the model was loaded from somewhere.
    """
    final = final_norm(backbone, wiring)
    vectors = _norm_weights([] if final is None else [final])
    vectors = vectors or _norm_weights(wiring.find_layers(backbone)[0].modules())
    if not vectors:
        return bool(getattr(getattr(backbone, "config", None), "_name_or_path", ""))
    with gathered_parameters(vectors):
        return any(not vector.is_meta and bool((vector != vector[0]).any()) for vector in vectors)


def _norm_weights(norms: Iterable[nn.Module]) -> list[Tensor]:
    """The weights of those modules whose weight is a vector."""
    weights = [getattr(norm, "weight", None) for norm in norms]
    return [w for w in weights if isinstance(w, Tensor) and len(parameter_shape(w)) == 1]
