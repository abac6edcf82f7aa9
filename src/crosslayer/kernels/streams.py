"""Kernels of `ops.width_connection`: all mixtures of n streams, and the norm of the input.

x = Σ_s pre_s H_s;   H'_c = Σ_s res[s, c] H_s
reads n·D, writes (n + 1)·D elements a token

backward:   dH_s = pre_s dx + Σ_c res[s, c] dH'_c,   dpre_s = ⟨dx, H_s⟩,   dres[s, c] = ⟨dH'_c, H_s⟩
reads (2n + 1)·D, writes n·D; saves only the inputs

A fused norm needs a token's x in one program: rows longer than `_piece_size` are normed after the
kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ops
from ..norms import NormSpec, apply_norm
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
from .row_sums import repeat_conversion, sum_rows
from .sources import load_numbers, load_streams

MOST_STREAMS = 16  # More compile for minutes: their n² products are unrolled.


def width_connection(
    H: Tensor, pre: Tensor, res: Tensor, norm: NormSpec | None = None
) -> tuple[Tensor, Tensor]:
    """`ops.width_connection`."""
    *lead, n, D = H.shape
    can_fuse = _fuses_norm(n, D)
    pre = pre.float().expand(*lead, n)
    res = res.float().expand(*lead, n, n)
    fused_norm = norm_arguments(norm if can_fuse else None)
    x, H = _width_connection(H, pre, res, *fused_norm)
    return apply_norm(x, None if can_fuse else norm), H


def supports_streams_and_dtype(
    H: Tensor, pre: Tensor, res: Tensor, norm: NormSpec | None = None
) -> bool:
    """Whether the kernel takes these inputs.

    Not more than `MOST_STREAMS` streams. And it rounds x before a norm that it cannot fuse, where a
    sum of float16 streams may overflow.
    """
    n, D = H.shape[-2:]
    can_norm = norm is None or _fuses_norm(n, D) or H.dtype != torch.float16
    return n <= MOST_STREAMS and can_norm


def _fuses_norm(n: int, D: int) -> bool:
    """Whether a program has a token's whole x, as a norm needs it."""
    return _piece_size(n, D) >= D


