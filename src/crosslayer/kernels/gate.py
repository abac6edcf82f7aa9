"""Multi-gate residuals' whole read in one pass over the streams: write, pool, and score for the next gate.

s'_i = s_i + β_i (y − s_i),   rounded as it is stored;   r_i = rsqrt(mean(s'_i²) + eps)
z_i  = r_i ⟨pool, s'_i⟩,   p = softmax(z),   h = Σ p_i s'_i,   q_i = r_i ⟨score, s'_i⟩
reads (n + 1)·D, writes (n + 1)·D elements a token: the softmax over streams is kept up to date stream by stream

backward, from s and y alone, s' computed again:   a_i = ⟨dh, s'_i⟩,   dz_i = p_i (a_i − Σ p_j a_j)
ds'_i += p_i dh + r_i dz_i (pool − z_i r_i s'_i/D) + r_i dq_i (score − q_i r_i s'_i/D)
ds_i = (1 − β_i) ds'_i,   dy = Σ β_i ds'_i,   dβ_i = ⟨ds'_i, y − s_i⟩,   dpool = Σ dz_i r_i s'_i, dscore likewise
reads (2n + 2)·D, writes (n + 1)·D; rstd and z are saved, 2n numbers a token

Where a norm follows (`norm`) dh is the gradient of what is normed, and to have it h must be whole: the backward's first
pass sums h again, and the second takes a_i − Σ p_j a_j as ⟨dh, s'_i − h⟩.
Where a token's rows do not fit the registers (`launch.HELD`) the backward reads the streams twice, then from cache.
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


def gate_pool(
    S: tuple[Tensor, ...], y: Tensor, beta: Tensor, pool: Tensor, score: Tensor | None = None, eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:  # fmt: skip
    """`ops.gate_pool`. S: n x [B T D].  beta: [B T n].  pool, score: [D].  ->  n x [B T D], h [B T D], q [B T n]."""
    beta = beta.float().expand(*y.shape[:-1], len(S))
    score = None if score is None else score.float()
    new, h, q, *_ = torch.ops.crosslayer.gate_pool(
        S, y, beta, pool.float(), score, eps, *given(norm)
    )
    return tuple(new), h, None if score is None else q


def moves(
    N: int, D: int, n: int, size: int, scored: bool = True, parameters: int = 0
) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    tiny, weights = 4 * N * n, 4 * D * (1 + scored)
    forward = N * D * (2 * n + 2) * size + tiny * (1 + scored) + weights + 4 * D * parameters
    backward = (
        N * D * (3 * n + 3) * size
        + tiny * (2 + scored)
        + 2 * weights
        + parameters_back(D, parameters)
    )
    return forward, backward


@triton.jit
def lerp(s, y, b):
    # torch's own, exact at both ends
    return tl.where(b < 0.5, s + b * (y - s), y - (1 - b) * (y - s))


@triton.jit
def gate_forward(
    S, y, beta, pool, score, weight, bias, out, h, q, z, rstd, N, D, eps, norm_eps, n: tl.constexpr,
    SCORED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w2 = tl.load(pool + d, mask=d < D, other=0.0)
    if SCORED:
        w1 = tl.load(score + d, mask=d < D, other=0.0)
    if weight is not None:
        w, b = affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        y_t = tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        top, mass, pooled = -float("inf"), 0.0, tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(n):
            s = tl.load(S[i] + t * D + d, mask=d < D, other=0.0).to(tl.float32)
            new = lerp(s, y_t, tl.load(beta + t * n + i)).to(out[i].dtype.element_ty)
            tl.store(out[i] + t * D + d, new, mask=d < D)
            new = new.to(tl.float32)
            r = tl.rsqrt(tl.sum(new * new, 0) / D + eps)
            z_i = r * tl.sum(w2 * new, 0)
            tl.store(z + t * n + i, z_i)
            tl.store(rstd + t * n + i, r)
            if SCORED:
                tl.store(q + t * n + i, r * tl.sum(w1 * new, 0))
            higher = tl.maximum(top, z_i)
            fade, p = tl.exp(top - higher), tl.exp(z_i - higher)
            top, mass, pooled = higher, mass * fade + p, pooled * fade + p * new
        pooled = pooled / mass
        if weight is not None:
            pooled, _ = normalised(pooled, d, D, norm_eps, CENTRED)
            pooled = pooled * w + b
        tl.store(h + t * D + d, pooled.to(h.dtype.element_ty), mask=d < D)


@triton.jit
def gate_backward(
    S, y, beta, pool, score, weight, q, z, rstd, dout, dh, dq, dS, dy, dbeta, dpool, dscore, dweight, dbias, N, D,
    norm_eps, n: tl.constexpr, SCORED: tl.constexpr, CENTRED: tl.constexpr, HOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w2 = tl.load(pool + d, mask=d < D, other=0.0)
    dw2 = tl.zeros([BLOCK], tl.float32)
    if SCORED:
        w1 = tl.load(score + d, mask=d < D, other=0.0)
        dw1 = tl.zeros([BLOCK], tl.float32)
    if weight is not None:
        w, _ = affine(weight, None, d, D)
        dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        y_t = tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dh_t = tl.load(dh + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        top, mass = -float("inf"), 0.0
        for i in tl.static_range(n):
            top = tl.maximum(top, tl.load(z + t * n + i))
        for i in tl.static_range(n):
            mass += tl.exp(tl.load(z + t * n + i) - top)
        held, a, mean = (), (), 0.0
        if weight is not None:
            pooled = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(n):
            s = tl.load(S[i] + t * D + d, mask=d < D, other=0.0)
            if HOLD:
                held = held + (s,)
            s = s.to(tl.float32)
            new = lerp(s, y_t, tl.load(beta + t * n + i)).to(S[i].dtype.element_ty).to(tl.float32)
            p = tl.exp(tl.load(z + t * n + i) - top) / mass
            if weight is not None:
                pooled += p * new
            else:
                a_i = tl.sum(dh_t * new, 0)
                a = a + (a_i,)
                mean += p * a_i
        if weight is not None:
            x, r = normalised(pooled, d, D, norm_eps, CENTRED)
            dw += dh_t * x
            db += dh_t
            dh_t = through(dh_t * w, x, r, d, D, CENTRED)
        dy_t = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(n):
            s = held[i] if HOLD else tl.load(S[i] + t * D + d, mask=d < D, other=0.0)
            s = s.to(tl.float32)
            b = tl.load(beta + t * n + i)
            new = lerp(s, y_t, b).to(S[i].dtype.element_ty).to(tl.float32)
            r, z_i = tl.load(rstd + t * n + i), tl.load(z + t * n + i)
            p = tl.exp(z_i - top) / mass
            dz = p * (a[i] - mean if weight is None else tl.sum(dh_t * (new - pooled), 0))
            dnew = tl.load(dout[i] + t * D + d, mask=d < D, other=0.0).to(tl.float32) + p * dh_t
            dnew += (dz * r) * (w2 - (z_i * r / D) * new)
            dw2 += (dz * r) * new
            if SCORED:
                dq_i = tl.load(dq + t * n + i)
                dnew += (dq_i * r) * (w1 - (tl.load(q + t * n + i) * r / D) * new)
                dw1 += (dq_i * r) * new
            dy_t += b * dnew
            tl.store(dbeta + t * n + i, tl.sum(dnew * (y_t - s), 0))
            tl.store(dS[i] + t * D + d, ((1 - b) * dnew).to(dS[i].dtype.element_ty), mask=d < D)
        tl.store(dy + t * D + d, dy_t.to(dy.dtype.element_ty), mask=d < D)
    mine = tl.program_id(0).to(tl.int64) * D
    tl.store(dpool + mine + d, dw2, mask=d < D)
    if SCORED:
        tl.store(dscore + mine + d, dw1, mask=d < D)
    if weight is not None:
        keep(dw, db, dweight, dbias, d, D)


@torch.library.custom_op("crosslayer::gate_pool", mutates_args=())
def _gate_pool(
    S: Sequence[Tensor], y: Tensor, beta: Tensor, pool: Tensor, score: Tensor | None, eps: float,
    affine: Sequence[Tensor], norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    S, (y, beta, pool, *affine) = (
        [s.contiguous() for s in S],
        (t.contiguous() for t in (y, beta, pool, *affine)),
    )
    n, N, D = len(S), launch.tokens(y), y.shape[-1]
    out, h = [torch.empty_like(s) for s in S], torch.empty_like(S[0])
    z, rstd = torch.empty_like(beta), torch.empty_like(beta)
    q = beta.new_empty(0) if score is None else torch.empty_like(beta)
    size = launch.block(D)
    launch.launch(
        gate_forward, (launch.programs(N, y),), S, y, beta, pool, pool if score is None else score.contiguous(),
        *pair(affine), out, h, q, z, rstd, N, D, eps, norm_eps, n=n, SCORED=score is not None, CENTRED=centred,
        BLOCK=size, num_warps=launch.warps(2 * size),
    )  # fmt: skip
    return out, h, q, z, rstd


@_gate_pool.register_fake
def _(
    S: Sequence[Tensor], y: Tensor, beta: Tensor, pool: Tensor, score: Tensor | None, eps: float,
    affine: Sequence[Tensor], norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, z, rstd = (beta.new_empty(beta.shape) for _ in range(3))
    out = [s.new_empty(s.shape) for s in S]
    return out, S[0].new_empty(S[0].shape), beta.new_empty(0) if score is None else q, z, rstd


@torch.library.custom_op("crosslayer::gate_pool_backward", mutates_args=())
def _gate_pool_backward(
    dout: Sequence[Tensor], dh: Tensor, dq: Tensor, S: Sequence[Tensor], y: Tensor, beta: Tensor, pool: Tensor,
    score: Tensor | None, q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor], norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    S, dout = [s.contiguous() for s in S], [s.contiguous() for s in dout]
    y, beta, pool, dh, dq, *affine = (t.contiguous() for t in (y, beta, pool, dh, dq, *affine))
    n, N, D, size = len(S), launch.tokens(y), y.shape[-1], launch.block(y.shape[-1])
    count = launch.programs(N, y)
    dS, dy, dbeta = [torch.empty_like(s) for s in S], torch.empty_like(y), torch.empty_like(beta)
    dpool, dscore = launch.part(y, count, D), launch.part(y, count, 0 if score is None else D)
    kept = parts(affine, count)
    launch.launch(
        gate_backward, (count,), S, y, beta, pool, pool if score is None else score.contiguous(), pair(affine)[0],
        q, z, rstd, dout, dh, dq, dS, dy, dbeta, dpool, dscore, *pair(kept), N, D, norm_eps, n=n,
        SCORED=score is not None, CENTRED=centred, HOLD=launch.holds(S, size, rows=9 + 2 * len(affine)), BLOCK=size,
        num_warps=launch.warps(4 * size),
    )  # fmt: skip
    return dS, dy, dbeta, launch.total(dpool, 0), launch.total(dscore, 0), totals(kept, affine)


@_gate_pool_backward.register_fake
def _(
    dout: Sequence[Tensor], dh: Tensor, dq: Tensor, S: Sequence[Tensor], y: Tensor, beta: Tensor, pool: Tensor,
    score: Tensor | None, q: Tensor, z: Tensor, rstd: Tensor, affine: Sequence[Tensor], norm_eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dscore = pool.new_empty(0 if score is None else pool.shape[0])
    dS, (dy, dbeta, dpool, *daffine) = (
        [s.new_empty(s.shape) for s in S],
        (t.new_empty(t.shape) for t in (y, beta, pool, *affine)),
    )
    return dS, dy, dbeta, dpool, dscore, daffine


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    S, y, beta, pool, score, _, affine, *ctx.rest = inputs
    _, _, q, z, rstd = output
    ctx.mark_non_differentiable(z, rstd)
    ctx.scored, ctx.n = score is not None, len(S)
    ctx.save_for_backward(y, beta, pool, score, q, z, rstd, *S, *affine)


def _differentiate(
    ctx: Any, dout: list[Tensor], dh: Tensor, dq: Tensor, *_: Any
) -> tuple[Any, ...]:
    y, beta, pool, score, q, z, rstd, *rows = ctx.saved_tensors
    S, affine = rows[: ctx.n], rows[ctx.n :]
    *grads, dscore, daffine = torch.ops.crosslayer.gate_pool_backward(
        dout, dh, dq, S, y, beta, pool, score, q, z, rstd, affine, *ctx.rest
    )
    return *grads, dscore if ctx.scored else None, None, daffine, None, None


_gate_pool.register_autograd(_differentiate, setup_context=_save)
