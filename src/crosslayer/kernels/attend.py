"""Attention over depth: one pass over the sources, for one query or for all of a block's.

    r_l = rsqrt(mean(X_l²) + eps),   z_sl = r_l ⟨Q_s, X_l⟩,   p_s = softmax_l(z_s),   out_s = Σ_l p_sl X_l
    reads L·D, writes S·D elements a token: the softmax over sources is kept up to date source by source

    backward:   a_sl = ⟨dout_s, X_l⟩,   dz_sl = p_sl (a_sl − Σ_j p_sj a_sj + dlse_s)
    dX_l = Σ_s p_sl dout_s + dz_sl r_l (Q_s − z_sl r_l X_l/D),   dQ_s = Σ_tokens Σ_l dz_sl r_l X_l
    reads (L + S)·D, writes L·D; rstd and z are saved, (S + 1)·L numbers a token

Where a norm follows (`norm`) dout is the gradient of what is normed, and to have it out must be whole: the backward's
first pass sums out again, and the second takes a_l − Σ_j p_j a_j as ⟨dout, X_l − out⟩. So out is not saved, and the
sources are read no more often for it.
Where a token's rows do not fit the registers (`launch.HELD`) the backward reads the sources twice, then from cache.
Queries go through in groups of `GROUP`: the sources are read once for each group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec
from . import launch
from .norm import affine, given, keep, normalised, pair, parameters_back, parts, through, totals

GROUP = 4  # queries a program attends with at once


def depth_attention(
    X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> Tensor:
    """`ops.attend`. X: L x [B T D].  q: [D].  ->  [B T D]."""
    return torch.ops.crosslayer.attend(X, q.float()[None], eps, *given(norm))[0].squeeze(0)


def attend_ahead(X: tuple[Tensor, ...], Q: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`ops.attend_ahead`. X: L x [B T D].  Q: [S D].  ->  [S B T D], and lse [S B T]."""
    groups = [
        torch.ops.crosslayer.attend(X, q, eps, *given(None))[:2] for q in Q.float().split(GROUP)
    ]
    out, lse = (
        parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*groups, strict=True)
    )
    return out, lse


def moves(N: int, D: int, L: int, S: int, size: int, parameters: int = 0) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    forward = N * D * (L + S) * size + 4 * D * (S + parameters)
    return forward, N * D * (2 * L + S) * size + 8 * D * S + parameters_back(D, parameters)