@triton.jit(do_not_specialize=["N"])
def width_connection_forward(
    H, pre, res, weight, bias, x, out, N, D, eps,
    n: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if weight is not None:
        w, b = load_affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        read = tl.zeros([BLOCK], tl.float32)
        streams = ()
        for s in tl.static_range(n):
            h = tl.load(H + (t * n + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
            read += tl.load(pre + t * n + s) * h
            streams = streams + (h,)
        if weight is not None:
            read = norm_row(read, w, b, d, D, eps, CENTRED)
        tl.store(x + t * D + d, read.to(x.dtype.element_ty), mask=d < D)
        for c in tl.static_range(n):
            mixed = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(n):
                mixed += tl.load(res + (t * n + s) * n + c) * streams[s]
            tl.store(out + (t * n + c) * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def width_connection_backward(
    H, pre, res, weight, dx, dout, dH, dpre, dres, dweight, dbias, N, D, eps,
    n: tl.constexpr, GROUP: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if weight is not None:
        w = load_parameter(weight, d, D)
        dw = tl.zeros([BLOCK], tl.float32)
        db = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = tl.program_id(1) * tl.cast(N, tl.int64) + t
        dx_t = tl.load(dx + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        pre_t = load_numbers(pre + t * n, 0, n, n, 0.0)
        streams = load_streams(H, t, d, D, d < D, n)
        douts = load_streams(dout, t, d, D, d < D, n)
        if weight is not None:
            read = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(n):
                read += pre_t[s] * streams[s].to(tl.float32)
            normed, gradients = norm_rows_backward(
                (read,), (dx_t,), (w,), d, D, eps, CENTRED, BLOCK
            )
            dw += dx_t * normed[0]
            db += dx_t
            dx_t = gradients[0]
        products = ()
        for s in tl.static_range(n):
            products = products + (dx_t * streams[s].to(tl.float32),)
        sums = sum_rows(products, BLOCK)
        k = tl.arange(0, sums.numel)
        tl.store(dpre + row * n + k, sums, mask=k < n)
        for first in tl.static_range(0, n, GROUP):
            res_group = load_numbers(res + t * n * n, first * n, GROUP * n, n * n, 0.0)
            products = ()
            for i in tl.static_range(GROUP * n):
                if first * n + i < n * n:
                    h = repeat_conversion(streams[first + i // n])
                    products = products + (repeat_conversion(douts[i % n]) * h,)
            sums = sum_rows(products, BLOCK)
            k = first * n + tl.arange(0, sums.numel)
            tl.store(dres + row * n * n + k, sums, mask=k < min(first + GROUP, n) * n)
            for i in tl.static_range(GROUP):
                if first + i < n:
                    dh = pre_t[first + i] * dx_t
                    for c in tl.static_range(n):
                        dh += res_group[i * n + c] * repeat_conversion(douts[c])
                    at = dH + (t * n + first + i) * D + d
                    tl.store(at, dh.to(dH.dtype.element_ty), mask=d < D)
    if weight is not None:
        store_affine_gradients(dw, db, dweight, dbias, d, D)


def _piece_size(n: int, D: int) -> int:
    """Elements of D that a program processes at once: n streams of them fit in registers."""
    return launch.block_size(D, max(256, launch.MAX_ROW_BLOCK * 4 // launch.next_power_of_2(n)))


def _program_count(N: int, affine: Sequence[Tensor], like: Tensor) -> int:
    # One program a token, unless programs have partial sums of a norm's gradient.
    return launch.program_count(N, like) if affine else N


@LibraryOp
def _width_connection(
    H: Tensor, pre: Tensor, res: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    x, out = _empty_outputs(H)
    n, D = H.shape[-2:]
    N = launch.token_count(x)
    block = _piece_size(n, D)
    launch.launch_kernel(
        width_connection_forward, (_program_count(N, affine, H), launch.ceil_div(D, block)),
        H, pre, res, *weight_and_bias(affine), x, out, N, D, eps,
        n=n, CENTRED=centred, BLOCK=block, num_warps=launch.warp_count(n * block // 2),
    )  # fmt: skip
    return x, out


@_width_connection.register_fake
def _empty_outputs(H: Tensor) -> tuple[Tensor, Tensor]:
    return H.new_empty(*H.shape[:-2], H.shape[-1]), H.new_empty(H.shape)


@LibraryOp
def _width_connection_backward(
    dx: Tensor,
    dout: Tensor,
    H: Tensor,
    pre: Tensor,
    res: Tensor,
    affine: Sequence[Tensor],
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    n, D = H.shape[-2:]
    N = launch.token_count(dx)
    block = _piece_size(n, D)
    programs = _program_count(N, affine, H)
    pieces = launch.ceil_div(D, block)
    dH = torch.empty_like(H)
    dpre = launch.empty_partial_sums(pre, pieces, *pre.shape)
    dres = launch.empty_partial_sums(res, pieces, *res.shape)
    daffine = empty_affine_partial_sums(affine, programs)
    launch.launch_kernel(
        width_connection_backward, (programs, pieces),
        H, pre, res, weight_and_bias(affine)[0], dx, dout,
        dH, dpre, dres, *weight_and_bias(daffine), N, D, eps,
        n=n, GROUP=min(n, 4), CENTRED=centred, BLOCK=block,
        num_warps=launch.warp_count(2 * block),
    )  # fmt: skip
    dpre = launch.add_partial_sums(dpre, 0)
    dres = launch.add_partial_sums(dres, 0)
    return dH, dpre, dres, add_affine_partial_sums(daffine, affine)


@_width_connection_backward.register_fake
def _(
    H: Tensor, pre: Tensor, res: Tensor, affine: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dH = H.new_empty(H.shape)
    dpre = pre.new_empty(pre.shape)
    dres = res.new_empty(res.shape)
    return dH, dpre, dres, [p.new_empty(p.shape) for p in affine]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    H, pre, res, affine, eps, centred = inputs
    ctx.norm_options = (eps, centred)
    ctx.save_for_backward(H, pre, res, *affine)


def _define(
    H: Tensor, pre: Tensor, res: Tensor, affine: list[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    norm = norm_of_arguments(affine, eps, centred)
    return reference_of(ops.width_connection)(H, pre, res, norm)


def _backward(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Any, ...]:
    H, pre, res, *affine = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        inputs = (H, pre, res, affine, *ctx.norm_options)
        return definition_gradients(_define, inputs, dx, dout)
    gradients = _width_connection_backward(dx, dout, H, pre, res, affine, *ctx.norm_options)
    return *gradients, None, None


_width_connection.register_autograd(_backward, setup_context=_save_for_backward)
