"""Kernels of `ops.hyper_connection`: a sub-layer of dynamic hyper-connections in one pass each way.

V_s = H_s + β_s Y_s, rounded to H's dtype;   z = (V − μ) r W,   r = rsqrt(mean((V − μ)²) + eps)
α, β' = static + scale · bound(z + bias);   x = norm(Σ_s α[s, 0] V_s);   H'_c = Σ_s α[s, 1 + c] V_s
reads (n + 1)·D, writes (n + 1)·D elements a token; μ is the mean of a stream if `centred`, else 0
(V − μ) W equals V times W minus the mean of W's columns, so W is centred instead of V.

backward, with V recomputed; G_c is the gradient of mixture c:   dα[s, c] = ⟨G_c, V_s⟩
g = r dz = r · scale · bound'(z + bias) · (dα, dβ'),   k_s = r_s ⟨g_s, z_s⟩/D
dV_s = Σ_c α[s, c] G_c + g_s Wᵀ − k_s (V_s − μ_s) = dH_s,   dY = Σ_s β_s dV_s,   dβ_s = ⟨dV_s, Y⟩
dW = Σ_tokens Σ_s V_sᵀ g_s, centred as W
reads (2n + 2)·D, writes (n + 1)·D; saves its inputs, and z, r and μ of each stream

A program keeps a token's streams in registers, and W and its share of dW. Where they do not fit,
the ops of the definition run.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ops
from ..norms import NormSpec
from ..ops.dispatch import reference_of
from ..ops.hyper import COEFFICIENT_BOUNDS, CoefficientMap
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
from .project import pending_write
from .row_sums import pick_number, repeat_conversion, sum_in_thread, sum_partial_sums
from .sources import load_numbers, load_streams
from .split_products import centre_columns

# The most sums over D that a program computes for a token; 4 streams have 28. More do not fit in
# registers.
_MAX_SUMS = 32


def hyper_connection(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    coefficient_map: CoefficientMap,
    inputs: int = 1,
    norm: NormSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.hyper_connection`."""
    W, bias, scale, static, *options = coefficient_map
    beta = None if beta is None else beta.float().expand(H.shape[:-1])
    parameters = W.float(), bias.float(), scale.float(), static.float()
    x, H, beta, *_ = _hyper_connection(
        H, Y, beta, *parameters, *options, inputs, *norm_arguments(norm)
    )
    return x, H, beta


def fits_program(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    coefficient_map: CoefficientMap,
    inputs: int = 1,
    norm: NormSpec | None = None,
) -> bool:
    """Whether the kernel supports these arguments of `hyper_connection`."""
    if inputs > 1 and norm is not None:
        return False  # the definition refuses it
    if Y is not None and beta is None:
        return False  # a write with weight 1, which neither `hyper` nor `frac` makes
    n, D = H.shape[-2:]
    K = n + inputs + 1
    # Streams and their gradients; W, its gradient, and the norm's weight and its gradient.
    rows = [H] * (2 * n + _pending_rows(Y) + inputs)
    fits = launch.fits_in_registers(rows, launch.block_size(D), rows=2 * K + 2)
    return fits and n * (K + 1) <= _MAX_SUMS


@triton.jit
def _load_weight_rows(W, d, D, K: tl.constexpr):
    """The K rows of W."""
    rows = ()
    for k in tl.static_range(K):
        rows = rows + (tl.load(W + k * D + d, mask=d < D, other=0.0),)
    return rows


@triton.jit
def _load_written_rows(H, ys, betas, t, d, D, n: tl.constexpr):
    """The streams of a token with the pending write, rounded to their dtype.

    Args:
        ys: the rows of the write: one for all streams, one for each, or none.
        betas: their weight in each stream.
    """
    rows = load_streams(H, t, d, D, d < D, n)
    if len(ys) > 0:
        written = ()
        for s in tl.static_range(n):
            v = rows[s].to(tl.float32) + betas[s] * ys[s % len(ys)].to(tl.float32)
            written = written + (v.to(H.dtype.element_ty),)
        rows = written
    return rows


@triton.jit
def _mix_rows(rows, weights, BLOCK: tl.constexpr):
    """Σ_s weights_s rows_s."""
    mixed = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(len(rows)):
        mixed += weights[s] * repeat_conversion(rows[s])
    return mixed


@triton.jit
def _pick(numbers, first: tl.constexpr, step: tl.constexpr):
    """The numbers at first, first + step, …"""
    picked = ()
    for i in tl.static_range(first, len(numbers), step):
        picked = picked + (numbers[i],)
    return picked


@triton.jit
def _bound_by_tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _bound_by_nothing(x):
    return x


_DEVICE_BOUNDS = {"tanh": _bound_by_tanh, "none": _bound_by_nothing}


