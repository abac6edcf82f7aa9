"""Sinkhorn's normalisation with all its rounds in registers, a few matrices a program.

M ← softmax(z) + eps;   M ← M / (Σ_rows M + eps);   then (rounds − 1) times over columns and over rows
reads n², writes n² numbers a matrix

backward, exact: of M' = M/(s + eps), s the sum along an axis,   dM = (dM' − Σ dM' M')/(s + eps)   along that axis.
The rounds are run again, in chunks of CHUNK that are kept in registers: each chunk starts from the logits, so that
nothing is saved and no round is inverted. Reads 2n², writes n².
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

CHUNK = 4  # rounds whose matrices the backward keeps at once


def sinkhorn(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """`ops.sinkhorn`. logits: [… n n].  ->  the same shape."""
    return torch.ops.crosslayer.sinkhorn(logits, rounds, eps)


def moves(N: int, n: int, size: int = 4) -> tuple[int, int]:
    """Bytes that forward and backward must move for N matrices of `size` bytes a number."""
    return 2 * N * n * n * size, 3 * N * n * n * size


@triton.jit
def divide(M, s, on):
    # lanes that are off hold 0 and stay so
    return M / tl.where(on, s, 1.0)


@triton.jit
def soften(z, on):
    """softmax over the last axis of the lanes that are on."""
    z = tl.where(on, z, -1e30)
    e = tl.where(on, tl.exp(z - tl.max(z, 2, keep_dims=True)), 0.0)
    return divide(e, tl.sum(e, 2, keep_dims=True), on)


@triton.jit
def undo(dM, M, s, axis: tl.constexpr, on):
    """The gradient of what was divided by s, which is a sum along the axis and eps, given that of the quotient M."""
    return divide(dM - tl.sum(dM * M, axis, keep_dims=True), s, on)


@triton.jit
def sinkhorn_forward(
    z, out, N, rounds, eps, n: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None, None]
    i, j = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    on = (m < N) & (i < n) & (j < n)
    at = (m * n + i) * n + j
    M = soften(tl.load(z + at, mask=on, other=0.0).to(tl.float32), on)
    M = tl.where(on, M + eps, 0.0)
    M = divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
    for _ in range(1, rounds):
        M = divide(M, tl.sum(M, 2, keep_dims=True) + eps, on)
        M = divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
    tl.store(out + at, M.to(out.dtype.element_ty), mask=on)


@triton.jit
def sinkhorn_backward(
    z, dout, dz, N, rounds, eps, n: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None, None]
    i, j = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    on = (m < N) & (i < n) & (j < n)
    at = (m * n + i) * n + j
    P = soften(tl.load(z + at, mask=on, other=0.0).to(tl.float32), on)
    first = tl.where(on, P + eps, 0.0)
    mass = tl.sum(first, 1, keep_dims=True) + eps
    first = divide(first, mass, on)
    dM = tl.load(dout + at, mask=on, other=0.0).to(tl.float32)
    chunks = (rounds - 1 + CHUNK - 1) // CHUNK
    for back in range(0, chunks):
        start = (chunks - 1 - back) * CHUNK
        M = first
        for _ in range(0, start):
            M = divide(M, tl.sum(M, 2, keep_dims=True) + eps, on)
            M = divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
        kept = ()
        for _ in tl.static_range(CHUNK):
            over_columns = tl.sum(M, 2, keep_dims=True) + eps
            half = divide(M, over_columns, on)
            over_rows = tl.sum(half, 1, keep_dims=True) + eps
            M = divide(half, over_rows, on)
            kept = kept + ((over_columns, half, over_rows, M),)
        for k in tl.static_range(CHUNK):
            over_columns, half, over_rows, full = kept[CHUNK - 1 - k]
            d = undo(undo(dM, full, over_rows, 1, on), half, over_columns, 2, on)
            # the last chunk may have fewer rounds
            dM = tl.where(start + CHUNK - 1 - k < rounds - 1, d, dM)
    dM = undo(dM, first, mass, 1, on)
    dP = P * (dM - tl.sum(P * dM, 2, keep_dims=True))
    tl.store(dz + at, dP.to(dz.dtype.element_ty), mask=on)


def _tile(n: int) -> tuple[int, int]:
    side = triton.next_power_of_2(n)
    return max(1, 1024 // side**2), side


@torch.library.custom_op("crosslayer::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    logits = logits.contiguous()
    n, out, (tile, side) = logits.shape[-1], torch.empty_like(logits), _tile(logits.shape[-1])
    N = logits.numel() // n**2
    launch.launch(
        sinkhorn_forward, (triton.cdiv(N, tile),), logits, out, N, rounds, eps, n=n, TILE=tile, SIDE=side, num_warps=4
    )  # fmt: skip
    return out


@_sinkhorn.register_fake
def _(logits: Tensor, rounds: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("crosslayer::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(dout: Tensor, logits: Tensor, rounds: int, eps: float) -> Tensor:
    logits, dout = logits.contiguous(), dout.contiguous()
    n, dz, (tile, side) = logits.shape[-1], torch.empty_like(logits), _tile(logits.shape[-1])
    N = logits.numel() // n**2
    launch.launch(
        sinkhorn_backward, (triton.cdiv(N, tile),), logits, dout, dz, N, rounds, eps, n=n, TILE=tile, SIDE=side,
        CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return dz


@_sinkhorn_backward.register_fake
def _(dout: Tensor, logits: Tensor, rounds: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, ctx.rounds, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return (
        torch.ops.crosslayer.sinkhorn_backward(dout, *ctx.saved_tensors, ctx.rounds, ctx.eps),
        None,
        None,
    )


_sinkhorn.register_autograd(_differentiate, setup_context=_save)
