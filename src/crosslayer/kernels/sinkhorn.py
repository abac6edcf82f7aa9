"""Kernels of `ops.sinkhorn`: all rounds in registers, a few matrices in each program.

M ← softmax(z) + eps;   M ← M / (Σ_rows M + eps);   then (rounds − 1) times over columns, then rows
reads n², writes n² numbers a matrix

backward, exact: for M' = M/(s + eps), s the sum along an axis,   dM = (dM' − Σ dM' M')/(s + eps)
The rounds are recomputed in chunks of _ROUNDS_IN_REGISTERS, each from the logits on, so nothing is
saved and no round is inverted. Reads 2n², writes n².
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ops
from ..ops.dispatch import reference_of
from ..ops.manual_backward import definition_gradients
from . import launch
from .library_op import LibraryOp

_ROUNDS_IN_REGISTERS = 4  # rounds of which the backward keeps the matrices at once


def sinkhorn(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """`ops.sinkhorn`."""
    return _sinkhorn(logits, rounds, eps)


@triton.jit
def _divide(M, s, on):
    # Lanes that are off hold 0 and stay 0.
    return M / tl.where(on, s, 1.0)


@triton.jit
def _masked_softmax(z, on):
    """Softmax over the last axis of the lanes that are on."""
    z = tl.where(on, z, -1e30)
    e = tl.where(on, tl.exp(z - tl.max(z, 2, keep_dims=True)), 0.0)
    return _divide(e, tl.sum(e, 2, keep_dims=True), on)


@triton.jit
def _divide_backward(dM, M, s, axis: tl.constexpr, on):
    """The gradient of a dividend, given that of the quotient M and the divisor s = Σ_axis + eps."""
    return _divide(dM - tl.sum(dM * M, axis, keep_dims=True), s, on)


@triton.jit(do_not_specialize=["N"])
def sinkhorn_forward(
    z, out, N, rounds, eps, n: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None, None]
    i = tl.arange(0, SIDE)[None, :, None]
    j = tl.arange(0, SIDE)[None, None, :]
    on = (m < N) & (i < n) & (j < n)
    at = (m * n + i) * n + j
    M = _masked_softmax(tl.load(z + at, mask=on, other=0.0).to(tl.float32), on)
    M = tl.where(on, M + eps, 0.0)
    M = _divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
    for _ in range(1, rounds):
        M = _divide(M, tl.sum(M, 2, keep_dims=True) + eps, on)
        M = _divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
    tl.store(out + at, M.to(out.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["N"])
def sinkhorn_backward(
    z, dout, dz, N, rounds, eps,
    n: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None, None]
    i = tl.arange(0, SIDE)[None, :, None]
    j = tl.arange(0, SIDE)[None, None, :]
    on = (m < N) & (i < n) & (j < n)
    at = (m * n + i) * n + j
    P = _masked_softmax(tl.load(z + at, mask=on, other=0.0).to(tl.float32), on)
    first = tl.where(on, P + eps, 0.0)
    mass = tl.sum(first, 1, keep_dims=True) + eps
    first = _divide(first, mass, on)
    dM = tl.load(dout + at, mask=on, other=0.0).to(tl.float32)
    chunks = (rounds - 1 + CHUNK - 1) // CHUNK
    for back in range(0, chunks):
        start = (chunks - 1 - back) * CHUNK
        M = first
        for _ in range(0, start):
            M = _divide(M, tl.sum(M, 2, keep_dims=True) + eps, on)
            M = _divide(M, tl.sum(M, 1, keep_dims=True) + eps, on)
        quotients = ()
        for _ in tl.static_range(CHUNK):
            over_columns = tl.sum(M, 2, keep_dims=True) + eps
            half = _divide(M, over_columns, on)
            over_rows = tl.sum(half, 1, keep_dims=True) + eps
            M = _divide(half, over_rows, on)
            quotients = quotients + ((over_columns, half, over_rows, M),)
        for k in tl.static_range(CHUNK):
            over_columns, half, over_rows, full = quotients[CHUNK - 1 - k]
            d = _divide_backward(
                _divide_backward(dM, full, over_rows, 1, on), half, over_columns, 2, on
            )
            # The last chunk may have fewer rounds.
            dM = tl.where(start + CHUNK - 1 - k < rounds - 1, d, dM)
    dM = _divide_backward(dM, first, mass, 1, on)
    dP = P * (dM - tl.sum(P * dM, 2, keep_dims=True))
    tl.store(dz + at, dP.to(dz.dtype.element_ty), mask=on)


def _tile_sizes(n: int) -> tuple[int, int]:
    """Matrices in each program, and the lanes of a side."""
    side = launch.next_power_of_2(n)
    return max(1, 1024 // side**2), side


@LibraryOp
def _sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    out = _empty_matrices(logits)
    n = logits.shape[-1]
    N = logits.numel() // n**2
    tile, side = _tile_sizes(n)
    launch.launch_kernel(
        sinkhorn_forward, (launch.ceil_div(N, tile),),
        logits, out, N, rounds, eps, n=n, TILE=tile, SIDE=side, num_warps=4,
    )  # fmt: skip
    return out


@_sinkhorn.register_fake
def _empty_matrices(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


@LibraryOp
def _sinkhorn_backward(dout: Tensor, logits: Tensor, rounds: int, eps: float) -> Tensor:
    dz = _empty_matrices(logits)
    n = logits.shape[-1]
    N = logits.numel() // n**2
    tile, side = _tile_sizes(n)
    launch.launch_kernel(
        sinkhorn_backward, (launch.ceil_div(N, tile),),
        logits, dout, dz, N, rounds, eps, n=n, TILE=tile, SIDE=side, CHUNK=_ROUNDS_IN_REGISTERS,
        num_warps=8,
    )  # fmt: skip
    return dz


_sinkhorn_backward.register_fake(_empty_matrices)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, rounds, eps = inputs
    ctx.rounds = rounds
    ctx.eps = eps
    ctx.save_for_backward(logits)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # create_graph
        inputs = (*ctx.saved_tensors, ctx.rounds, ctx.eps)
        return definition_gradients(reference_of(ops.sinkhorn), inputs, dout)
    dlogits = _sinkhorn_backward(dout, *ctx.saved_tensors, ctx.rounds, ctx.eps)
    return dlogits, None, None


_sinkhorn.register_autograd(_backward, setup_context=_save_for_backward)