@triton.jit(do_not_specialize=["N"])
def hyper_connection_forward(
    H, Y, beta, W, bias, scale, static, weight, norm_bias, x, out, new_beta, z, rstd, mu,
    N, D, eps, norm_eps,
    BOUND: tl.constexpr, CENTRED: tl.constexpr, NORM_CENTRED: tl.constexpr, PENDING: tl.constexpr,
    INPUTS: tl.constexpr, n: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    SUMS: tl.constexpr = K + 1  # of each stream
    d = tl.arange(0, BLOCK)
    w_rows = _load_weight_rows(W, d, D, K)
    if weight is not None:
        w, b = load_affine(weight, norm_bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        ys = load_streams(Y, t, d, D, d < D, PENDING)
        betas = load_numbers(beta + t * n, 0, n if PENDING > 0 else 0, n, 0.0)
        rows = _load_written_rows(H, ys, betas, t, d, D, n)
        partial = ()
        for s in tl.static_range(n):
            v = repeat_conversion(rows[s])
            partial = partial + (sum_in_thread(v if CENTRED else v * v, BLOCK),)
            for k in tl.static_range(K):
                partial = partial + (sum_in_thread(v * w_rows[k], BLOCK),)
        sums = sum_partial_sums(partial)
        if CENTRED:
            partial = ()
            for s in tl.static_range(n):
                mean = pick_number(sums, s * SUMS) / D
                tl.store(mu + t * n + s, mean)
                off = tl.where(d < D, repeat_conversion(rows[s]) - mean, 0.0)
                partial = partial + (sum_in_thread(off * off, BLOCK),)
            spreads = sum_partial_sums(partial)
        coefficients = ()
        for s in tl.static_range(n):
            if CENTRED:
                spread = pick_number(spreads, s)
            else:
                spread = pick_number(sums, s * SUMS)
            r = tl.rsqrt(spread / D + eps)
            tl.store(rstd + t * n + s, r)
            for k in tl.static_range(K):
                z_k = r * pick_number(sums, s * SUMS + 1 + k)
                tl.store(z + (t * n + s) * K + k, z_k)
                bounded = BOUND(z_k + tl.load(bias + k))
                number = tl.load(static + s * K + k) + tl.load(scale + k) * bounded
                coefficients = coefficients + (number,)
            tl.store(new_beta + t * n + s, coefficients[s * K + K - 1])
        for c in tl.static_range(INPUTS):
            read = _mix_rows(rows, _pick(coefficients, c, K), BLOCK)
            if weight is not None:
                read = norm_row(read, w, b, d, D, norm_eps, NORM_CENTRED)
            tl.store(x + (t * INPUTS + c) * D + d, read.to(x.dtype.element_ty), mask=d < D)
        for c in tl.static_range(n):
            mixed = _mix_rows(rows, _pick(coefficients, INPUTS + c, K), BLOCK)
            tl.store(out + (t * n + c) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def hyper_connection_backward(
    H, Y, beta, W, coefficients, g_factors, z, rstd, mu, weight, dx, dout, dnew_beta,
    dH, dY, dbeta, dcoefficients, dW, dweight, dbias, N, D, norm_eps,
    CENTRED: tl.constexpr, NORM_CENTRED: tl.constexpr, PENDING: tl.constexpr,
    INPUTS: tl.constexpr, n: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = INPUTS + n
    d = tl.arange(0, BLOCK)
    w_rows = _load_weight_rows(W, d, D, K)
    if weight is not None:
        w = load_parameter(weight, d, D)
        dw = tl.zeros([BLOCK], tl.float32)
        db = tl.zeros([BLOCK], tl.float32)
    dw_rows = ()
    for _ in tl.static_range(K):
        dw_rows = dw_rows + (tl.zeros([BLOCK], tl.float32),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        ys = load_streams(Y, t, d, D, d < D, PENDING)
        betas = load_numbers(beta + t * n, 0, n if PENDING > 0 else 0, n, 0.0)
        rows = _load_written_rows(H, ys, betas, t, d, D, n)
        dxs = load_streams(dx, t, d, D, d < D, INPUTS)
        douts = load_streams(dout, t, d, D, d < D, n)
        if weight is not None:
            numbers = load_numbers(coefficients + t * n * K, 0, n * K, n * K, 0.0)
            read = _mix_rows(rows, _pick(numbers, 0, K), BLOCK)
            dx_t = dxs[0].to(tl.float32)
            normed, dxs = norm_rows_backward(
                (read,), (dx_t,), (w,), d, D, norm_eps, NORM_CENTRED, BLOCK
            )
            dw += dx_t * normed[0]
            db += dx_t
        gradients = dxs + douts
        dy = tl.zeros([BLOCK], tl.float32)
        dbetas = ()
        partial = ()
        for s in tl.static_range(n):
            v = repeat_conversion(rows[s])
            for c in tl.static_range(C):
                product = v * repeat_conversion(gradients[c])
                partial = partial + (sum_in_thread(product, BLOCK),)
        sums = sum_partial_sums(partial)
        for s in tl.static_range(n):
            at = (t * n + s) * K
            numbers = load_numbers(coefficients + at, 0, K, K, 0.0)
            g = ()
            k_s = 0.0
            for k in tl.static_range(K):
                if k < C:
                    dnumber = pick_number(sums, s * C + k)
                else:
                    dnumber = tl.load(dnew_beta + t * n + s)
                tl.store(dcoefficients + at + k, dnumber)
                g_k = dnumber * tl.load(g_factors + at + k)
                k_s += g_k * tl.load(z + at + k)
                g = g + (g_k,)
            k_s = k_s * tl.load(rstd + t * n + s) / D
            v = repeat_conversion(rows[s])
            dv = -k_s * v
            if CENTRED:
                dv += k_s * tl.load(mu + t * n + s)
            for c in tl.static_range(C):
                dv += numbers[c] * repeat_conversion(gradients[c])
            new_dw_rows = ()
            for k in tl.static_range(K):
                dv += g[k] * w_rows[k]
                new_dw_rows = new_dw_rows + (dw_rows[k] + g[k] * v,)
            dw_rows = new_dw_rows
            stream_at = (t * n + s) * D + d
            tl.store(dH + stream_at, dv.to(dH.dtype.element_ty), mask=d < D)
            if PENDING > 0:
                product = dv * repeat_conversion(ys[s % PENDING])
                dbetas = dbetas + (sum_in_thread(product, BLOCK),)
            if PENDING == 1:
                dy += betas[s] * dv
            elif PENDING > 1:
                dy_s = (betas[s] * dv).to(dY.dtype.element_ty)
                tl.store(dY + stream_at, dy_s, mask=d < D)
        if PENDING > 0:
            sums = sum_partial_sums(dbetas)
            s = tl.arange(0, sums.numel)
            tl.store(dbeta + t * n + s, sums, mask=s < n)
        if PENDING == 1:
            tl.store(dY + t * D + d, dy.to(dY.dtype.element_ty), mask=d < D)
    row = tl.program_id(0).to(tl.int64) * D
    for k in tl.static_range(K):
        tl.store(dW + row * K + k * D + d, dw_rows[k], mask=d < D)
    if weight is not None:
        store_affine_gradients(dw, db, dweight, dbias, d, D)


def _pending_rows(Y: Tensor | None) -> int:
    """The rows of Y a token."""
    return 0 if Y is None else Y.shape[-2]


@partial(LibraryOp, keeps_strides="W")
def _hyper_connection(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    bias: Tensor,
    scale: Tensor,
    static: Tensor,
    bound: str,
    eps: float,
    centred: bool,
    inputs: int,
    affine: Sequence[Tensor],
    norm_eps: float,
    norm_centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _empty_outputs(H, W, inputs, centred)
    n, D = H.shape[-2:]
    K = W.shape[1]
    N = H.shape[:-2].numel()
    block = launch.block_size(D)
    # A processor runs two, three or four side by side: none idles at the end.
    programs = launch.program_count(N, H, per_processor=12)
    launch.launch_kernel(
        hyper_connection_forward, (programs,),
        H, *pending_write(H, Y, beta), _weight_rows(W, centred), bias,
        scale, static, *weight_and_bias(affine), *outputs,
        N, D, eps, norm_eps,
        BOUND=_DEVICE_BOUNDS[bound], CENTRED=centred, NORM_CENTRED=norm_centred,
        PENDING=_pending_rows(Y), INPUTS=inputs, n=n, K=K, BLOCK=block,
        num_warps=launch.warp_count(block),
    )  # fmt: skip
    return outputs


def _weight_rows(W: Tensor, centred: bool) -> Tensor:
    """W as kernels read it: [K D]."""
    return (centre_columns(W) if centred else W).mT.contiguous()


@_hyper_connection.register_fake
def _empty_outputs(
    H: Tensor, W: Tensor, inputs: int, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Memory for x, H', beta', z, rstd, and mu where the norm is centred."""
    *lead, n, D = H.shape
    x = H.new_empty(*lead, inputs * D)
    beta = W.new_empty(*lead, n)
    z = W.new_empty(*lead, n, W.shape[1])
    rstd = W.new_empty(*lead, n)
    return x, H.new_empty(H.shape), beta, z, rstd, W.new_empty(rstd.shape if centred else 0)


@partial(LibraryOp, keeps_strides="W")
def _hyper_connection_backward(
    dx: Tensor,
    dout: Tensor,
    dnew_beta: Tensor,
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    coefficients: Tensor,
    g_factors: Tensor,
    z: Tensor,
    rstd: Tensor,
    mu: Tensor,
    affine: Sequence[Tensor],
    norm_eps: float,
    norm_centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    n, D = H.shape[-2:]
    K = W.shape[1]
    N = H.shape[:-2].numel()
    block = launch.block_size(D)
    centred = mu.numel() > 0
    # One on a processor, as each fills the registers and has a partial sum of dW.
    programs = launch.program_count(N, H, per_processor=1)
    dH, dY, dbeta, dcoefficients, _, _ = _empty_gradients(H, Y, W, affine)
    dW = launch.empty_partial_sums(W, programs, K, D)
    daffine = empty_affine_partial_sums(affine, programs)
    launch.launch_kernel(
        hyper_connection_backward, (programs,),
        H, *pending_write(H, Y, beta), _weight_rows(W, centred), coefficients,
        g_factors, z, rstd, mu, weight_and_bias(affine)[0], dx, dout, dnew_beta,
        dH, dY, dbeta, dcoefficients, dW, *weight_and_bias(daffine), N, D, norm_eps,
        CENTRED=centred, NORM_CENTRED=norm_centred, PENDING=_pending_rows(Y),
        INPUTS=dx.shape[-1] // D, n=n, K=K, BLOCK=block,
        num_warps=launch.warp_count(2 * block),
    )  # fmt: skip
    dW = launch.add_partial_sums(dW, 0)
    dW = centre_columns(dW.mT).mT if centred else dW
    return dH, dY, dbeta, dcoefficients, dW, add_affine_partial_sums(daffine, affine)


@_hyper_connection_backward.register_fake
def _empty_gradients(
    H: Tensor, Y: Tensor | None, W: Tensor, affine: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Memory for the gradients of H, Y, beta, the coefficients, W's rows and the norm's parameters.

    Those of Y and beta are empty where no write is pending.
    """
    dY = H.new_empty(0) if Y is None else Y.new_empty(Y.shape)
    dbeta = W.new_empty(0 if Y is None else H.shape[:-1])
    dcoefficients = W.new_empty(*H.shape[:-1], W.shape[1])
    daffine = [p.new_empty(p.shape) for p in affine]
    return H.new_empty(H.shape), dY, dbeta, dcoefficients, W.new_empty(W.mT.shape), daffine


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, bound, eps, centred, mixtures, affine, norm_eps, norm_centred = inputs
    ctx.bound = bound
    ctx.eps = eps
    ctx.centred = centred
    ctx.inputs = mixtures
    ctx.norm_options = (norm_eps, norm_centred)
    _, _, _, z, rstd, mu = output
    ctx.mark_non_differentiable(z, rstd, mu)
    ctx.save_for_backward(*tensors, z, rstd, mu, *affine)


def _define(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    bias: Tensor,
    scale: Tensor,
    static: Tensor,
    bound: Any,
    eps: float,
    centred: bool,
    inputs: int,
    affine: list[Tensor],
    norm_eps: float,
    norm_centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    coefficient_map = CoefficientMap(W, bias, scale, static, bound, eps, centred)
    norm = norm_of_arguments(affine, norm_eps, norm_centred)
    return reference_of(ops.hyper_connection)(H, Y, beta, coefficient_map, inputs, norm)


def _backward(ctx: Any, dx: Tensor, dout: Tensor, dnew_beta: Tensor, *_: Any) -> tuple[Any, ...]:
    H, Y, beta, W, bias, scale, static, z, rstd, mu, *affine = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        parameters = W, bias, scale, static, ctx.bound, ctx.eps, ctx.centred, ctx.inputs
        inputs = (H, Y, beta, *parameters, affine, *ctx.norm_options)
        return definition_gradients(_define, inputs, dx, dout, dnew_beta)
    bound = COEFFICIENT_BOUNDS[ctx.bound]
    bounded = bound.apply(z + bias)
    slopes = scale * bound.slope(bounded)
    g_factors = slopes * rstd[..., None]
    dH, dY, dbeta, dcoefficients, dW, daffine = _hyper_connection_backward(
        dx, dout, dnew_beta, H, Y, beta, W, static + scale * bounded, g_factors, z,
        rstd, mu, affine, *ctx.norm_options,
    )  # fmt: skip
    dbias = (dcoefficients * slopes).sum_to_size(bias.shape)
    dscale = (dcoefficients * bounded).sum_to_size(scale.shape)
    dstatic = dcoefficients.sum_to_size(static.shape)
    if Y is None:
        dY = None
        dbeta = None
    return (
        dH, dY, dbeta, dW.mT, dbias, dscale, dstatic, None, None, None, None, daffine, None, None,
    )  # fmt: skip


_hyper_connection.register_autograd(_backward, setup_context=_save_for_backward)