@triton.jit
def attend_forward(
    X, Q, weight, bias, out, lse, z, rstd, N, D, eps, norm_eps, L: tl.constexpr, S: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    if weight is not None:
        w, b = affine(weight, bias, d, D)
    queries = ()
    for s in tl.static_range(S):
        queries = queries + (tl.load(Q + s * D + d, mask=d < D, other=0.0),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        top, mass, mean = (), (), ()
        for l in tl.static_range(L):
            x = tl.load(X[l] + t * D + d, mask=d < D, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            tl.store(rstd + t * L + l, r)
            tops, masses, means = (), (), ()
            for s in tl.static_range(S):
                score = r * tl.sum(queries[s] * x, 0)
                tl.store(z + (t * S + s) * L + l, score)
                if l == 0:
                    tops, masses, means = (
                        tops + (score,),
                        masses + (tl.full([], 1.0, tl.float32),),
                        means + (x,),
                    )
                else:
                    higher = tl.maximum(top[s], score)
                    fade, p = tl.exp(top[s] - higher), tl.exp(score - higher)
                    tops = tops + (higher,)
                    masses = masses + (mass[s] * fade + p,)
                    means = means + (mean[s] * fade + p * x,)
            top, mass, mean = tops, masses, means
        for s in tl.static_range(S):
            row = (tl.cast(s, tl.int64) * N + t) * D
            new = mean[s] / mass[s]
            if weight is not None:
                new, _ = normalised(new, d, D, norm_eps, CENTRED)
                new = new * w + b
            tl.store(out + row + d, new.to(out.dtype.element_ty), mask=d < D)
            tl.store(lse + s * N + t, top[s] + tl.log(mass[s]))


@triton.jit
def attend_backward(
    X, Q, weight, z, rstd, dout, dlse, dX, dQ, dweight, dbias, N, D, norm_eps, L: tl.constexpr, S: tl.constexpr,
    CENTRED: tl.constexpr, HOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    if weight is not None:
        w, _ = affine(weight, None, d, D)
        dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    queries, sums = (), ()
    for s in tl.static_range(S):
        queries = queries + (tl.load(Q + s * D + d, mask=d < D, other=0.0),)
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        douts, out, top, mass, mean, held, a = (), (), (), (), (), (), ()
        for s in tl.static_range(S):
            row = (tl.cast(s, tl.int64) * N + t) * D
            douts = douts + (tl.load(dout + row + d, mask=d < D, other=0.0).to(tl.float32),)
            if weight is not None:
                out = out + (tl.zeros([BLOCK], tl.float32),)
            highest = tl.load(z + (t * S + s) * L)
            for l in tl.static_range(1, L):
                highest = tl.maximum(highest, tl.load(z + (t * S + s) * L + l))
            total = tl.exp(tl.load(z + (t * S + s) * L) - highest)
            for l in tl.static_range(1, L):
                total += tl.exp(tl.load(z + (t * S + s) * L + l) - highest)
            top, mass = top + (highest,), mass + (total,)
            # what is taken from a_sl: its mean under p, less the gradient of lse
            mean = mean + (-tl.load(dlse + s * N + t),)
        for l in tl.static_range(L):
            x = tl.load(X[l] + t * D + d, mask=d < D, other=0.0)
            if HOLD:
                held = held + (x,)
            means, outs = (), ()
            for s in tl.static_range(S):
                if weight is not None:
                    p = tl.exp(tl.load(z + (t * S + s) * L + l) - top[s]) / mass[s]
                    means, outs = means + (mean[s],), outs + (out[s] + p * x.to(tl.float32),)
                else:
                    a_sl = tl.sum(douts[s] * x.to(tl.float32), 0)
                    a = a + (a_sl,)
                    means = means + (
                        mean[s]
                        + tl.exp(tl.load(z + (t * S + s) * L + l) - top[s]) / mass[s] * a_sl,
                    )
            mean, out = means, outs
        if weight is not None:
            through_norm = ()
            for s in tl.static_range(S):
                new, r = normalised(out[s], d, D, norm_eps, CENTRED)
                dw += douts[s] * new
                db += douts[s]
                through_norm = through_norm + (through(douts[s] * w, new, r, d, D, CENTRED),)
            douts = through_norm
        for l in tl.static_range(L):
            x = held[l] if HOLD else tl.load(X[l] + t * D + d, mask=d < D, other=0.0)
            x = x.to(tl.float32)
            r = tl.load(rstd + t * L + l)
            dx, more = tl.zeros([BLOCK], tl.float32), ()
            for s in tl.static_range(S):
                z_sl = tl.load(z + (t * S + s) * L + l)
                p = tl.exp(z_sl - top[s]) / mass[s]
                dz = p * (
                    (a[l * S + s] if weight is None else tl.sum(douts[s] * (x - out[s]), 0))
                    - mean[s]
                )
                dx += p * douts[s] + (dz * r) * (queries[s] - (z_sl * r / D) * x)
                more = more + (sums[s] + (dz * r) * x,)
            sums = more
            tl.store(dX[l] + t * D + d, dx.to(dX[l].dtype.element_ty), mask=d < D)
    for s in tl.static_range(S):
        tl.store(dQ + (tl.program_id(0).to(tl.int64) * S + s) * D + d, sums[s], mask=d < D)
    if weight is not None:
        keep(dw, db, dweight, dbias, d, D)


@torch.library.custom_op("crosslayer::attend", mutates_args=())
def _attend(
    X: Sequence[Tensor],
    Q: Tensor,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    X, (Q, *affine) = [x.contiguous() for x in X], (t.contiguous() for t in (Q, *affine))
    out, lse, z, rstd = _room(X, Q)
    N, D, size = launch.tokens(X[0]), X[0].shape[-1], launch.block(X[0].shape[-1])
    launch.launch(
        attend_forward, (launch.programs(N, Q),), X, Q, *pair(affine), out, lse, z, rstd, N, D, eps, norm_eps,
        L=len(X), S=len(Q), CENTRED=centred, BLOCK=size, num_warps=launch.warps((len(Q) + 1) * size),
    )  # fmt: skip
    return out, lse, z, rstd


@_attend.register_fake
def _(
    X: Sequence[Tensor],
    Q: Tensor,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(X, Q)


def _room(X: Sequence[Tensor], Q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lead, L, S = X[0].shape[:-1], len(X), Q.shape[0]
    lse, z, rstd = Q.new_empty(S, *lead), Q.new_empty(*lead, S, L), Q.new_empty(*lead, L)
    return X[0].new_empty(S, *X[0].shape), lse, z, rstd


@torch.library.custom_op("crosslayer::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, dlse: Tensor, X: Sequence[Tensor], Q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor],
    norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:  # fmt: skip
    X, (Q, dout, dlse, *affine) = (
        [x.contiguous() for x in X],
        (t.contiguous() for t in (Q, dout, dlse, *affine)),
    )
    N, D, size = launch.tokens(X[0]), X[0].shape[-1], launch.block(X[0].shape[-1])
    count = launch.programs(N, Q)
    dX, dQ, kept = (
        [torch.empty_like(x) for x in X],
        launch.part(Q, count, *Q.shape),
        parts(affine, count),
    )
    launch.launch(
        attend_backward, (count,), X, Q, pair(affine)[0], z, rstd, dout, dlse, dX, dQ, *pair(kept), N, D, norm_eps,
        L=len(X), S=len(Q), CENTRED=centred, HOLD=launch.holds(X, size, rows=3 * len(Q) + 3 + 2 * len(affine)),
        BLOCK=size, num_warps=launch.warps((2 * len(Q) + 2) * size),
    )  # fmt: skip
    return dX, launch.total(dQ, 0), totals(kept, affine)


@_attend_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor, X: Sequence[Tensor], Q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor],
    norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:  # fmt: skip
    return (
        [x.new_empty(x.shape) for x in X],
        Q.new_empty(Q.shape),
        [p.new_empty(p.shape) for p in affine],
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    X, Q, _, affine, *ctx.rest = inputs
    _, _, z, rstd = output
    ctx.mark_non_differentiable(z, rstd)
    ctx.L = len(X)
    ctx.save_for_backward(Q, z, rstd, *X, *affine)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Any, ...]:
    Q, z, rstd, *rows = ctx.saved_tensors
    X, affine = rows[: ctx.L], rows[ctx.L :]
    dX, dQ, daffine = torch.ops.crosslayer.attend_backward(
        dout, dlse, X, Q, z, rstd, affine, *ctx.rest
    )
    return dX, dQ, None, daffine, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
