"""Kernels of `ops.depth_attention`: attention over depth in one pass over the sources.

r_l = rsqrt(mean(X_l²) + eps),   z_l = r_l ⟨q, X_l⟩,   p = softmax_l(z),   out = Σ_l p_l X_l
reads L·D, writes D elements a token: the softmax is updated by a group of sources at a time

backward:   a_l = ⟨dout, X_l⟩,   dz_l = p_l (a_l − Σ_j p_j a_j)
dX_l = dX'_l + p_l dout + dz_l r_l (q − z_l r_l X_l/D),   dq = Σ_tokens Σ_l dz_l r_l X_l
reads (2L + 1)·D, writes L·D; saves r, z and lse = log Σ_l exp z_l, 2L + 1 numbers a token

dX'_l is the gradient of the source passed on (`ops.mix`), which is not read where autograd left it
undefined.

The backward begins with out: with a fused norm, dout is the gradient of the normed output, and the
norm's backward needs all of out. Then Σ_j p_j a_j = ⟨dout, out⟩, and the gradients of a group of
sources are computed at once. Up to 16 sources, out is not saved but computed again; from 9 on, the
rows are read twice, the second time from cache. For more, out is saved, and a launch computes the
gradients of 16 sources at most: triton takes a time to compile that grows with the cube of their
number, minutes for 49.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from .. import ops
from ..norms import NormSpec
from ..ops.dispatch import reference_of
from ..ops.manual_backward import definition_gradients, run_function
from ..ops.mix import pass_sources_on
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
from .row_sums import pick_number, repeat_conversion, sum_rows
from .sources import bucket_size, load_numbers, load_rows, pad_sources

# Sources of which one launch computes the gradients.
_MOST_GRADIENTS = 16
# A launch of the forward pass takes a pointer for each, and drivers before R530 take 4 KiB of
# arguments.
MOST_SOURCES = 256


def depth_attention(
    X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`ops.depth_attention`."""
    affine, norm_eps, centred = norm_arguments(norm)
    out, *passed = run_function(
        _DepthAttention, q.float(), eps, norm_eps, centred, len(X), *X, *affine
    )
    return out, pass_sources_on(X, passed)


def saves_output(L: int) -> bool:
    """Whether the backward pass reads out, and does not compute it again."""
    return L > _MOST_GRADIENTS


def gradient_launches(L: int) -> list[tuple[int, int]]:
    """The first source and the one after the last, of each launch of the backward pass."""
    launches = launch.ceil_div(L, _MOST_GRADIENTS)
    size = launch.ceil_div(L, launches)
    return [(first, min(first + size, L)) for first in range(0, L, size)]


# What follows is in functions, because triton joins what a branch assigns to what had the name
# before, and rows of two groups may differ: in dtype, or where no gradient was passed on.


