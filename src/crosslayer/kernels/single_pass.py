"""Kernels of `ops.single_pass_connection`: a site of n streams in one pass each way.

H'_c = Σ_s res[s, c] H_s + β_c y, rounded to H's dtype;   x = Σ_c pre_c H'_c
z = r Σ_c H'_c W_c,   r = rsqrt(mean(H'²) + eps)
reads (n + 1)·D, writes (n + 1)·D elements a token; each tile of tokens reads W from cache

backward:   g = dz r,   c = ⟨dz, z⟩ r²/nD,   G_c = dH'_c + pre_c dx + g W_cᵀ − c H'_c
dH_s = Σ_c res[s, c] G_c,   dy = Σ_c β_c G_c,   dW_c = Σ_tokens H'_cᵀ g
dβ_c = ⟨y, G_c⟩,   dpre_c = ⟨dx, H'_c⟩,   dres[s, c] = ⟨H_s, G_c⟩
reads (3n + 2)·D, writes (n + 1)·D. One kernel has a tile of tokens, so that its sums over D stay in
registers, and computes H' again. dW is a sum over tokens: a second kernel reads H' for it.

A norm of x needs all of x: it follows the kernel.
"""

from functools import partial
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
from .library_op import LibraryOp
from .row_splits import empty_sums, launch_join, split_rows
from .sources import load_streams
from .split_products import (
    load_parts,
    multiply_by_parts,
    multiply_split,
    padded_columns,
    split_operand,
    stored_columns,
    weight_gradient,
    weight_operand,
)

# The most columns of W of which a piece fits in a program's registers. mHC has more from 8 streams
# on.
_MAX_COLUMNS = 64


