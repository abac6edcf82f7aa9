"""n streams: every mixture of them in one pass.

x = Σ_s pre_s H_s;   H'_c = Σ_s res[s, c] H_s
reads n·D, writes (n + 1)·D elements a token

backward:   dH_s = pre_s dx + Σ_c res[s, c] dH'_c,   dpre_s = ⟨dx, H_s⟩,   dres[s, c] = ⟨dH'_c, H_s⟩
reads (2n + 1)·D, writes n·D; nothing is saved but what came in
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


def carry(H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.carry`. H: [B T n D].  pre: [B T n].  res: [B T n n].  ->  [B T D], [B T n D]."""
    lead, n = H.shape[:-2], H.shape[-2]
    return torch.ops.crosslayer.carry(H, pre.float().expand(*lead, n), res.float().expand(*lead, n, n))


def moves(N: int, D: int, n: int, size: int) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    coefficients = 4 * N * (n + n * n)
    return N * D * (2 * n + 1) * size + coefficients, N * D * (3 * n + 1) * size + 2 * coefficients


@triton.jit
def carry_forward(H, pre, res, x, out, D, n: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read, streams = tl.zeros([BLOCK], tl.float32), ()
    for s in tl.static_range(n):
        h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
        read += tl.load(pre + t * n + s) * h
        streams = streams + (h,)
    tl.store(x + t * D + d, read.to(x.dtype.element_ty), mask=d < D)
    for c in tl.static_range(n):
        mixed = tl.zeros([BLOCK], tl.float32)
        for s in tl.static_range(n):
            mixed += tl.load(res + (t * n + s) * n + c) * streams[s]
        tl.store(out + (t * n + c) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def carry_backward(H, pre, res, dx, dout, dH, dpre, dres, D, n: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(1) * tl.num_programs(0) + t
    dx_t = tl.load(dx + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    douts = ()
    for c in tl.static_range(n):
        douts = douts + (tl.load(dout + (t * n + c) * D + d, mask=d < D, other=0.0).to(tl.float32),)
    for s in tl.static_range(n):
        h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
        dh = tl.load(pre + t * n + s) * dx_t
        tl.store(dpre + own * n + s, tl.sum(dx_t * h, 0))
        for c in tl.static_range(n):
            dh += tl.load(res + (t * n + s) * n + c) * douts[c]
            tl.store(dres + (own * n + s) * n + c, tl.sum(douts[c] * h, 0))
        tl.store(dH + (t * n + s) * D + d, dh.to(dH.dtype.element_ty), mask=d < D)


def _cut(n: int, D: int) -> int:
    # so much of a row that the n streams of a piece fit the registers
    return launch.block(D, max(256, launch.ROW * 4 // triton.next_power_of_2(n)))


@torch.library.custom_op("crosslayer::carry", mutates_args=())
def _carry(H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    H, pre, res = (t.contiguous() for t in (H, pre, res))
    n, D = H.shape[-2:]
    x, out, size = H.new_empty(*H.shape[:-2], D), torch.empty_like(H), _cut(n, D)
    grid = (launch.tokens(x), triton.cdiv(D, size))
    launch.launch(
        carry_forward, grid, H, pre, res, x, out, D, n=n, BLOCK=size, num_warps=launch.warps(n * size // 2)
    )  # fmt: skip
    return x, out


@_carry.register_fake
def _(H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    return H.new_empty(*H.shape[:-2], H.shape[-1]), H.new_empty(H.shape)


@torch.library.custom_op("crosslayer::carry_backward", mutates_args=())
def _carry_backward(dx: Tensor, dout: Tensor, H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dout, H, pre, res = (t.contiguous() for t in (dx, dout, H, pre, res))
    n, D = H.shape[-2:]
    size = _cut(n, D)
    grid = (launch.tokens(dx), triton.cdiv(D, size))
    dH, (dpre, dres) = torch.empty_like(H), (launch.part(dx, grid[1], *w.shape) for w in (pre, res))
    launch.launch(
        carry_backward, grid, H, pre, res, dx, dout, dH, dpre, dres, D, n=n, BLOCK=size,
        num_warps=launch.warps(n * size // 2),
    )  # fmt: skip
    return dH, launch.total(dpre, 0), launch.total(dres, 0)


@_carry_backward.register_fake
def _(dx: Tensor, dout: Tensor, H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dH, dpre, dres = (t.new_empty(t.shape) for t in (H, pre, res))
    return dH, dpre, dres


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Any, ...]:
    return torch.ops.crosslayer.carry_backward(dx, dout, *ctx.saved_tensors)


_carry.register_autograd(_differentiate, setup_context=_save)