@triton.jit
def _attend(
    X, query, z, rstd, top, mass, mean, t, first: tl.constexpr, GROUP: tl.constexpr, count, row, d,
    D, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with a group of sources."""
    k = tl.arange(0, GROUP)
    rows = load_rows(X, first, GROUP, count, row, d, D)
    products = ()
    for i in tl.static_range(GROUP):
        x = rows[i].to(tl.float32)
        products = products + (x * x, query * x)
    squares, dots = tl.split(tl.reshape(sum_rows(products, BLOCK), [GROUP, 2]))
    r = tl.rsqrt(squares / D + eps)
    scores = tl.where(first + k < count, r * dots, -float("inf"))
    tl.store(rstd + t * count + first + k, r, mask=first + k < count)
    tl.store(z + t * count + first + k, scores, mask=first + k < count)
    higher = tl.maximum(top, tl.max(scores, 0))
    fade = tl.exp(top - higher)
    p = tl.exp(scores - higher)
    mass = mass * fade + tl.sum(p, 0)
    mean = mean * fade
    for i in tl.static_range(GROUP):
        mean += pick_number(p, i) * repeat_conversion(rows[i])
    return higher, mass, mean


@triton.jit
def _attend_back(
    rows, passed, X, later, dX, query, dquery, z, rstd, dout_t, log_sum, mean,
    first: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr, count, row, d, D,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store dX of a group of sources; dquery with what the group adds."""
    if first > 0:
        passed = load_rows(later, first, GROUP, count, row, d, D)
    if not KEPT:  # once more, from cache
        rows = load_rows(X, first, GROUP, count, row, d, D)
    r_group = load_numbers(rstd, first, GROUP, count, 0.0)
    scores = load_numbers(z, first, GROUP, count, -float("inf"))
    products = ()
    for i in tl.static_range(GROUP):
        x = repeat_conversion(rows[first * KEPT + i])
        products = products + (dout_t * x,)
    a = sum_rows(products, BLOCK)
    for i in tl.static_range(GROUP):
        x = repeat_conversion(rows[first * KEPT + i])
        p = tl.exp(scores[i] - log_sum)
        u = p * (pick_number(a, i) - mean) * r_group[i]
        dx = p * dout_t + u * (query - (scores[i] * r_group[i] / D) * x)
        if later[first + i] is not None:
            dx += passed[i].to(tl.float32)
        dquery += u * x
        mask = d < D * (first + i < count)
        tl.store(dX[first + i] + row, dx.to(dX[first + i].dtype.element_ty), mask=mask)
    return dquery


@triton.jit(do_not_specialize=["N", "count"])
def depth_attention_forward(
    X, q, weight, bias, out, saved, z, rstd, lse, N, D, count, eps, norm_eps,
    L: tl.constexpr, GROUP: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    query = tl.load(q + d, mask=d < D, other=0.0)
    if weight is not None:
        w, b = load_affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        top = -float("inf")
        mass = 0.0
        mean = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(0, L, GROUP):
            if first == 0 or first < count:
                top, mass, mean = _attend(
                    X, query, z, rstd, top, mass, mean, t, first, GROUP, count, row, d, D, eps,
                    BLOCK,
                )  # fmt: skip
        mean = mean / mass
        tl.store(lse + t, top + tl.log(mass))
        if saved is not None:
            tl.store(saved + row, mean.to(saved.dtype.element_ty), mask=d < D)
        if weight is not None:
            mean = norm_row(mean, w, b, d, D, norm_eps, CENTRED)
        tl.store(out + t * D + d, mean.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N", "count", "begin", "total"])
def depth_attention_backward(
    X, q, weight, saved, z, rstd, lse, dout, later, dX, dq, dweight, dbias, N, D, count, begin,
    total, norm_eps, L: tl.constexpr, LOADED: tl.constexpr, GROUP: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of `count` of `total` sources, from `begin` on. saved: out before its norm."""
    d = tl.arange(0, BLOCK)
    query = tl.load(q + d, mask=d < D, other=0.0)
    dquery = tl.zeros([BLOCK], tl.float32)
    if weight is not None:
        w = load_parameter(weight, d, D)
    if dweight is not None:
        dw = tl.zeros([BLOCK], tl.float32)
        db = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        passed = load_rows(later, 0, GROUP, count, row, d, D)
        dout_t = tl.load(dout + row, mask=d < D, other=0.0).to(tl.float32)
        log_sum = tl.load(lse + t)
        own_z = z + t * total + begin
        own_rstd = rstd + t * total + begin
        rows = ()
        if saved is not None:
            out = tl.load(saved + row, mask=d < D, other=0.0).to(tl.float32)
        else:
            out = tl.zeros([BLOCK], tl.float32)
            for first in tl.static_range(0, L, LOADED):
                rows = load_rows(X, first, LOADED, count, row, d, D)
                scores = load_numbers(own_z, first, LOADED, count, -float("inf"))
                for i in tl.static_range(LOADED):
                    out += tl.exp(scores[i] - log_sum) * rows[i].to(tl.float32)
        if weight is not None:
            normed, gradients = norm_rows_backward(
                (out,), (dout_t,), (w,), d, D, norm_eps, CENTRED, BLOCK
            )
            if dweight is not None:
                dw += dout_t * normed[0]
                db += dout_t
            dout_t = gradients[0]
        mean = pick_number(sum_rows((dout_t * out,), BLOCK), 0)  # summed as a_l is
        for first in tl.static_range(0, L, GROUP):
            if first == 0 or first < count:
                dquery = _attend_back(
                    rows, passed, X, later, dX, query, dquery, own_z, own_rstd, dout_t, log_sum,
                    mean, first, GROUP, saved is None and L == LOADED, count, row, d, D, BLOCK,
                )  # fmt: skip
    tl.store(dq + tl.program_id(0).to(tl.int64) * D + d, dquery, mask=d < D)
    if dweight is not None:
        store_affine_gradients(dw, db, dweight, dbias, d, D)


@LibraryOp
def _depth_attention(
    X: Sequence[Tensor],
    q: Tensor,
    eps: float,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out; z, rstd and lse; out before its norm, where the backward reads it."""
    out, z, rstd, lse, saved = _empty_outputs(X, q, affine)
    N = launch.token_count(X[0])
    D = X[0].shape[-1]
    block = launch.block_size(D)
    launch.launch_kernel(
        depth_attention_forward, (launch.program_count(N, q),),
        pad_sources(X), q, *weight_and_bias(affine), out, _first_or_none(saved), z, rstd, lse,
        N, D, len(X), eps, norm_eps,
        L=bucket_size(len(X)), GROUP=min(8, bucket_size(len(X))), CENTRED=centred, BLOCK=block,
        num_warps=launch.warp_count(block),
    )  # fmt: skip
    return out, z, rstd, lse, saved


@_depth_attention.register_fake
def _empty_outputs(
    X: Sequence[Tensor], q: Tensor, affine: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    shape = X[0].shape
    L = len(X)
    z = q.new_empty(*shape[:-1], L)
    rstd = q.new_empty(*shape[:-1], L)
    saved = []
    if saves_output(L):
        # A norm's backward makes dout orthogonal to out. Without one, ⟨dout, out⟩ counts.
        saved.append((X[0] if affine else q).new_empty(shape))
    return X[0].new_empty(shape), z, rstd, q.new_empty(shape[:-1]), saved


@LibraryOp
def _depth_attention_backward(
    dout: Tensor,
    later: Sequence[Tensor | None],
    X: Sequence[Tensor],
    q: Tensor,
    saved: Sequence[Tensor],
    z: Tensor,
    rstd: Tensor,
    lse: Tensor,
    affine: Sequence[Tensor],
    norm_eps: float,
    centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    N = launch.token_count(X[0])
    D = X[0].shape[-1]
    block = launch.block_size(D)
    programs = launch.program_count(N, q)
    launches = gradient_launches(len(X))
    dX = [torch.empty_like(x) for x in X]
    dq = launch.empty_partial_sums(q, len(launches), programs, D)
    daffine = empty_affine_partial_sums(affine, programs)
    for (begin, end), dq_part in zip(launches, dq, strict=True):
        bucket = bucket_size(end - begin)
        launch.launch_kernel(
            depth_attention_backward, (programs,),
            pad_sources(X[begin:end]), q, weight_and_bias(affine)[0], _first_or_none(saved), z,
            rstd, lse, dout, pad_sources(later[begin:end]), pad_sources(dX[begin:end]), dq_part,
            *weight_and_bias(daffine if begin == 0 else []), N, D, end - begin, begin, len(X),
            norm_eps,
            L=bucket, LOADED=min(8, bucket), GROUP=4, CENTRED=centred, BLOCK=block,
            num_warps=launch.warp_count(block),
        )  # fmt: skip
    return dX, launch.add_partial_sums(dq, 0, 1), add_affine_partial_sums(daffine, affine)


def _first_or_none(tensors: Sequence[Tensor]) -> Tensor | None:
    """The only tensor of a list, or None for an empty one, as a kernel takes it."""
    return tensors[0] if tensors else None


@_depth_attention_backward.register_fake
def _(
    X: Sequence[Tensor], q: Tensor, affine: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    dX = [x.new_empty(x.shape) for x in X]
    return dX, q.new_empty(q.shape), [p.new_empty(p.shape) for p in affine]


class _DepthAttention(Function):
    """The ops above, and the sources passed on. See `ops.mix`."""

    @staticmethod
    def definition(
        q: Tensor, eps: float, norm_eps: float, centred: bool, L: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        norm = norm_of_arguments(tensors[L:], norm_eps, centred)
        out, X = reference_of(ops.depth_attention)(tensors[:L], q, eps, norm)
        return out, *X

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: see `ops.mix._DepthMix`.
        ctx, q, eps, norm_eps, centred, L, *tensors = args
        X = tensors[:L]
        affine = tensors[L:]
        out, z, rstd, lse, saved = _depth_attention(X, q, eps, affine, norm_eps, centred)
        ctx.eps = eps
        ctx.norm_eps = norm_eps
        ctx.centred = centred
        ctx.L = L
        ctx.set_materialize_grads(False)  # the kernel would read the zeros
        ctx.save_for_backward(q, z, rstd, lse, *tensors, *saved)
        return out, *X

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *later: Tensor | None) -> tuple[Any, ...]:
        q, z, rstd, lse, *tensors = ctx.saved_tensors
        saved = [tensors.pop()] if saves_output(ctx.L) else []
        options = (ctx.norm_eps, ctx.centred)
        if torch.is_grad_enabled():  # create_graph
            inputs = (q, ctx.eps, *options, ctx.L, *tensors)
            return definition_gradients(_DepthAttention.definition, inputs, dout, *later)
        X = tensors[: ctx.L]
        affine = tensors[ctx.L :]
        if dout is None:
            no_gradients = [None] * len(affine)
            return None, None, None, None, None, *later, *no_gradients
        dX, dq, daffine = _depth_attention_backward(
            dout, later, X, q, saved, z, rstd, lse, affine, *options
        )
        return dq, None, None, None, None, *dX, *daffine
