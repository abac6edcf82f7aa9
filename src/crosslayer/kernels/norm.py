"""Kernels of `ops.add_norm`: a pending write and the norm after it.

h' = h + y, rounded to h's dtype, and norm(h')
reads 2D, writes 2D elements a token;   backward reads 3D (h', dh', dout) and writes D: dh = dy
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec, add_write, apply_norm
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


def add_norm(h: Tensor, y: Tensor | None, norm: NormSpec | None = None) -> tuple[Tensor, Tensor]:
    """`ops.add_norm`."""
    if y is None or norm is None or torch.promote_types(h.dtype, y.dtype) != h.dtype:
        h = add_write(h, y)
        return h, apply_norm(h, norm)
    return _add_norm(h, y.expand_as(h), *norm_arguments(norm))


@triton.jit(do_not_specialize=["N"])
def add_norm_forward(
    h, y, weight, bias, new, out, N, D, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    w, b = load_affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(h + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x += tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = x.to(new.dtype.element_ty)
        tl.store(new + t * D + d, x, mask=d < D)
        x = norm_row(x.to(tl.float32), w, b, d, D, eps, CENTRED)
        tl.store(out + t * D + d, x.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def add_norm_backward(
    new, weight, dnew, dout, dh, dweight, dbias, N, D, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w = load_parameter(weight, d, D)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(new + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dn = tl.load(dout + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dx = tl.load(dnew + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        normed, gradients = norm_rows_backward((x,), (dn,), (w,), d, D, eps, CENTRED, BLOCK)
        dw += dn * normed[0]
        db += dn
        dx += gradients[0]
        tl.store(dh + t * D + d, dx.to(dh.dtype.element_ty), mask=d < D)
    store_affine_gradients(dw, db, dweight, dbias, d, D)


@LibraryOp
def _add_norm(
    h: Tensor, y: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    N = launch.token_count(h)
    D = h.shape[-1]
    block = launch.block_size(D)
    new, out = _empty_outputs(h)
    launch.launch_kernel(
        add_norm_forward, (launch.program_count(N, h),),
        h, y, *weight_and_bias(affine), new, out, N, D, eps,
        CENTRED=centred, BLOCK=block, num_warps=launch.warp_count(block),
    )  # fmt: skip
    return new, out


@_add_norm.register_fake
def _empty_outputs(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape)


@LibraryOp
def _add_norm_backward(
    dnew: Tensor, dout: Tensor, new: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, list[Tensor]]:
    N = launch.token_count(new)
    D = new.shape[-1]
    block = launch.block_size(D)
    programs = launch.program_count(N, new)
    dh = torch.empty_like(new)
    daffine = empty_affine_partial_sums(affine, programs)
    launch.launch_kernel(
        add_norm_backward, (programs,),
        new, affine[0], dnew, dout, dh, *weight_and_bias(daffine), N, D, eps,
        CENTRED=centred, BLOCK=block, num_warps=launch.warp_count(block),
    )  # fmt: skip
    return dh, add_affine_partial_sums(daffine, affine)


@_add_norm_backward.register_fake
def _(new: Tensor, affine: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return new.new_empty(new.shape), [p.new_empty(p.shape) for p in affine]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, y, affine, eps, centred = inputs
    ctx.norm_options = (eps, centred)
    ctx.y_dtype = y.dtype
    ctx.save_for_backward(output[0], *affine)


def _define_norm(new: Tensor, affine: list[Tensor], eps: float, centred: bool) -> Tensor:
    return apply_norm(new, norm_of_arguments(affine, eps, centred))


def _backward(ctx: Any, dnew: Tensor, dout: Tensor) -> tuple[Any, ...]:
    new, *affine = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        inputs = (new, affine, *ctx.norm_options)
        dh, daffine, *_ = definition_gradients(_define_norm, inputs, dout)
        dh = dh + dnew
    else:
        dh, daffine = _add_norm_backward(dnew, dout, new, affine, *ctx.norm_options)
    return dh, dh.to(ctx.y_dtype), daffine, None, None


_add_norm.register_autograd(_backward, setup_context=_save_for_backward)
