"""Other packages' implementations of the same ops: one row each, imported when it is measured.

A peer gets the tensors that our op gets, laid out beforehand as it expects them: no copy of ours is
in its time.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import NotMeasured

Tensors = list[Tensor]
Layout = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]


def _same_layout(rows: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    return rows, weights


def _append_key_norm(rows: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    """Append the weight of the keys' norm, all ones: ours is multiplied into the query."""
    return rows, [*weights, torch.ones_like(weights[0])]


def _stack_and_append_key_norm(rows: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    return [torch.stack(rows)], [*weights, torch.ones_like(weights[0])]


def _append_write(rows: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    """Append a pending write and its coefficients."""
    y = rows[0][..., 0, :].clone()
    return [*rows, y], [*weights, weights[0].clone()]


class Peer(NamedTuple):
    """Another package's implementation of one of our ops.

    Args:
        op: a key of `benchmarks.cases.OPS`.
        package: its name on PyPI.
        module: the module to import.
        run: calls it, given the module, rows and weights.
        change_layout: turns our rows and weights into those that `run` takes.
    """

    op: str
    package: str
    module: str
    run: Callable[[Any, Tensors, Tensors], tuple[Tensor, ...]]
    change_layout: Layout = _same_layout


PEERS = (
    Peer(
        "add_norm",
        "liger-kernel",
        "liger_kernel.transformers.functional",
        lambda m, x, w: m.liger_fused_add_rms_norm(x[1], x[0], w[0], 1e-6, in_place=False),
    ),
    Peer(
        "depth_attention",
        "liger-kernel",
        "liger_kernel.transformers.functional",
        lambda m, x, w: (m.liger_attn_res(x[0], w[0], w[1]),),
        _stack_and_append_key_norm,
    ),
    Peer(
        "depth_attention",
        "flash-linear-attention",
        "fla.ops.attnres",
        lambda m, x, w: (m.fused_attnres(w[0], x, w[1]),),
        _append_key_norm,
    ),
    # Their mixtures include the pending write, which our `write_norm_project` does.
    Peer(
        "width_connection",
        "liger-kernel",
        "liger_kernel.transformers.functional",
        lambda m, x, w: (m.liger_mhc_pre(x[0], w[0]), m.liger_mhc_post_res(x[0], x[1], w[2], w[1])),
        _append_write,
    ),
    Peer(
        "sinkhorn",
        "hyper-connections",
        "hyper_connections.manifold_constrained_hyper_connections",
        lambda m, _, w: (m.sinkhorn_knopps(w[0], 20),),
    ),
)


def import_peer(package: str, module: str) -> Any:
    """A module of another package, whose name on PyPI is `package`.

    Raises:
        NotMeasured: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotMeasured(f"not installed: {package}, for want of {error.name}") from None


class HyperConnections(nn.Module):
    """The `hyper-connections` package around every sub-layer, as in its README; four streams."""

    def __init__(self, dim: int, depth: int, sublayer: Callable[..., Tensor], streams: int = 4):
        super().__init__()
        peer = import_peer("hyper-connections", "hyper_connections").HyperConnections
        self.expand, self.reduce = peer.get_expand_reduce_stream_functions(streams)
        self.sites = nn.ModuleList(peer(streams, dim=dim, layer_index=k) for k in range(depth))
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        streams = self.expand(x)
        for site in self.sites:
            read, write = site(streams)
            streams = write(self.sublayer([read]))
        return self.reduce(streams)


class DenseFormer(nn.Module):
    """DenseFormer 1×1 as its authors' package computes it.

    All blocks' outputs are in one tensor, contracted after each block. A block has two sub-layers,
    each with a residual connection.
    """

    def __init__(self, dim: int, depth: int, sublayer: Callable[..., Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(k + 2)[-1] for k in range(depth // 2))
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.new_empty(len(self.weights) + 1, *x.shape)
        past = _AppendOutput.apply(outputs, None, x)
        for w in self.weights:
            x = x + self.sublayer([x])
            x = x + self.sublayer([x])
            past = _AppendOutput.apply(outputs, past, x)
            x = torch.tensordot(w, past, 1)
        return x


class _AppendOutput(torch.autograd.Function):
    """Write x into outputs[l] and return outputs[: l + 1] without a copy; `past` is outputs[:l]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, past: Tensor | None, x: Tensor) -> Tensor:
        l = 0 if past is None else len(past)
        # `data` has its own version counter: autograd must not see this write to saved memory.
        outputs.data[l].copy_(x)
        return outputs.data[: l + 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return None, grad[:-1] if len(grad) > 1 else None, grad[-1]


# Other packages' connections for the whole depth, given width, number of sub-layers, sub-layer.
DEPTHS: dict[str, Callable[..., nn.Module]] = {
    "hyper-connections": HyperConnections,
    "denseformer's": DenseFormer,
}