def single_pass_connection(
    H: Tensor,
    y: Tensor,
    beta: Tensor,
    res: Tensor | None,
    pre: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.single_pass_connection`."""
    *tokens, n, _ = H.shape
    res = None if res is None else res.float().expand(*tokens, n, n)
    beta = beta.float().expand(*tokens, n)
    pre = pre.float().expand(*tokens, n)
    x, H, z, _ = _single_pass_connection(H, y, beta, res, pre, W.float(), eps)
    return apply_norm(x, norm), H, z


def fits_program_and_dtype(
    H: Tensor,
    y: Tensor,
    beta: Tensor,
    res: Tensor | None,
    pre: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> bool:
    """Whether the kernel supports these arguments of `single_pass_connection`.

    A sum of float16 streams that is normed stays in float32 until then, and the kernel rounds it.
    """
    rounds_too_early = norm is not None and H.dtype == torch.float16
    return W.shape[1] <= _MAX_COLUMNS and not rounds_too_early


@triton.jit
def _load_coefficients(coefficients, t, live, count: tl.constexpr):
    """The coefficients of a tile's tokens: a tuple of `count` tensors shaped like t."""
    loaded = ()
    for i in tl.static_range(count):
        loaded = loaded + (tl.load(coefficients + t * count + i, mask=live, other=0.0),)
    return loaded


@triton.jit
def _mix_and_write(streams, y, R, b, c: tl.constexpr, MIXES: tl.constexpr, n: tl.constexpr):
    """H'_c before it is rounded."""
    v = b[c] * y
    if MIXES:
        for s in tl.static_range(n):
            v += R[s * n + c] * streams[s].to(tl.float32)
    else:
        v += streams[c].to(tl.float32)
    return v


@triton.jit(do_not_specialize=["N", "pieces_a_split"])
def single_pass_connection_forward(
    H, Y, beta, res, pre, W, new, x, z, rstd, N, D, eps, pieces_a_split,
    MIXES: tl.constexpr, IS_SPLIT: tl.constexpr, PARTS: tl.constexpr, n: tl.constexpr,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    W_columns = stored_columns(K, PARTS)
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = t < N
    k = tl.arange(0, WIDE)[None, :]
    t_2 = t[:, None]
    live_2 = t_2 < N
    b = _load_coefficients(beta, t_2, live_2, n)
    p = _load_coefficients(pre, t_2, live_2, n)
    R = _load_coefficients(res, t_2, live_2, n * n if MIXES else 0)
    dots = tl.zeros([TILE, WIDE], tl.float32)
    squares = tl.zeros([TILE, BLOCK], tl.float32)
    begin = tl.program_id(1) * pieces_a_split * BLOCK
    end = tl.minimum(D, begin + pieces_a_split * BLOCK)
    for start in range(begin, end, BLOCK):
        d = start + tl.arange(0, BLOCK)
        on = live_2 & (d < D)[None, :]
        token_at = t_2 * D + d[None, :]
        y = tl.load(Y + token_at, mask=on, other=0.0).to(tl.float32)
        streams = load_streams(H, t_2, d[None, :], D, on, n)
        read = tl.zeros([TILE, BLOCK], tl.float32)
        for c in tl.static_range(n):
            v = _mix_and_write(streams, y, R, b, c, MIXES, n).to(new.dtype.element_ty)
            tl.store(new + (t_2 * n + c) * D + d[None, :], v, mask=on)
            v_wide = v.to(tl.float32)
            squares += v_wide * v_wide
            read += p[c] * v_wide
            w_at = W + (c * D + d)[:, None] * W_columns + k
            in_W = (d < D)[:, None] & (k < W_columns)
            dots += multiply_by_parts(v, load_parts(w_at, in_W, n * D * W_columns, PARTS))
        tl.store(x + token_at, read.to(x.dtype.element_ty), mask=on)
    r = tl.sum(squares, 1)
    if IS_SPLIT:
        # `join_splits` continues.
        row = t + tl.program_id(1) * tl.cast(N, tl.int64)
    else:
        row = t
        r = tl.rsqrt(r / (n * D) + eps)
        dots = dots * r[:, None]
    tl.store(rstd + row, r, mask=live)
    tl.store(z + row[:, None] * K + k, dots, mask=live_2 & (k < K))


@triton.jit
def _multiply_gradient(
    g_parts, W, i: tl.constexpr, d, k, D, W_columns, n: tl.constexpr, PARTS: tl.constexpr
):
    """g W_iᵀ of a piece of stream i."""
    w_at = W + (i * D + d)[:, None] * W_columns + k
    in_W = (d < D)[:, None] & (k < W_columns)
    product = multiply_split(g_parts, load_parts(w_at, in_W, n * D * W_columns, PARTS))
    # A sum over one number takes the result to the layout of the rows that were loaded, at once.
    # Else the compiler takes every product below to it, and registers are spilled.
    return tl.sum(tl.reshape(product, [product.shape[0], product.shape[1], 1]), 2)


@triton.jit
def _coefficient_sums(streams, y, dx_t, v, G):
    """A piece's share of dbeta_i and dpre_i, and of dres[s, i] for each of the `streams` s."""
    sums = (tl.sum(y * G, 1), tl.sum(dx_t * v, 1))
    for s in tl.static_range(len(streams)):
        sums = sums + (tl.sum(streams[s] * G, 1),)
    return sums


@triton.jit
def _mix_back(dhs, R, G, i: tl.constexpr, MIXES: tl.constexpr, n: tl.constexpr):
    """The gradients of the streams with what G, that of H'_i, adds to each."""
    added = ()
    for s in tl.static_range(n):
        if MIXES:
            added = added + (dhs[s] + R[s * n + i] * G,)
        elif s == i:
            added = added + (G,)
        else:
            added = added + (dhs[s],)
    return added


@triton.jit(do_not_specialize=["N", "pieces_a_split"])
def single_pass_connection_backward(
    H, Y, beta, res, pre, W, g, c, dx, dnew, dH, dY, sums, N, D, pieces_a_split,
    MIXES: tl.constexpr, PARTS: tl.constexpr, n: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    W_columns = stored_columns(K, PARTS)
    COLUMNS: tl.constexpr = n + 2 if MIXES else 2  # of `sums`, for each stream
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = t < N
    k = tl.arange(0, WIDE)[None, :]
    t_2 = t[:, None]
    live_2 = t_2 < N
    b = _load_coefficients(beta, t_2, live_2, n)
    p = _load_coefficients(pre, t_2, live_2, n)
    R = _load_coefficients(res, t_2, live_2, n * n if MIXES else 0)
    g_t = tl.load(g + t_2 * K + k, mask=live_2 & (k < K), other=0.0)
    c_t = tl.load(c + t_2, mask=live_2, other=0.0)
    g_parts = split_operand(g_t, PARTS)
    totals = ()
    for _ in tl.static_range(n * COLUMNS):
        totals = totals + (tl.zeros([TILE], tl.float32),)
    begin = tl.program_id(1) * pieces_a_split * BLOCK
    end = tl.minimum(D, begin + pieces_a_split * BLOCK)
    for start in range(begin, end, BLOCK):
        d = start + tl.arange(0, BLOCK)
        on = live_2 & (d < D)[None, :]
        token_at = t_2 * D + d[None, :]
        streams = ()
        dhs = ()
        rows = load_streams(H, t_2, d[None, :], D, on, n)
        for s in tl.static_range(n):
            streams = streams + (rows[s].to(tl.float32),)
            dhs = dhs + (tl.zeros([TILE, BLOCK], tl.float32),)
        y = tl.load(Y + token_at, mask=on, other=0.0).to(tl.float32)
        dx_t = tl.load(dx + token_at, mask=on, other=0.0).to(tl.float32)
        dy = tl.zeros([TILE, BLOCK], tl.float32)
        new_totals = ()
        for i in tl.static_range(n):
            v = _mix_and_write(streams, y, R, b, i, MIXES, n).to(H.dtype.element_ty)
            v = v.to(tl.float32)
            G = _multiply_gradient(g_parts, W, i, d, k, D, W_columns, n, PARTS)
            at = (t_2 * n + i) * D + d[None, :]
            G += tl.load(dnew + at, mask=on, other=0.0).to(tl.float32)
            G += p[i] * dx_t - c_t * v
            dy += b[i] * G
            sums_i = _coefficient_sums(streams if MIXES else (), y, dx_t, v, G)
            for j in tl.static_range(COLUMNS):
                new_totals = new_totals + (totals[i * COLUMNS + j] + sums_i[j],)
            dhs = _mix_back(dhs, R, G, i, MIXES, n)
        totals = new_totals
        for s in tl.static_range(n):
            at = (t_2 * n + s) * D + d[None, :]
            tl.store(dH + at, dhs[s].to(dH.dtype.element_ty), mask=on)
        tl.store(dY + token_at, dy.to(dY.dtype.element_ty), mask=on)
    # [split, column, stream, token]
    tokens = tl.cast(N, tl.int64)
    sum_at = sums + tl.program_id(1) * (COLUMNS * n) * tokens + t
    for i in tl.static_range(n):
        for j in tl.static_range(COLUMNS):
            tl.store(sum_at + (j * n + i) * tokens, totals[i * COLUMNS + j], mask=live)


def _tile_sizes(H: Tensor, K: int) -> dict[str, int]:
    """The constants of a launch. H: [B T n D].  K: columns of W."""
    n, D = H.shape[-2:]
    block = max(16, min(launch.next_power_of_2(D), 64 // launch.next_power_of_2(n)))
    # The rows of a tile are as many as a product's of four warps, so each row is in one warp.
    return {
        "n": n, "K": K, "TILE": 64, "BLOCK": block, "WIDE": padded_columns(K),
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


@partial(LibraryOp, keeps_strides="W")
def _single_pass_connection(
    H: Tensor, y: Tensor, beta: Tensor, res: Tensor | None, pre: Tensor, W: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, new, z, rstd = _empty_outputs(H, W)
    sizes = _tile_sizes(H, W.shape[1])
    D = H.shape[-1]
    N = H.shape[:-2].numel()
    tiles = launch.ceil_div(N, sizes["TILE"])
    splits = split_rows(tiles, launch.ceil_div(D, sizes["BLOCK"]), H)
    sums = empty_sums(splits, z, rstd, rstd.new_empty(0))
    operand, parts = weight_operand(W, H, is_reused=splits.count == 1)
    launch.launch_kernel(
        single_pass_connection_forward, (tiles, splits.count),
        H, y, beta, pre if res is None else res, pre, operand, new, x, *sums[:2],
        N, D, eps, splits.pieces,
        MIXES=res is not None, IS_SPLIT=splits.count > 1, PARTS=parts, **sizes,
    )  # fmt: skip
    split_width = splits.pieces * sizes["BLOCK"] * sizes["n"]
    launch_join(sums, [z, rstd, rstd.new_empty(0)], len(W), split_width, eps)
    return x, new, z, rstd


@_single_pass_connection.register_fake
def _empty_outputs(H: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *lead, _, D = H.shape
    z = W.new_empty(*lead, W.shape[1])
    return H.new_empty(*lead, D), H.new_empty(H.shape), z, z.new_empty(lead)


@partial(LibraryOp, keeps_strides="W")
def _single_pass_connection_backward(
    dx: Tensor,
    dnew: Tensor,
    dz: Tensor,
    H: Tensor,
    y: Tensor,
    beta: Tensor,
    res: Tensor | None,
    pre: Tensor,
    W: Tensor,
    new: Tensor,
    z: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = _tile_sizes(H, W.shape[1])
    D = H.shape[-1]
    N = H.shape[:-2].numel()
    g = dz * rstd[..., None]
    c = (dz * z).sum(-1) * rstd * rstd / len(W)
    tiles = launch.ceil_div(N, sizes["TILE"])
    splits = split_rows(tiles, launch.ceil_div(D, sizes["BLOCK"]), H)
    operand, parts = weight_operand(W, H)
    dH, dy, sums, _ = _empty_gradients(H, y, res, W)
    sums_parts = launch.empty_partial_sums(W, splits.count, *sums.shape)
    launch.launch_kernel(
        single_pass_connection_backward, (tiles, splits.count),
        H, y, beta, pre if res is None else res, pre, operand, g, c, dx, dnew,
        dH, dy, sums_parts, N, D, splits.pieces, MIXES=res is not None, PARTS=parts, **sizes,
    )  # fmt: skip
    dW = weight_gradient(new, g)
    return dH, dy, launch.add_partial_sums(sums_parts, 0), dW


@_single_pass_connection_backward.register_fake
def _empty_gradients(
    H: Tensor, y: Tensor, res: Tensor | None, W: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dH, dy, dW and, beneath each other, dbeta, dpre and dres: [columns n B T]."""
    *lead, n, _ = H.shape
    columns = 2 if res is None else 2 + n
    sums = H.new_empty(columns, n, *lead, dtype=torch.float32)
    return H.new_empty(H.shape), y.new_empty(y.shape), sums, W.new_empty(W.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, eps = inputs
    ctx.eps = eps
    _, new, z, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(*tensors, new, z, rstd)


def _backward(ctx: Any, dx: Tensor, dnew: Tensor, dz: Tensor, _: Any) -> tuple[Any, ...]:
    *tensors, new, z, rstd = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph
        definition = reference_of(ops.single_pass_connection)
        return definition_gradients(definition, (*tensors, ctx.eps), dx, dnew, dz)
    dH, dy, sums, dW = _single_pass_connection_backward(dx, dnew, dz, *tensors, new, z, rstd)
    dbeta = sums[0].movedim(0, -1)
    dpre = sums[1].movedim(0, -1)
    dres = sums[2:].movedim((0, 1), (-2, -1)) if len(sums) > 2 else None
    return dH, dy, dbeta, dres, dpre, dW, None


_single_pass_connection.register_autograd(_backward, setup_context=_save_for_backward)
