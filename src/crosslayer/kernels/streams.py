"""n streams: every mixture of them in one pass, and the norm of the one that is read.

x = Σ_s pre_s H_s;   H'_c = Σ_s res[s, c] H_s
reads n·D, writes (n + 1)·D elements a token

backward:   dH_s = pre_s dx + Σ_c res[s, c] dH'_c,   dpre_s = ⟨dx, H_s⟩,   dres[s, c] = ⟨dH'_c, H_s⟩
reads (2n + 1)·D, writes n·D; nothing is saved but what came in

Where a norm follows (`norm`) a token's x must be whole: rows longer than `_cut` are normed after the kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec, apply_norm
from . import launch
from .norm import affine, given, keep, normalised, pair, parameters_back, parts, through, totals


def width_connection(
    H: Tensor, pre: Tensor, res: Tensor, norm: NormSpec | None = None
) -> tuple[Tensor, Tensor]:
    """`ops.carry`. H: [B T n D].  pre: [B T n].  res: [B T n n].  ->  [B T D], [B T n D]."""
    *lead, n, D = H.shape
    taken, rest = (norm, None) if _cut(n, D) >= D else (None, norm)
    pre, res = pre.float().expand(*lead, n), res.float().expand(*lead, n, n)
    x, H = torch.ops.crosslayer.carry(H, pre, res, *given(taken))
    return apply_norm(x, rest), H


def moves(N: int, D: int, n: int, size: int, parameters: int = 0) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    coefficients = 4 * N * (n + n * n)
    forward = N * D * (2 * n + 1) * size + coefficients + 4 * D * parameters
    return forward, N * D * (3 * n + 1) * size + 2 * coefficients + parameters_back(D, parameters)


@triton.jit
def carry_forward(
    H, pre, res, weight, bias, x, out, N, D, eps, n: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if weight is not None:
        w, b = affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        read, streams = tl.zeros([BLOCK], tl.float32), ()
        for s in tl.static_range(n):
            h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
            read += tl.load(pre + t * n + s) * h
            streams = streams + (h,)
        if weight is not None:
            read, _ = normalised(read, d, D, eps, CENTRED)
            read = read * w + b
        tl.store(x + t * D + d, read.to(x.dtype.element_ty), mask=d < D)
        for c in tl.static_range(n):
            mixed = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(n):
                mixed += tl.load(res + (t * n + s) * n + c) * streams[s]
            tl.store(out + (t * n + c) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def carry_backward(
    H, pre, res, weight, dx, dout, dH, dpre, dres, dweight, dbias, N, D, eps, n: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if weight is not None:
        w, _ = affine(weight, None, d, D)
        dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        own = tl.program_id(1) * tl.cast(N, tl.int64) + t
        dx_t = tl.load(dx + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        streams, douts = (), ()
        for s in tl.static_range(n):
            streams = streams + (tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0),)
        if weight is not None:
            read = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(n):
                read += tl.load(pre + t * n + s) * streams[s].to(tl.float32)
            read, r = normalised(read, d, D, eps, CENTRED)
            dw += dx_t * read
            db += dx_t
            dx_t = through(dx_t * w, read, r, d, D, CENTRED)
        for c in tl.static_range(n):
            douts = douts + (tl.load(dout + (t * n + c) * D + d, mask=d < D, other=0.0),)
        for s in tl.static_range(n):
            h = streams[s].to(tl.float32)
            dh = tl.load(pre + t * n + s) * dx_t
            tl.store(dpre + own * n + s, tl.sum(dx_t * h, 0))
            for c in tl.static_range(n):
                dh_c = douts[c].to(tl.float32)
                dh += tl.load(res + (t * n + s) * n + c) * dh_c
                tl.store(dres + (own * n + s) * n + c, tl.sum(dh_c * h, 0))
            tl.store(dH + (t * n + s) * D + d, dh.to(dH.dtype.element_ty), mask=d < D)
    if weight is not None:
        keep(dw, db, dweight, dbias, d, D)


def _cut(n: int, D: int) -> int:
    # so much of a row that the n streams of a piece fit the registers
    return launch.block(D, max(256, launch.ROW * 4 // triton.next_power_of_2(n)))


@torch.library.custom_op("crosslayer::carry", mutates_args=())
def _carry(
    H: Tensor, pre: Tensor, res: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    H, pre, res, *affine = (t.contiguous() for t in (H, pre, res, *affine))
    n, D = H.shape[-2:]
    x, out, size = H.new_empty(*H.shape[:-2], D), torch.empty_like(H), _cut(n, D)
    N = launch.tokens(x)
    launch.launch(
        carry_forward, (_programs(N, affine, H), triton.cdiv(D, size)), H, pre, res, *pair(affine), x, out, N, D, eps,
        n=n, CENTRED=centred, BLOCK=size, num_warps=launch.warps(n * size // 2),
    )  # fmt: skip
    return x, out


def _programs(N: int, affine: Sequence[Tensor], like: Tensor) -> int:
    # one a token, but where they keep parts of a gradient
    return launch.programs(N, like) if affine else N


@_carry.register_fake
def _(
    H: Tensor, pre: Tensor, res: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    return H.new_empty(*H.shape[:-2], H.shape[-1]), H.new_empty(H.shape)


@torch.library.custom_op("crosslayer::carry_backward", mutates_args=())
def _carry_backward(
    dx: Tensor,
    dout: Tensor,
    H: Tensor,
    pre: Tensor,
    res: Tensor,
    affine: Sequence[Tensor],
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dx, dout, H, pre, res, *affine = (t.contiguous() for t in (dx, dout, H, pre, res, *affine))
    n, D = H.shape[-2:]
    N, size = launch.tokens(dx), _cut(n, D)
    count, pieces = _programs(N, affine, H), triton.cdiv(D, size)
    dH, (dpre, dres), kept = (
        torch.empty_like(H),
        (launch.part(p, pieces, *p.shape) for p in (pre, res)),
        parts(affine, count),
    )
    launch.launch(
        carry_backward, (count, pieces), H, pre, res, pair(affine)[0], dx, dout, dH, dpre, dres, *pair(kept), N, D,
        eps, n=n, CENTRED=centred, BLOCK=size, num_warps=launch.warps(n * size // 2),
    )  # fmt: skip
    return dH, launch.total(dpre, 0), launch.total(dres, 0), totals(kept, affine)


@_carry_backward.register_fake
def _(
    dx: Tensor,
    dout: Tensor,
    H: Tensor,
    pre: Tensor,
    res: Tensor,
    affine: Sequence[Tensor],
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dH, dpre, dres, *daffine = (t.new_empty(t.shape) for t in (H, pre, res, *affine))
    return dH, dpre, dres, daffine


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    H, pre, res, affine, *ctx.rest = inputs
    ctx.save_for_backward(H, pre, res, *affine)


def _differentiate(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Any, ...]:
    H, pre, res, *affine = ctx.saved_tensors
    return (
        *torch.ops.crosslayer.carry_backward(dx, dout, H, pre, res, affine, *ctx.rest),
        None,
        None,
    )


_carry.register_autograd(_differentiate, setup_context=_save)
