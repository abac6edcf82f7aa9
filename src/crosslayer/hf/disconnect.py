"""`disconnect`: the host model back, where that changes nothing it computes."""

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..class_swap import restore_class
from ..connection import Connection
from ..fused_norms import FusedNormConnection
from ..norms import add_write
from .connect import check_not_dispatched, find_backbone, is_connected, set_config_keys
from .layers import OwnedNorm
from .qkv import FusedProjection, SplitInputAttention, select_port

Model = TypeVar("Model", bound=nn.Module)
_OWN_CONFIG_KEYS = {
    "crosslayer_widths": "MLPs have widths of their own",
    "crosslayer_rope": "RoPE table is rounded",
    "crosslayer_qk_norm": "attention norms q and k",
}


def disconnect(model: Model, tolerance: float = 0.0) -> Model:
    """Undo `connect`, in place, and return the host model; only where it then computes what it did.

    Every connection is tried on random streams beside the plain residual. One that is at its start, or has learnt
    nothing but the plain residual, gives the sub-layers the same inputs to the last bit.

    Args:
        model: a connected model whose weights are loaded.
        tolerance: the largest difference of a sub-layer's normed input to accept, say 1e-4 for hyper-connections at
            their start, which are the plain residual up to the eps of a norm.

    Raises:
        ValueError: the model is not connected, or the plain residual is another function. The model is then as it was.
    """
    body, family = find_backbone(model)
    if not is_connected(body):
        raise ValueError("the model is not connected")
    for key, what in _OWN_CONFIG_KEYS.items():
        if getattr(getattr(body, "config", None), key, None):
            raise ValueError(f"its {what}, which the plain model's config cannot say")
    layers, final = getattr(body, family.layers), getattr(body, family.final)
    check_not_dispatched(*layers, final)
    connections = [c for layer in layers for c in layer.connections]
    like = next(body.parameters())
    if like.is_meta:
        raise ValueError("the model has no weights yet; load them first")
    found = _max_input_difference([*connections, final.connection], like)
    if not found <= tolerance:
        raise ValueError(
            f"{body.arm} computes another function than the plain residual: a sub-layer's input differs by up to "
            f"{found:.1e}, and the tolerance is {tolerance:.1e}"
        )
    for layer in layers:
        merge_qkv_inputs(getattr(layer, family.attn.module))
        restore_class(layer)
        for name in ("connections", "family", "arguments", "next_connection"):
            delattr(layer, name)
    for module, name in ((final, "connection"), (body, "arm")):
        restore_class(module)
        delattr(module, name)
    for owner in (model, body):
        set_config_keys(owner, crosslayer=None)
    return model


@torch.no_grad()
def _max_input_difference(connections: list[Connection], like: Tensor) -> float:
    """The largest difference of a normed input from the plain residual's, over all sites and a few random tokens."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(1, 4, connections[0].dim, generator=generator).to(like)

    h, found = random(), [0.0]
    state = connections[0].init(h)
    for connection in connections:
        if isinstance(
            connection, FusedNormConnection
        ):  # a kernel that fuses the norm would round differently
            inputs, state = Connection.read(connection, state)
        else:
            inputs, state = connection(state)
        for x, norm in zip(
            inputs, connection.norms, strict=False
        ):  # a readout of two norms has one input
            expected = (norm.origin[0] if isinstance(norm, OwnedNorm) else norm)(h)
            found.append((x - expected).abs().max().item())
        y = random()
        h, state = add_write(h, y), connection.write(state, y)
    return torch.tensor(found).max().item()  # which, unlike max, does not pass over a nan


def merge_qkv_inputs(attention: Any) -> None:
    """Let the attention's projections take one input again."""
    for module in attention.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.func is select_port:
                del module._forward_pre_hooks[key]
        if isinstance(module, FusedProjection):
            restore_class(module)
            del module.fused
    if isinstance(attention, SplitInputAttention):
        restore_class(attention)
        del attention.projections, attention.fused
