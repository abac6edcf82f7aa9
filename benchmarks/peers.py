"""What other packages have for the same work: a row each, imported when it is measured.

A peer is given what our op is given, in the layout it asks for, made beforehand: no copy of ours is in its time.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import NotMeasured

Leaves = list[Tensor]


class Peer(NamedTuple):
    op: str  # of ours
    package: str  # on PyPI
    module: str  # to import
    run: Callable[
        [Any, Leaves, Leaves], tuple[Tensor, ...]
    ]  # given the module, and the case's rows and weights
    laid: Callable[[Leaves, Leaves], tuple[Leaves, Leaves]] = lambda rows, weights: (rows, weights)


def stacked(rows: Leaves, weights: Leaves) -> tuple[Leaves, Leaves]:
    return [torch.stack(rows)], weights


def normed(rows: Leaves, weights: Leaves) -> tuple[Leaves, Leaves]:
    """With a weight of the key's norm, all ones, which ours has multiplied into the query."""
    return rows, [*weights, torch.ones_like(weights[0])]


PEERS = (
    Peer(
        "add_norm", "liger-kernel", "liger_kernel.transformers.functional",
        lambda m, x, w: m.liger_fused_add_rms_norm(x[1], x[0], w[0], 1e-6, in_place=False),
    ),
    Peer(
        "attend", "liger-kernel", "liger_kernel.transformers.functional",
        lambda m, x, w: (m.liger_attn_res(x[0], w[0], w[1]),),
        lambda rows, weights: stacked(*normed(rows, weights)),
    ),
    Peer(
        "attend", "flash-linear-attention", "fla.ops.attnres",
        lambda m, x, w: (m.fused_attnres(w[0], x, w[1]),),
        normed,
    ),
    Peer(
        "attend_ahead", "flash-attn-res", "flash_attn_res",
        lambda m, x, w: m.phase_1_batched_attention_triton_op(x[0], w[0], 1e-6),
        stacked,
    ),
    Peer(
        "attend_merge", "flash-attn-res", "flash_attn_res",
        lambda m, x, w: (m.phase_2_online_softmax_merge_triton_op(x[1], w[1], x[0], w[0][..., 0], 1e-6),),
    ),
    # their mixtures take the pending write with them, which ours have from `probe`
    Peer(
        "carry", "liger-kernel", "liger_kernel.transformers.functional",
        lambda m, x, w: (m.liger_mhc_pre(x[0], w[0]), m.liger_mhc_post_res(x[0], x[1], w[2], w[1])),
        lambda rows, weights: ([*rows, rows[0][..., 0, :].clone()], [*weights, weights[0].clone()]),
    ),
    Peer(
        "sinkhorn", "hyper-connections", "hyper_connections.manifold_constrained_hyper_connections",
        lambda m, _, w: (m.sinkhorn_knopps(w[0], 20),),
    ),
)  # fmt: skip


def module_of(peer: Peer) -> Any:
    try:
        return importlib.import_module(peer.module)
    except ModuleNotFoundError as error:
        raise NotMeasured(f"not installed: {peer.package}, for want of {error.name}") from None


class HyperConnections(nn.Module):
    """The `hyper-connections` package around every sub-layer, four streams, as its README wires them."""

    def __init__(self, dim: int, depth: int, sublayer: Callable[..., Tensor], streams: int = 4):
        super().__init__()
        try:
            from hyper_connections import HyperConnections as Theirs
        except ModuleNotFoundError as error:
            raise NotMeasured(
                f"not installed: hyper-connections, for want of {error.name}"
            ) from None
        self.expand, self.reduce = Theirs.get_expand_reduce_stream_functions(streams)
        self.sites = nn.ModuleList(Theirs(streams, dim=dim, layer_index=k) for k in range(depth))
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        streams = self.expand(x)
        for site in self.sites:
            read, write = site(streams)
            streams = write(self.sublayer([read]))
        return self.reduce(streams)


class DenseFormer(nn.Module):
    """DenseFormer 1×1 as its authors' package runs it: all blocks' outputs in one tensor, contracted after each block.

    Two sub-layers a block, each with a residual of its own.
    """

    def __init__(self, dim: int, depth: int, sublayer: Callable[..., Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(k + 2)[-1] for k in range(depth // 2))
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.new_empty(len(self.weights) + 1, *x.shape)
        past = Append.apply(outputs, None, x)
        for w in self.weights:
            x = x + self.sublayer([x])
            x = x + self.sublayer([x])
            past = Append.apply(outputs, past, x)
            x = torch.tensordot(w, past, 1)
        return x


class Append(torch.autograd.Function):
    """outputs[: l + 1] once x is in its last place, without a copy of those before, which `past` are."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, past: Tensor | None, x: Tensor) -> Tensor:
        l = 0 if past is None else len(past)
        # `data` has a version of its own: autograd is not to see that what it keeps is written beside
        outputs.data[l].copy_(x)
        return outputs.data[: l + 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return None, grad[:-1] if len(grad) > 1 else None, grad[-1]


# whole depths of other packages: by name, made of a width, a number of sub-layers, and the sub-layer
DEPTHS: dict[str, Callable[..., nn.Module]] = {
    "hyper-connections": HyperConnections,
    "denseformer's": DenseFormer,
}
