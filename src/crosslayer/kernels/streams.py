"""n streams: the pending write and every mixture of them in one pass.

H'_s = H_s + β_s y, rounded as it would be stored;   x = Σ_s pre_s H'_s;   H''_c = Σ_s res[s, c] H'_s
reads (n + 1)·D, writes (n + 1)·D elements a token

backward, H' computed again:   dH'_s = pre_s dx + Σ_c res[s, c] dH''_c,   dH_s = dH'_s,   dy = Σ_s β_s dH'_s
dβ_s = ⟨dH'_s, y⟩,   dpre_s = ⟨dx, H'_s⟩,   dres[s, c] = ⟨dH''_c, H'_s⟩
reads (2n + 2)·D, writes (n + 1)·D; nothing is saved but what came in
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


def carry(H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.carry`. H: [B T n D].  y: [B T D].  beta, pre: [B T n].  res: [B T n n].  ->  [B T D], [B T n D]."""
    lead, n = H.shape[:-2], H.shape[-2]
    beta, pre, res = beta.float().expand(*lead, n), pre.float().expand(*lead, n), res.float().expand(*lead, n, n)
    return torch.ops.crosslayer.carry(H, y, beta, pre, res)


def moves(N: int, D: int, n: int, size: int) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    coefficients = 4 * N * (2 * n + n * n)
    return N * D * (2 * n + 2) * size + coefficients, N * D * (3 * n + 3) * size + 2 * coefficients


@triton.jit
def carry_forward(H, y, beta, pre, res, x, out, D, n: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y_t = tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    read, streams = tl.zeros([BLOCK], tl.float32), ()
    for s in tl.static_range(n):
        h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
        h = (h + tl.load(beta + t * n + s) * y_t).to(H.dtype.element_ty).to(tl.float32)
        read += tl.load(pre + t * n + s) * h
        streams = streams + (h,)
    tl.store(x + t * D + d, read.to(x.dtype.element_ty), mask=d < D)
    for c in tl.static_range(n):
        mixed = tl.zeros([BLOCK], tl.float32)
        for s in tl.static_range(n):
            mixed += tl.load(res + (t * n + s) * n + c) * streams[s]
        tl.store(out + (t * n + c) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def carry_backward(
    H, y, beta, pre, res, dx, dout, dH, dy, dbeta, dpre, dres, D, n: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(1) * tl.num_programs(0) + t
    y_t = tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    dx_t = tl.load(dx + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    dy_t, douts = tl.zeros([BLOCK], tl.float32), ()
    for c in tl.static_range(n):
        douts = douts + (tl.load(dout + (t * n + c) * D + d, mask=d < D, other=0.0).to(tl.float32),)
    for s in tl.static_range(n):
        h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
        b = tl.load(beta + t * n + s)
        h = (h + b * y_t).to(H.dtype.element_ty).to(tl.float32)
        dh = tl.load(pre + t * n + s) * dx_t
        tl.store(dpre + own * n + s, tl.sum(dx_t * h, 0))
        for c in tl.static_range(n):
            dh += tl.load(res + (t * n + s) * n + c) * douts[c]
            tl.store(dres + (own * n + s) * n + c, tl.sum(douts[c] * h, 0))
        tl.store(dbeta + own * n + s, tl.sum(dh * y_t, 0))
        dy_t += b * dh
        tl.store(dH + (t * n + s) * D + d, dh.to(dH.dtype.element_ty), mask=d < D)
    tl.store(dy + t * D + d, dy_t.to(dy.dtype.element_ty), mask=d < D)


def _cut(n: int, D: int) -> int:
    # so much of a row that the n streams of a piece fit the registers
    return launch.block(D, max(256, launch.ROW * 4 // triton.next_power_of_2(n)))


@torch.library.custom_op("crosslayer::carry", mutates_args=())
def _carry(H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    H, y, beta, pre, res = (t.contiguous() for t in (H, y, beta, pre, res))
    n, D = H.shape[-2:]
    x, out, size = y.new_empty(y.shape, dtype=H.dtype), torch.empty_like(H), _cut(n, D)
    grid = (launch.tokens(y), triton.cdiv(D, size))
    launch.launch(
        carry_forward, grid, H, y, beta, pre, res, x, out, D, n=n, BLOCK=size, num_warps=launch.warps(n * size // 2)
    )  # fmt: skip
    return x, out


@_carry.register_fake
def _(H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape, dtype=H.dtype), H.new_empty(H.shape)


@torch.library.custom_op("crosslayer::carry_backward", mutates_args=())
def _carry_backward(
    dx: Tensor, dout: Tensor, H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dout, H, y, beta, pre, res = (t.contiguous() for t in (dx, dout, H, y, beta, pre, res))
    n, D = H.shape[-2:]
    size = _cut(n, D)
    grid = (launch.tokens(y), triton.cdiv(D, size))
    dH, dy = torch.empty_like(H), torch.empty_like(y)
    dbeta, dpre, dres = (launch.part(y, grid[1], *w.shape) for w in (beta, pre, res))
    launch.launch(
        carry_backward, grid, H, y, beta, pre, res, dx, dout, dH, dy, dbeta, dpre, dres, D, n=n, BLOCK=size,
        num_warps=launch.warps(n * size // 2),
    )  # fmt: skip
    return dH, dy, launch.total(dbeta, 0), launch.total(dpre, 0), launch.total(dres, 0)


@_carry_backward.register_fake
def _(
    dx: Tensor, dout: Tensor, H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dH, dy, dbeta, dpre, dres = (t.new_empty(t.shape) for t in (H, y, beta, pre, res))
    return dH, dy, dbeta, dpre, dres


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Any, ...]:
    return torch.ops.crosslayer.carry_backward(dx, dout, *ctx.saved_tensors)


_carry.register_autograd(_differentiate, setup_context=_save)
