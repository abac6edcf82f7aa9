"""`disconnect`: undo `connect` where that leaves the model's function unchanged."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..class_swap import restore_class
from ..connection import Connection, autocast_disabled, find_connections
from ..norms import add_write
from ..validation import check_non_negative
from .attach import (
    check_not_dispatched,
    check_not_wrapped,
    find_backbone,
    is_connected,
    set_config_keys,
)
from .host_norms import OwnedNorm
from .layers import LAYER_ATTRIBUTES
from .qkv import FusedProjection, SplitInputAttention, is_port_hook, merge_fused_projection
from .sharding import forget_parameters_apart

Model = TypeVar("Model", bound=nn.Module)
# Keys that the plain model's config does not have, and what they say.
_OWN_CONFIG_KEYS = {
    "crosslayer_widths": "MLP widths differ between layers",
    "crosslayer_rope": "RoPE table is rounded",
    "crosslayer_qk_norm": "attention norms q and k",
}


def disconnect(model: Model, tolerance: float = 0.0) -> Model:
    """Undo `connect`, in place, where the host model computes the same function.

    Random streams pass through all connections and through the host's residual connection, pre-norm
    or post-norm. The two must give the sub-layers the same inputs. An untrained connection does so
    if it starts bitwise as pre-norm.

    Args:
        model: a connected model with its weights.
        tolerance: largest accepted difference of a sub-layer's normed input. Untrained connections
            that equal pre-norm up to the eps of a norm, like hyper, need about 1e-4.

    Returns:
        The same model, of the classes it had before `connect`.

    Raises:
        ValueError: the model is not connected, several of its parts are, or the host model computes
            another function. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"disconnect takes a model, got a {type(model).__name__}")
    check_not_wrapped(model, "disconnect")
    check_non_negative(tolerance=tolerance)
    connected = [path for path, module in model.named_modules() if is_connected(module)]
    if not connected:
        raise ValueError(f"disconnect: this {type(model).__name__} is not connected")
    if len(connected) > 1:
        raise ValueError(
            f"{len(connected)} parts of the model are connected: {', '.join(connected)}; "
            "disconnect each of them"
        )
    backbone, wiring = find_backbone(model)
    _check_plain_model_exists(model, backbone)
    check_not_dispatched(backbone, wiring)
    like = next(backbone.parameters())
    if like.is_meta:
        raise ValueError("the model has no weights yet; load them first")
    connections = find_connections(backbone)
    difference = _max_input_difference(connections, like, wiring.is_post_norm)
    if not difference <= tolerance:
        raise ValueError(
            f"{backbone.connection_spec} does not compute the plain residual: "
            f"a sub-layer's input differs by up to {difference:.1e}, "
            f"and the tolerance is {tolerance:.1e}; a larger tolerance accepts rounding and the "
            "epsilon of a norm"
        )
    remove_connections(model)
    return model


def remove_connections(model: nn.Module) -> None:
    """Undo `connect`, in place, whatever the connections compute.

    Args:
        model: of which one part is connected.
    """
    backbone, wiring = find_backbone(model)
    for owner in (model, backbone):
        forget_parameters_apart(owner)
    for layer in wiring.find_layers(backbone):
        _merge_qkv_inputs(layer)
        restore_class(layer)
        for name in LAYER_ATTRIBUTES:
            delattr(layer, name)
    if wiring.final is not None:
        final: Any = backbone.get_submodule(wiring.final)
        restore_class(final)
        del final.connection
    restore_class(backbone)
    del backbone.connection_spec, backbone.wiring
    for owner in (model, backbone):
        set_config_keys(owner, crosslayer=None)


def _check_plain_model_exists(model: nn.Module, backbone: Any) -> None:
    """Raise a ValueError unless a plain config describes the model without its connections."""
    for path, module in model.named_modules():
        if isinstance(module, FusedProjection) and "original" not in vars(type(module)):
            raise ValueError(
                f"{path} was given another class after connect, as torch's parametrize does; undo "
                "that first"
            )
        if isinstance(module, Connection) and "modules_to_save" in path.split("."):
            raise ValueError(
                f"an adapter of PEFT trains a copy of the connection, {path}; merge the adapter "
                "(merge_and_unload) or take it away (unload) first"
            )
    config = getattr(backbone, "config", None)
    for key, property_name in _OWN_CONFIG_KEYS.items():
        if getattr(config, key, None):
            raise ValueError(
                f"the model's {property_name}, which the plain model's config cannot express"
            )


@torch.no_grad()
def _max_input_difference(
    connections: list[Connection[Any]], like: Tensor, is_post_norm: bool
) -> float:
    """The largest difference of a normed input from the plain residual's, for random streams."""
    generator = torch.Generator().manual_seed(0)

    def random_stream() -> Tensor:
        return torch.randn(1, 4, connections[0].dim, generator=generator, device="cpu").to(like)

    h = random_stream()
    state = connections[0].init(h)
    differences = []
    for connection in connections:
        # Not `read`: a norm that is fused into the op before it would round differently.
        with autocast_disabled(state):
            inputs, state = Connection.mix_and_norm(connection, state)
        # A readout with two norms has one input.
        expected = []
        for x, norm in zip(inputs, connection.norms, strict=False):
            host_norm = norm.find_host_norm() if isinstance(norm, OwnedNorm) else norm
            expected.append(host_norm(h).to(h.dtype))  # as `Connection.apply_port_norms` does
            differences.append((x - expected[-1]).abs().max())
        if is_post_norm:
            h = expected[0]
        y = random_stream()
        h = add_write(h, y)
        state = connection.write(state, y)
    return torch.stack(differences).max().item()  # NaN where one is NaN


def _merge_qkv_inputs(layer: Any) -> None:
    """Undo `split_qkv_inputs` in a layer."""
    for module in layer.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if is_port_hook(hook):
                del module._forward_pre_hooks[key]
        if isinstance(module, FusedProjection):
            merge_fused_projection(module)
        if isinstance(module, SplitInputAttention):
            restore_class(module)
            del module.projections, module.fused
