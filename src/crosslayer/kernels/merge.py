"""The second phase of block attention: what the complete sources gave, merged with the block's sum so far.

r = rsqrt(mean(x²) + eps),   z = r ⟨q, x⟩,   g = σ(z − lse),   merged = out + g (x − out)
reads 2D, writes D elements a token

backward:   dz = ⟨dmerged, x − out⟩ g (1 − g),   dout = (1 − g) dmerged,   dlse = −dz
dx = g dmerged + dz r (q − z r x/D),   dq = Σ_tokens dz r x
reads 3D, writes 2D; r and z are saved, two numbers a token

Where a norm follows (`norm`) dmerged is the gradient before it, and merged is computed again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec
from . import launch
from .gate import lerp
from .norm import affine, given, keep, normalised, pair, parameters_back, parts, through, totals


def attend_merge(
    out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> Tensor:
    """`ops.attend_merge`. out, x: [B T D].  lse: [B T].  q: [D].  ->  [B T D]."""
    return torch.ops.crosslayer.attend_merge(out, lse.float(), x, q.float(), eps, *given(norm))[0]


def moves(N: int, D: int, size: int, parameters: int = 0) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    forward = 3 * N * D * size + 4 * (D + N) + 4 * D * parameters
    return forward, 5 * N * D * size + 8 * (D + N) + parameters_back(D, parameters)


@triton.jit
def merge_forward(
    out, lse, x, q, weight, bias, merged, z, rstd, N, D, eps, norm_eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    q_d = tl.load(q + d, mask=d < D, other=0.0)
    if weight is not None:
        w, b = affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        o = tl.load(out + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x_t = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x_t * x_t, 0) / D + eps)
        z_t = r * tl.sum(q_d * x_t, 0)
        tl.store(rstd + t, r)
        tl.store(z + t, z_t)
        new = lerp(o, x_t, tl.sigmoid(z_t - tl.load(lse + t)))
        if weight is not None:
            new, _ = normalised(new, d, D, norm_eps, CENTRED)
            new = new * w + b
        tl.store(merged + t * D + d, new.to(merged.dtype.element_ty), mask=d < D)


@triton.jit
def merge_backward(
    out, lse, x, q, weight, z, rstd, dmerged, dout, dlse, dx, dq, dweight, dbias, N, D, norm_eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    q_d = tl.load(q + d, mask=d < D, other=0.0)
    dq_d = tl.zeros([BLOCK], tl.float32)
    if weight is not None:
        w, _ = affine(weight, None, d, D)
        dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        o = tl.load(out + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x_t = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dm = tl.load(dmerged + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        r, z_t = tl.load(rstd + t), tl.load(z + t)
        g = tl.sigmoid(z_t - tl.load(lse + t))
        rest = tl.sigmoid(tl.load(lse + t) - z_t)
        if weight is not None:
            new, r_new = normalised(lerp(o, x_t, g), d, D, norm_eps, CENTRED)
            dw += dm * new
            db += dm
            dm = through(dm * w, new, r_new, d, D, CENTRED)
        dz = tl.sum(dm * (x_t - o), 0) * g * rest
        tl.store(dlse + t, -dz)
        tl.store(dout + t * D + d, (rest * dm).to(dout.dtype.element_ty), mask=d < D)
        dx_t = g * dm + (dz * r) * (q_d - (z_t * r / D) * x_t)
        tl.store(dx + t * D + d, dx_t.to(dx.dtype.element_ty), mask=d < D)
        dq_d += (dz * r) * x_t
    tl.store(dq + tl.program_id(0).to(tl.int64) * D + d, dq_d, mask=d < D)
    if weight is not None:
        keep(dw, db, dweight, dbias, d, D)


@torch.library.custom_op("crosslayer::attend_merge", mutates_args=())
def _attend_merge(
    out: Tensor,
    lse: Tensor,
    x: Tensor,
    q: Tensor,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, x, q, *affine = (t.contiguous() for t in (out, lse, x, q, *affine))
    merged, z, rstd = torch.empty_like(x), torch.empty_like(lse), torch.empty_like(lse)
    N, D, size = launch.tokens(x), x.shape[-1], launch.block(x.shape[-1])
    launch.launch(
        merge_forward, (launch.programs(N, x),), out, lse, x, q, *pair(affine), merged, z, rstd, N, D, eps, norm_eps,
        CENTRED=centred, BLOCK=size, num_warps=launch.warps(size),
    )  # fmt: skip
    return merged, z, rstd


@_attend_merge.register_fake
def _(
    out: Tensor,
    lse: Tensor,
    x: Tensor,
    q: Tensor,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), lse.new_empty(lse.shape), lse.new_empty(lse.shape)


@torch.library.custom_op("crosslayer::attend_merge_backward", mutates_args=())
def _attend_merge_backward(
    dmerged: Tensor, out: Tensor, lse: Tensor, x: Tensor, q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor],
    norm_eps: float, centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dmerged, out, lse, x, q, *affine = (t.contiguous() for t in (dmerged, out, lse, x, q, *affine))
    N, D, size = launch.tokens(x), x.shape[-1], launch.block(x.shape[-1])
    count = launch.programs(N, x)
    kept = parts(affine, count)
    dout, dlse, dx, dq = (
        torch.empty_like(out),
        torch.empty_like(lse),
        torch.empty_like(x),
        launch.part(q, count, D),
    )
    launch.launch(
        merge_backward, (count,), out, lse, x, q, pair(affine)[0], z, rstd, dmerged, dout, dlse, dx, dq, *pair(kept),
        N, D, norm_eps, CENTRED=centred, BLOCK=size, num_warps=launch.warps(2 * size),
    )  # fmt: skip
    return dout, dlse, dx, launch.total(dq, 0), totals(kept, affine)


@_attend_merge_backward.register_fake
def _(
    dmerged: Tensor, out: Tensor, lse: Tensor, x: Tensor, q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor],
    norm_eps: float, centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dout, dlse, dx, dq, *daffine = (t.new_empty(t.shape) for t in (out, lse, x, q, *affine))
    return dout, dlse, dx, dq, daffine


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *rows, _, affine, norm_eps, centred = inputs
    _, z, rstd = output
    ctx.rest = norm_eps, centred
    ctx.mark_non_differentiable(z, rstd)
    ctx.save_for_backward(*rows, z, rstd, *affine)


def _differentiate(ctx: Any, dmerged: Tensor, *_: Any) -> tuple[Any, ...]:
    rows, affine = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    *grads, daffine = torch.ops.crosslayer.attend_merge_backward(dmerged, *rows, affine, *ctx.rest)
    return *grads, None, daffine, None, None


_attend_merge.register_autograd(_differentiate, setup_context=_save)
