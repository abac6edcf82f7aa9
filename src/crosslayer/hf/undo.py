"""`disconnect`: the host model back, where that changes nothing it computes."""

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..connection import Connection, as_written
from ..ops import add
from ..roles import restore
from .attach import check_unhooked, connected, parts_of, remember
from .modules import CopiedNorm
from .ports import FusedProjection, PartedAttention, take

Model = TypeVar("Model", bound=nn.Module)
OWN = {
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
    body, family = parts_of(model)
    if not connected(body):
        raise ValueError("the model is not connected")
    for key, what in OWN.items():
        if getattr(getattr(body, "config", None), key, None):
            raise ValueError(f"its {what}, which the plain model's config cannot say")
    layers, final = getattr(body, family.layers), getattr(body, family.final)
    check_unhooked(*layers, final)
    connections = [c for layer in layers for c in layer.connections]
    like = next(body.parameters())
    if like.is_meta:
        raise ValueError("the model has no weights yet; load them first")
    found = difference([*connections, final.connection], like)
    if not found <= tolerance:
        raise ValueError(
            f"{body.arm} computes another function than the plain residual: a sub-layer's input differs by up to "
            f"{found:.1e}, and the tolerance is {tolerance:.1e}"
        )
    for layer in layers:
        unpart(getattr(layer, family.attn.module))
        restore(layer)
        for name in ("connections", "family", "arguments", "following"):
            delattr(layer, name)
    for module, name in ((final, "connection"), (body, "arm")):
        restore(module)
        delattr(module, name)
    for owner in (model, body):
        remember(owner, crosslayer=None)
    return model


@torch.no_grad()
def difference(connections: list[Connection], like: Tensor) -> float:
    """The largest difference of a normed input from the plain residual's, over all sites and a few random tokens."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(1, 4, connections[0].dim, generator=generator).to(like)

    h, found = random(), [0.0]
    state = connections[0].init(h)
    for connection in connections:
        if connection.fuses:  # modules norm both, as a kernel that takes a norm along rounds otherwise
            with as_written(state):
                xs, state = connection.gather(state)
                inputs = connection.feed(*xs)
        else:
            inputs, state = connection(state)
        for x, norm in zip(inputs, connection.norms, strict=False):  # a readout of two norms has one input
            expected = (norm.origin[0] if isinstance(norm, CopiedNorm) else norm)(h)
            found.append((x - expected).abs().max().item())
        y = random()
        h, state = add(h, y), connection.write(state, y)
    return torch.tensor(found).max().item()  # which, unlike max, does not pass over a nan


def unpart(attention: Any) -> None:
    """Let the attention's projections take one input again."""
    for module in attention.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.func is take:
                del module._forward_pre_hooks[key]
        if isinstance(module, FusedProjection):
            restore(module)
            del module.fused
    if isinstance(attention, PartedAttention):
        restore(attention)
        del attention.projections, attention.fused
