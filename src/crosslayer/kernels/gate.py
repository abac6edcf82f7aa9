"""Kernels of `ops.gate_pool`: multi-gate residuals' read in one pass over the streams.

It writes, pools, and computes the scores of the next gate:

s'_i = s_i + β_i (y − s_i),   rounded to s's dtype;   r_i = rsqrt(mean(s'_i²) + eps)
z_i  = r_i ⟨pool, s'_i⟩,   p = softmax(z),   h = Σ p_i s'_i,   q_i = r_i ⟨score, s'_i⟩
reads (n + 1)·D, writes (n + 1)·D elements a token; the sums of all streams are computed at once

backward, from s and y alone, with s' recomputed:   a_i = ⟨dh, s'_i⟩,   dz_i = p_i (a_i − Σ p_j a_j)
ds'_i += p_i dh + r_i dz_i (pool − z_i r_i s'_i/D) + r_i dq_i (score − q_i r_i s'_i/D)
ds_i = (1 − β_i) ds'_i,   dy = Σ β_i ds'_i,   dβ_i = ⟨ds'_i, y − s_i⟩
dpool = Σ dz_i r_i s'_i,   dscore likewise
reads (2n + 2)·D, writes (n + 1)·D; saves r, z and, before a gate, q: n numbers a token each

With a fused norm dh is the gradient of the normed output, and the norm's backward needs all of h,
which the backward recomputes. Where a token's rows do not fit in registers
(`launch.REGISTER_BYTES`) it reads the streams again, from cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ops
from ..norms import NormSpec
from ..ops.dispatch import reference_of
from ..ops.manual_backward import definition_gradients
from . import launch
from .fused_norm import (
    add_affine_partial_sums,
    empty_affine_partial_sums,
    load_affine,
    load_parameter,
    norm_arguments,
    norm_of_arguments,
    norm_row,
    norm_rows_backward,
    store_affine_gradients,
    weight_and_bias,
)
from .library_op import LibraryOp
from .row_sums import pick_number, repeat_conversion, sum_in_thread, sum_partial_sums, sum_rows
from .sources import load_numbers, load_rows

MOST_STREAMS = 16  # More compile for minutes: their rows are unrolled.


def gate_pool(
    S: tuple[Tensor, ...],
    y: Tensor,
    beta: Tensor,
    pool_query: Tensor,
    gate_query: Tensor | None = None,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """`ops.gate_pool`."""
    beta = beta.float().expand(*y.shape[:-1], len(S))
    score = None if gate_query is None else gate_query.float()
    gated, h, scores, *_ = _gate_pool(
        S, y, beta, pool_query.float(), score, eps, *norm_arguments(norm)
    )
    return tuple(gated), h, None if score is None else scores


@triton.jit
def _lerp(s, y, b):
    # torch.lerp's formula, exact at both ends.
    return tl.where(b < 0.5, s + b * (y - s), y - (1 - b) * (y - s))


@triton.jit
def _gate_row(s, y, b):
    """s' of a row s in float32, rounded to its dtype."""
    return _lerp(repeat_conversion(s), y, b).to(s.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def gate_pool_forward(
    S, y, beta, pool, score, weight, bias, out, h, q, z, rstd, N, D, eps, norm_eps,
    n: tl.constexpr, SCORED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    pool_query = tl.load(pool + d, mask=d < D, other=0.0)
    if SCORED:
        score_query = tl.load(score + d, mask=d < D, other=0.0)
    if weight is not None:
        w, b = load_affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        y_t = tl.load(y + row, mask=d < D, other=0.0).to(tl.float32)
        rows = load_rows(S, 0, n, n, row, d, D)
        betas = load_numbers(beta + t * n, 0, n, n, 0.0)
        gated = ()
        products = ()
        for i in tl.static_range(n):
            new = _lerp(rows[i].to(tl.float32), y_t, betas[i]).to(out[i].dtype.element_ty)
            tl.store(out[i] + row, new, mask=d < D)
            x = new.to(tl.float32)
            gated = gated + (new,)
            products = products + (x * x, pool_query * x)
            if SCORED:
                products = products + (score_query * x,)
        sums = sum_rows(products, BLOCK)
        EACH: tl.constexpr = 2 + SCORED
        top = -float("inf")
        mass = 0.0
        pooled = tl.zeros([BLOCK], tl.float32)
        scores = ()
        for i in tl.static_range(n):
            r = tl.rsqrt(pick_number(sums, i * EACH) / D + eps)
            z_i = r * pick_number(sums, i * EACH + 1)
            tl.store(rstd + t * n + i, r)
            tl.store(z + t * n + i, z_i)
            if SCORED:
                tl.store(q + t * n + i, r * pick_number(sums, i * EACH + 2))
            top = tl.maximum(top, z_i)
            scores = scores + (z_i,)
        for i in tl.static_range(n):
            p = tl.exp(scores[i] - top)
            mass += p
            pooled += p * repeat_conversion(gated[i])
        pooled = pooled / mass
        if weight is not None:
            pooled = norm_row(pooled, w, b, d, D, norm_eps, CENTRED)
        tl.store(h + row, pooled.to(h.dtype.element_ty), mask=d < D)


@triton.jit
def _softmax(scores, n: tl.constexpr):
    """The softmax of n numbers, as a tuple."""
    top = -float("inf")
    mass = 0.0
    p = ()
    for i in tl.static_range(n):
        top = tl.maximum(top, scores[i])
    for i in tl.static_range(n):
        mass += tl.exp(scores[i] - top)
    for i in tl.static_range(n):
        p = p + (tl.exp(scores[i] - top) / mass,)
    return p


@triton.jit
def _load_gated(rows, S, row, i: tl.constexpr, y_t, betas, d, D):
    """s'_i of the `rows` in registers, or where there are none of S, from cache."""
    if len(rows) > 0:
        s = rows[i]
    else:
        s = tl.load(S[i] + row, mask=d < D, other=0.0)
    return _gate_row(s, y_t, betas[i])


@triton.jit
def _pool(rows, S, row, p, y_t, betas, d, D, BLOCK: tl.constexpr):
    """h before its norm, Σ p_i s'_i."""
    pooled = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(p)):
        pooled += p[i] * _load_gated(rows, S, row, i, y_t, betas, d, D)
    return pooled


@triton.jit
def _score_dots(rows, S, row, p, dh_t, y_t, betas, d, D, BLOCK: tl.constexpr):
    """a_i = ⟨dh, s'_i⟩, and their mean Σ p_i a_i."""
    products = ()
    mean = 0.0
    for i in tl.static_range(len(p)):
        products = products + (dh_t * _load_gated(rows, S, row, i, y_t, betas, d, D),)
    a = sum_rows(products, BLOCK)
    for i in tl.static_range(len(p)):
        mean += p[i] * pick_number(a, i)
    return a, mean


@triton.jit
def _score_gradient(u, query, score, r, x, D):
    """The gradient of x where that of score = r ⟨query, x⟩ is u / r."""
    return u * (query - (score * r / D) * x)


@triton.jit(do_not_specialize=["N"])
def gate_pool_backward(
    S, y, beta, pool, score, weight, q, z, rstd, dout, dh, dq,
    dS, dy, dbeta, dpool, dscore, dweight, dbias, N, D, norm_eps,
    n: tl.constexpr, SCORED: tl.constexpr, CENTRED: tl.constexpr, KEEP_ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    pool_query = tl.load(pool + d, mask=d < D, other=0.0)
    dpool_query = tl.zeros([BLOCK], tl.float32)
    if SCORED:
        score_query = tl.load(score + d, mask=d < D, other=0.0)
        dscore_query = tl.zeros([BLOCK], tl.float32)
    if weight is not None:
        w = load_parameter(weight, d, D)
        dw = tl.zeros([BLOCK], tl.float32)
        db = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        rows = load_rows(S, 0, n if KEEP_ROWS else 0, n, row, d, D)
        y_t = tl.load(y + row, mask=d < D, other=0.0).to(tl.float32)
        dh_t = tl.load(dh + row, mask=d < D, other=0.0).to(tl.float32)
        douts = load_rows(dout, 0, min(GROUP, n), n, row, d, D)
        betas = load_numbers(beta + t * n, 0, n, n, 0.0)
        scores = load_numbers(z + t * n, 0, n, n, 0.0)
        rs = load_numbers(rstd + t * n, 0, n, n, 0.0)
        if SCORED:
            qs = load_numbers(q + t * n, 0, n, n, 0.0)
            dqs = load_numbers(dq + t * n, 0, n, n, 0.0)
        p = _softmax(scores, n)
        if weight is not None:
            pooled = _pool(rows, S, row, p, y_t, betas, d, D, BLOCK)
            normed, gradients = norm_rows_backward(
                (pooled,), (dh_t,), (w,), d, D, norm_eps, CENTRED, BLOCK
            )
            dw += dh_t * normed[0]
            db += dh_t
            dh_t = gradients[0]
        a, mean = _score_dots(rows, S, row, p, dh_t, y_t, betas, d, D, BLOCK)
        dy_t = tl.zeros([BLOCK], tl.float32)
        dbetas = ()
        for first in tl.static_range(0, n, GROUP):
            if first > 0:
                douts = load_rows(dout, first, min(GROUP, n - first), n, row, d, D)
            if not KEEP_ROWS:  # once more, from cache
                group = load_rows(S, first, min(GROUP, n - first), n, row, d, D)
            for i in tl.static_range(first, min(first + GROUP, n)):
                s = rows[i] if KEEP_ROWS else group[i - first]
                new = _gate_row(s, y_t, betas[i])
                dnew = douts[i - first].to(tl.float32) + p[i] * dh_t
                u = p[i] * (pick_number(a, i) - mean) * rs[i]
                dnew += _score_gradient(u, pool_query, scores[i], rs[i], new, D)
                dpool_query += u * new
                if SCORED:
                    u = dqs[i] * rs[i]
                    dnew += _score_gradient(u, score_query, qs[i], rs[i], new, D)
                    dscore_query += u * new
                dy_t += betas[i] * dnew
                dbetas = dbetas + (sum_in_thread(dnew * (y_t - repeat_conversion(s)), BLOCK),)
                ds = (1 - betas[i]) * dnew
                tl.store(dS[i] + row, ds.to(dS[i].dtype.element_ty), mask=d < D)
        tl.store(dy + row, dy_t.to(dy.dtype.element_ty), mask=d < D)
        sums = sum_partial_sums(dbetas)
        k = tl.arange(0, sums.numel)
        tl.store(dbeta + t * n + k, sums, mask=k < n)
    row = tl.program_id(0).to(tl.int64) * D
    tl.store(dpool + row + d, dpool_query, mask=d < D)
    if SCORED:
        tl.store(dscore + row + d, dscore_query, mask=d < D)
    if weight is not None:
        store_affine_gradients(dw, db, dweight, dbias, d, D)


@LibraryOp
def _gate_pool(
    S: Sequence[Tensor],
    y: Tensor,
    beta: Tensor,
    pool: Tensor,
    score: Tensor | None,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    n = len(S)
    N = launch.token_count(y)
    D = y.shape[-1]
    block = launch.block_size(D)
    out, h, q, z, rstd = _empty_outputs(S, beta, score)
    launch.launch_kernel(
        gate_pool_forward, (launch.program_count(N, y),),
        S, y, beta, pool, pool if score is None else score, *weight_and_bias(affine),
        out, h, q, z, rstd, N, D, eps, norm_eps,
        n=n, SCORED=score is not None, CENTRED=centred, BLOCK=block,
        # Two programs side by side: where one waits for a sum, the other one loads.
        num_warps=launch.warp_count(2 * block if affine else block),
        max_registers=128 if affine else None,
    )  # fmt: skip
    return out, h, q, z, rstd


@_gate_pool.register_fake
def _empty_outputs(
    S: Sequence[Tensor], beta: Tensor, score: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    out = [s.new_empty(s.shape) for s in S]
    h = S[0].new_empty(S[0].shape)
    q = beta.new_empty(0 if score is None else beta.shape)
    return out, h, q, beta.new_empty(beta.shape), beta.new_empty(beta.shape)


@LibraryOp
def _gate_pool_backward(
    dout: Sequence[Tensor],
    dh: Tensor,
    dq: Tensor,
    S: Sequence[Tensor],
    y: Tensor,
    beta: Tensor,
    pool: Tensor,
    score: Tensor | None,
    q: Tensor,
    z: Tensor,
    rstd: Tensor,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    n = len(S)
    N = launch.token_count(y)
    D = y.shape[-1]
    block = launch.block_size(D)
    programs = launch.program_count(N, y)
    dS = [torch.empty_like(s) for s in S]
    dy = torch.empty_like(y)
    dbeta = torch.empty_like(beta)
    dpool = launch.empty_partial_sums(y, programs, D)
    dscore = launch.empty_partial_sums(y, programs, 0 if score is None else D)
    daffine = empty_affine_partial_sums(affine, programs)
    keep_rows = launch.fits_in_registers(S, block, rows=9 + 2 * len(affine))
    launch.launch_kernel(
        gate_pool_backward, (programs,),
        S, y, beta, pool, pool if score is None else score,
        weight_and_bias(affine)[0], q, z, rstd, dout, dh, dq,
        dS, dy, dbeta, dpool, dscore, *weight_and_bias(daffine), N, D, norm_eps,
        n=n, SCORED=score is not None, CENTRED=centred, KEEP_ROWS=keep_rows, GROUP=4,
        BLOCK=block, num_warps=launch.warp_count(2 * block),
        max_registers=128 if n <= 2 else None,  # two programs side by side, where so many suffice
    )  # fmt: skip
    dpool = launch.add_partial_sums(dpool, 0)
    dscore = launch.add_partial_sums(dscore, 0)
    return dS, dy, dbeta, dpool, dscore, add_affine_partial_sums(daffine, affine)


@_gate_pool_backward.register_fake
def _(
    S: Sequence[Tensor],
    y: Tensor,
    beta: Tensor,
    pool: Tensor,
    score: Tensor | None,
    affine: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    dS = [s.new_empty(s.shape) for s in S]
    dy = y.new_empty(y.shape)
    dbeta = beta.new_empty(beta.shape)
    dpool = pool.new_empty(pool.shape)
    dscore = pool.new_empty(0 if score is None else pool.shape[0])
    return dS, dy, dbeta, dpool, dscore, [p.new_empty(p.shape) for p in affine]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    S, y, beta, pool, score, eps, affine, norm_eps, norm_centred = inputs
    ctx.eps = eps
    ctx.norm_options = (norm_eps, norm_centred)
    _, _, q, z, rstd = output
    ctx.mark_non_differentiable(z, rstd)
    ctx.scored = score is not None
    ctx.n = len(S)
    ctx.save_for_backward(y, beta, pool, score, q, z, rstd, *S, *affine)


def _define(
    S: list[Tensor],
    y: Tensor,
    beta: Tensor,
    pool: Tensor,
    score: Tensor | None,
    eps: float,
    affine: list[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, ...]:
    norm = norm_of_arguments(affine, norm_eps, centred)
    gated, h, q = reference_of(ops.gate_pool)(tuple(S), y, beta, pool, score, eps, norm)
    return (*gated, h) if q is None else (*gated, h, q)


def _backward(ctx: Any, dout: list[Tensor], dh: Tensor, dq: Tensor, *_: Any) -> tuple[Any, ...]:
    y, beta, pool, score, q, z, rstd, *rows = ctx.saved_tensors
    S = rows[: ctx.n]
    affine = rows[ctx.n :]
    if torch.is_grad_enabled():  # create_graph
        inputs = (S, y, beta, pool, score, ctx.eps, affine, *ctx.norm_options)
        gradients = [*dout, dh]
        if ctx.scored:
            gradients.append(dq)
        return definition_gradients(_define, inputs, *gradients)
    dS, dy, dbeta, dpool, dscore, daffine = _gate_pool_backward(
        dout, dh, dq, S, y, beta, pool, score, q, z, rstd, affine, *ctx.norm_options
    )
    return dS, dy, dbeta, dpool, dscore if ctx.scored else None, None, daffine, None, None


_gate_pool.register_autograd(_backward, setup_context=_save_for_backward)
