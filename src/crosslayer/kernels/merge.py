"""The second phase of block attention: what the complete sources gave, merged with the block's sum so far.

r = rsqrt(mean(x²) + eps),   z = r ⟨q, x⟩,   g = σ(z − lse),   merged = out + g (x − out)
reads 2D, writes D elements a token

backward:   dz = ⟨dmerged, x − out⟩ g (1 − g),   dout = (1 − g) dmerged,   dlse = −dz
dx = g dmerged + dz r (q − z r x/D),   dq = Σ_tokens dz r x
reads 3D, writes 2D; r and z are saved, two numbers a token
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .gate import lerp


def attend_merge(out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float = 1e-6) -> Tensor:
    """`ops.attend_merge`. out, x: [B T D].  lse: [B T].  q: [D].  ->  [B T D]."""
    return torch.ops.crosslayer.attend_merge(out, lse.float(), x, q.float(), eps)[0]


def moves(N: int, D: int, size: int) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    return 3 * N * D * size + 4 * (D + N), 5 * N * D * size + 8 * (D + N)


@triton.jit
def merge_forward(out, lse, x, q, merged, z, rstd, N, D, eps, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    w = tl.load(q + d, mask=d < D, other=0.0)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        o = tl.load(out + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x_t = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x_t * x_t, 0) / D + eps)
        z_t = r * tl.sum(w * x_t, 0)
        tl.store(rstd + t, r)
        tl.store(z + t, z_t)
        new = lerp(o, x_t, tl.sigmoid(z_t - tl.load(lse + t)))
        tl.store(merged + t * D + d, new.to(merged.dtype.element_ty), mask=d < D)


@triton.jit
def merge_backward(out, lse, x, q, z, rstd, dmerged, dout, dlse, dx, dq, N, D, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    w = tl.load(q + d, mask=d < D, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        o = tl.load(out + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x_t = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dm = tl.load(dmerged + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        r, z_t = tl.load(rstd + t), tl.load(z + t)
        g = tl.sigmoid(z_t - tl.load(lse + t))
        rest = tl.sigmoid(tl.load(lse + t) - z_t)
        dz = tl.sum(dm * (x_t - o), 0) * g * rest
        tl.store(dlse + t, -dz)
        tl.store(dout + t * D + d, (rest * dm).to(dout.dtype.element_ty), mask=d < D)
        dx_t = g * dm + (dz * r) * (w - (z_t * r / D) * x_t)
        tl.store(dx + t * D + d, dx_t.to(dx.dtype.element_ty), mask=d < D)
        dw += (dz * r) * x_t
    tl.store(dq + tl.program_id(0).to(tl.int64) * D + d, dw, mask=d < D)


@torch.library.custom_op("crosslayer::attend_merge", mutates_args=())
def _attend_merge(out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, x, q = (t.contiguous() for t in (out, lse, x, q))
    merged, z, rstd = torch.empty_like(x), torch.empty_like(lse), torch.empty_like(lse)
    N, D, size = launch.tokens(x), x.shape[-1], launch.block(x.shape[-1])
    launch.launch(
        merge_forward, (launch.programs(N, x),), out, lse, x, q, merged, z, rstd, N, D, eps, BLOCK=size,
        num_warps=launch.warps(size),
    )  # fmt: skip
    return merged, z, rstd


@_attend_merge.register_fake
def _(out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), lse.new_empty(lse.shape), lse.new_empty(lse.shape)


@torch.library.custom_op("crosslayer::attend_merge_backward", mutates_args=())
def _attend_merge_backward(
    dmerged: Tensor, out: Tensor, lse: Tensor, x: Tensor, q: Tensor, z: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dmerged, out, lse, x, q = (t.contiguous() for t in (dmerged, out, lse, x, q))
    N, D, size = launch.tokens(x), x.shape[-1], launch.block(x.shape[-1])
    count = launch.programs(N, x)
    dout, dlse, dx, dq = torch.empty_like(out), torch.empty_like(lse), torch.empty_like(x), launch.part(q, count, D)
    launch.launch(
        merge_backward, (count,), out, lse, x, q, z, rstd, dmerged, dout, dlse, dx, dq, N, D, BLOCK=size,
        num_warps=launch.warps(2 * size),
    )  # fmt: skip
    return dout, dlse, dx, launch.total(dq, 0)


@_attend_merge_backward.register_fake
def _(
    dmerged: Tensor, out: Tensor, lse: Tensor, x: Tensor, q: Tensor, z: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return out.new_empty(out.shape), lse.new_empty(lse.shape), x.new_empty(x.shape), q.new_empty(q.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, z, rstd = output
    ctx.mark_non_differentiable(z, rstd)
    ctx.save_for_backward(*inputs[:-1], z, rstd)


def _differentiate(ctx: Any, dmerged: Tensor, *_: Any) -> tuple[Any, ...]:
    return *torch.ops.crosslayer.attend_merge_backward(dmerged, *ctx.saved_tensors), None


_attend_merge.register_autograd(_differentiate, setup_context=_save)
