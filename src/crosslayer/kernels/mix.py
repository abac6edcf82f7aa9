"""Weighted sums over depth: one pass over the sources, whatever their number and that of the mixtures.

out_c = Σ_l w[c, l] X_l              reads L·D, writes C·D elements a token
dX_l  = Σ_c w[c, l] dout_c           reads (L + C)·D, writes L·D
dw[c, l] = ⟨dout_c, X_l⟩             float32, a token's own; summed over tokens where w is static
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


def mix(X: tuple[Tensor, ...], w: Tensor) -> tuple[Tensor, ...]:
    """`ops.mix`. X: L x [B T D].  w: [C L], or [B T C L] a token's own.  ->  C x [B T D] in X's dtype."""
    if len(X) != w.shape[-1]:
        raise ValueError(f"mix: {len(X)} sources but weights for {w.shape[-1]}")
    if w.dim() > 2:
        w = w.expand(*X[0].shape[:-1], *w.shape[-2:])
    return tuple(torch.ops.crosslayer.mix(X, w.float()))


def moves(N: int, D: int, L: int, C: int, size: int, static: bool = False) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    w = 4 * C * L * (1 if static else N)
    return N * D * (L + C) * size + w, N * D * (2 * L + C) * size + 2 * w


@triton.jit
def mix_forward(X, w, out, D, step, L: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = ()
    for _ in tl.static_range(C):
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    for l in tl.static_range(L):
        x = tl.load(X[l] + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        more = ()
        for c in tl.static_range(C):
            more = more + (sums[c] + tl.load(w + t * step + c * L + l) * x,)
        sums = more
    for c in tl.static_range(C):
        tl.store(out[c] + t * D + d, sums[c].to(out[c].dtype.element_ty), mask=d < D)


@triton.jit
def mix_backward(X, w, dout, dX, dw, D, step, L: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = dw + (tl.program_id(1) * tl.num_programs(0) + t) * C * L
    douts = ()
    for c in tl.static_range(C):
        douts = douts + (tl.load(dout[c] + t * D + d, mask=d < D, other=0.0).to(tl.float32),)
    for l in tl.static_range(L):
        x = tl.load(X[l] + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dx = tl.zeros([BLOCK], tl.float32)
        for c in tl.static_range(C):
            dx += tl.load(w + t * step + c * L + l) * douts[c]
            tl.store(own + c * L + l, tl.sum(douts[c] * x, 0))
        tl.store(dX[l] + t * D + d, dx.to(dX[l].dtype.element_ty), mask=d < D)


@torch.library.custom_op("crosslayer::mix", mutates_args=())
def _mix(X: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    X, w = [x.contiguous() for x in X], w.contiguous()
    D, (C, L) = X[0].shape[-1], w.shape[-2:]
    out = [torch.empty_like(X[0]) for _ in range(C)]
    size = launch.block(D, launch.ROW)
    grid = (launch.tokens(X[0]), triton.cdiv(D, size))
    step = 0 if w.dim() == 2 else C * L
    launch.launch(mix_forward, grid, X, w, out, D, step, L=L, C=C, BLOCK=size, num_warps=launch.warps(size))
    return out


@_mix.register_fake
def _(X: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    return [X[0].new_empty(X[0].shape) for _ in range(w.shape[-2])]


@torch.library.custom_op("crosslayer::mix_backward", mutates_args=())
def _mix_backward(dout: Sequence[Tensor], X: Sequence[Tensor], w: Tensor) -> tuple[list[Tensor], Tensor]:
    X, w, dout = [x.contiguous() for x in X], w.contiguous(), [d.contiguous() for d in dout]
    D, (C, L) = X[0].shape[-1], w.shape[-2:]
    size = launch.block(D, launch.ROW)
    grid = (launch.tokens(X[0]), triton.cdiv(D, size))
    step = 0 if w.dim() == 2 else C * L
    dX, dw = [torch.empty_like(x) for x in X], launch.part(w, grid[1], grid[0], C, L)
    launch.launch(mix_backward, grid, X, w, dout, dX, dw, D, step, L=L, C=C, BLOCK=size, num_warps=launch.warps(size))
    return dX, launch.total(dw, *((0, 1) if w.dim() == 2 else (0,))).view(w.shape)


@_mix_backward.register_fake
def _(dout: Sequence[Tensor], X: Sequence[Tensor], w: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x.new_empty(x.shape) for x in X], w.new_empty(w.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    X, w = inputs
    ctx.save_for_backward(*X, w)


def _differentiate(ctx: Any, dout: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    *X, w = ctx.saved_tensors
    return torch.ops.crosslayer.mix_backward(dout, X, w)


_mix.register_autograd(_differentiate, setup_context=_save)
