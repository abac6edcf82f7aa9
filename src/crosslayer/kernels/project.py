"""Kernels of `ops.write_norm_project`: a pending write and projections of the normed streams.

H'_s = H_s + β_s Y_s, rounded to H's dtype;   z = (v − μ) r W,   r = rsqrt(mean((v − μ)²) + eps)
v is one stream of H', or all streams of a token as one vector; μ is its mean if `centred`, else 0.
(v − μ) W equals v times W minus the mean of W's columns, so W is centred instead of v.
reads (n + 1)·D, writes n·D elements a token; each tile of tokens reads W from cache

A program processes a row piece by piece. Where there are few tokens, programs share a row: see
`row_splits`.

backward:   g = dz r,   c = ⟨dz, z⟩ r²/width,   dH = dH' + g Wᵀ − c (v − μ)
dW = Σ_tokens vᵀ g, centred as W;   dY = Σ_s β_s dH_s,   dβ_s = ⟨dH_s, Y⟩
reads (2n + 1)·D, writes (n + 1)·D: a program processes a piece of the width for all its tokens,
with that piece of W and dW on chip

Where the streams are bfloat16, W is split into three bfloat16 parts beforehand (`split_products`),
but not in a forward whose programs share rows: they read W once.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.project import describe_unweighted, differentiable_backward, unweighted_gradient
from . import launch
from .library_op import LibraryOp
from .row_splits import empty_sums, launch_join, split_rows
from .split_products import (
    centre_columns,
    load_parts,
    multiply_by_parts,
    multiply_split,
    padded_columns,
    split_operand,
    stored_columns,
    weight_operand,
)

# Columns of W of which a piece fits a program. MUDD has more from 33 sources on: torch computes its
# products.
_MAX_COLUMNS = 128
# Columns times streams, where these are one vector: the shared memory of a GPU that has 99 KB. mHC
# has more from 8 streams on.
_MAX_JOINT_COLUMNS = 512
# Numbers in a tile of products, where streams share W: more do not fit in the 99 KB of shared
# memory that some GPUs have, or compile for minutes.
_MAX_PRODUCTS = 2**14


def write_norm_project(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    eps: float = 1e-6,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.write_norm_project`."""
    Y = None if Y is None else Y.expand(*H.shape[:-2], Y.shape[-2], H.shape[-1])
    beta = None if beta is None else beta.float().expand(H.shape[:-1])
    H, z, *_ = _write_norm_project(H, Y, beta, W.float(), eps, centred)
    return H, z


def columns_fit_program(
    H: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, *options: Any, **named_options: Any
) -> bool:
    """Whether the kernel supports these arguments of `write_norm_project`."""
    side = launch.next_power_of_2(H.shape[-2])
    K = W.shape[1]
    columns = padded_columns(K)
    if W.shape[0] > H.shape[-1]:
        return side * columns <= _MAX_JOINT_COLUMNS
    return K <= _MAX_COLUMNS and _tile_tokens(side) * side * columns <= _MAX_PRODUCTS


def _tile_tokens(side: int) -> int:
    """Tokens of a tile of the forward pass, where streams share W. side: streams, padded."""
    return max(32, 128 // side)


@triton.jit
def _tile_rows(
    first, N, R: tl.constexpr, SIDE: tl.constexpr, n: tl.constexpr, JOINT: tl.constexpr
):  # fmt: skip
    """The rows of z of a tile that begins at token `first`: their numbers, and which exist."""
    row = tl.arange(0, R)
    if JOINT:
        row = first + row
        real = row < N
    else:
        token = first + row // SIDE
        stream = row % SIDE
        row = token * n + stream
        real = (token < N) & (stream < n)
    return row, real


@triton.jit(do_not_specialize=["N", "K", "pieces_a_split"])
def write_norm_project_forward(
    H, Y, beta, W, new, z, rstd, mu, N, D, K, eps, pieces_a_split,
    CENTRED: tl.constexpr, PENDING: tl.constexpr, WEIGHTED: tl.constexpr, EACH: tl.constexpr,
    IS_SPLIT: tl.constexpr, PARTS: tl.constexpr, n: tl.constexpr, JOINT: tl.constexpr,
    TILE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    W_columns = stored_columns(K, PARTS)
    R: tl.constexpr = TILE if JOINT else TILE * SIDE
    C: tl.constexpr = SIDE * BLOCK if JOINT else BLOCK
    VECTORS: tl.constexpr = n if JOINT else 1  # of D numbers in a row
    first = tl.program_id(0).to(tl.int64) * TILE
    t = first + tl.arange(0, TILE)[:, None, None]
    s = tl.arange(0, SIDE)[None, :, None]
    k = tl.arange(0, WIDE)[None, :]
    column = tl.arange(0, C)[:, None]
    b = 1.0
    if WEIGHTED:
        b = tl.load(beta + t * n + s, mask=(t < N) & (s < n), other=0.0)
    elif n != SIDE:  # one y for all streams, but none for those that pad them
        b = tl.where(s < n, 1.0, 0.0)
    dots = tl.zeros([R, WIDE], tl.float32)
    mean = tl.zeros([R], tl.float32)
    spread = tl.zeros([R], tl.float32)
    begin = tl.program_id(1) * pieces_a_split * BLOCK
    end = tl.minimum(D, begin + pieces_a_split * BLOCK)
    for start in range(begin, end, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, None, :]
        on = (t < N) & (s < n) & (d < D)
        h = tl.load(H + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
        if PENDING:
            if EACH:
                y = tl.load(Y + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
            else:
                y = tl.load(Y + t * D + d, mask=(t < N) & (d < D), other=0.0).to(tl.float32)
            h = h + b * y
        h = h.to(new.dtype.element_ty)
        tl.store(new + (t * n + s) * D + d, h, mask=on)
        rows = tl.reshape(h, [R, C])
        v = rows.to(tl.float32)
        at = start + column % BLOCK
        w_at = W + (column // BLOCK * D + at) * W_columns + k
        in_W = (column // BLOCK < n) & (at < D) & (k < W_columns)
        dots += multiply_by_parts(rows, load_parts(w_at, in_W, VECTORS * D * W_columns, PARTS))
        if CENTRED:
            # Welford: join this piece's mean and squared deviations to those of the pieces before.
            before = (start - begin) * VECTORS
            count = tl.minimum(D - start, BLOCK) * VECTORS
            piece = tl.sum(v, 1) / count
            off = tl.where(tl.reshape(on.to(tl.int32), [R, C]) > 0, v - piece[:, None], 0.0)
            step = piece - mean
            mean += step * (count / (before + count))
            spread += tl.sum(off * off, 1) + step * step * (before / (before + count) * count)
        else:
            spread += tl.sum(v * v, 1)
    row, real = _tile_rows(first, N, R, SIDE, n, JOINT)
    if IS_SPLIT:
        # `join_splits` continues.
        row += tl.program_id(1) * tl.cast(N, tl.int64) * (1 if JOINT else n)
        r = spread
    else:
        r = tl.rsqrt(spread / (D * VECTORS) + eps)
        dots = dots * r[:, None]
    if CENTRED:
        tl.store(mu + row, mean, mask=real)
    tl.store(rstd + row, r, mask=real)
    tl.store(z + row[:, None] * K + k, dots, mask=real[:, None] & (k < K))


@triton.jit(do_not_specialize=["N", "K"])
def write_norm_project_backward(
    new, Y, beta, W, g, c, mu, dnew, dH, dY, dbeta, dW, N, D, K,
    CENTRED: tl.constexpr, PENDING: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr,
    n: tl.constexpr, JOINT: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    W_columns = stored_columns(K, PARTS)
    R: tl.constexpr = TILE if JOINT else TILE * SIDE
    C: tl.constexpr = SIDE * BLOCK if JOINT else BLOCK
    VECTORS: tl.constexpr = n if JOINT else 1
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    s = tl.arange(0, SIDE)[None, :, None]
    k = tl.arange(0, WIDE)[None, :]
    column = tl.arange(0, C)[:, None]
    at = tl.program_id(0) * BLOCK + column % BLOCK
    in_W = (column // BLOCK < n) & (at < D) & (k < W_columns)
    w_at = W + (column // BLOCK * D + at) * W_columns + k
    w = load_parts(w_at, in_W, VECTORS * D * W_columns, PARTS)
    dw = tl.zeros([C, WIDE], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(N, TILE), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * TILE
        t = first + tl.arange(0, TILE)[:, None, None]
        row, real = _tile_rows(first, N, R, SIDE, n, JOINT)
        on = (t < N) & (s < n) & (d < D)
        rows = tl.reshape(tl.load(new + (t * n + s) * D + d, mask=on, other=0.0), [R, C])
        v = rows.to(tl.float32)
        g_t = tl.load(g + row[:, None] * K + k, mask=real[:, None] & (k < K), other=0.0)
        g_parts = split_operand(g_t, PARTS)
        dw += multiply_by_parts(tl.trans(rows), g_parts)
        dh = multiply_split(g_parts, w)
        if CENTRED:
            v -= tl.load(mu + row, mask=real, other=0.0)[:, None]
        dh -= tl.load(c + row, mask=real, other=0.0)[:, None] * v
        dh = tl.reshape(dh, [TILE, SIDE, BLOCK])
        dh += tl.load(dnew + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
        dh = tl.where(on, dh, 0.0)
        tl.store(dH + (t * n + s) * D + d, dh.to(dH.dtype.element_ty), mask=on)
        if PENDING:
            b = tl.load(beta + t * n + s, mask=(t < N) & (s < n), other=0.0)
            if EACH:
                y = tl.load(Y + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
                tl.store(dY + (t * n + s) * D + d, (b * dh).to(dY.dtype.element_ty), mask=on)
            else:
                y = tl.load(Y + t * D + d, mask=(t < N) & (d < D), other=0.0).to(tl.float32)
                dy = tl.sum(b * dh, 1, keep_dims=True)
                tl.store(dY + t * D + d, dy.to(dY.dtype.element_ty), mask=(t < N) & (d < D))
            piece_row = dbeta + tl.program_id(0).to(tl.int64) * N * n
            tl.store(
                piece_row + t * n + s, tl.sum(dh * y, 2, keep_dims=True), mask=(t < N) & (s < n)
            )
    split_row = dW + tl.program_id(1).to(tl.int64) * K * D * VECTORS
    dw_at = split_row + (column // BLOCK * D + at) * K + k
    tl.store(dw_at, dw, mask=in_W & (k < K))


def _tile_sizes(
    H: Tensor, W: Tensor, joint_tokens: int, tokens: int, elements: int, keeps_W: bool
) -> dict[str, Any]:
    """The constants of a launch.

    Args:
        H: [B T n D].
        W: [D K] or [nD K].
        joint_tokens: tokens of a tile where all streams of a token are one vector.
        tokens: tokens of a tile otherwise.
        elements: of H in a tile.
        keeps_W: a program needs one piece of W alone.
    """
    n, D = H.shape[-2:]
    K = W.shape[1]
    joint = W.shape[0] > D
    side = launch.next_power_of_2(n)
    wide = padded_columns(K)
    tile = joint_tokens if joint else tokens
    W_rows = (side if joint else 1) * wide  # elements of W for each element of D
    piece = max(16, min(launch.next_power_of_2(D), elements // (tile * side), 8192 // W_rows))
    # Two pieces of a large W do not fit in shared memory; neither does W while it is split there.
    keeps_parts = keeps_W and H.dtype == torch.bfloat16
    stages = 1 if W_rows * piece > 4096 and not keeps_parts else 2
    return {
        "n": n, "JOINT": joint, "TILE": tile, "SIDE": side, "BLOCK": piece, "WIDE": wide,
        "num_warps": 8, "num_stages": stages,
    }  # fmt: skip


@partial(LibraryOp, keeps_strides="W")
def _write_norm_project(
    H: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, z, rstd, mu = _empty_outputs(H, W, centred)
    W = centre_columns(W) if centred else W
    tokens = _tile_tokens(launch.next_power_of_2(H.shape[-2]))
    sizes = _tile_sizes(H, W, joint_tokens=64, tokens=tokens, elements=8192, keeps_W=False)
    D = H.shape[-1]
    N = H.shape[:-2].numel()
    tiles = launch.ceil_div(N, sizes["TILE"])
    splits = split_rows(tiles, launch.ceil_div(D, sizes["BLOCK"]), H)
    sums = empty_sums(splits, z, rstd, mu)
    operand, parts = weight_operand(W, H, is_reused=splits.count == 1)
    launch.launch_kernel(
        write_norm_project_forward, (tiles, splits.count),
        H, *pending_write(H, Y, beta), operand, new, *sums, N, D, W.shape[1], eps, splits.pieces,
        CENTRED=centred, PENDING=Y is not None, WEIGHTED=beta is not None,
        EACH=Y is not None and Y.shape[-2] > 1, IS_SPLIT=splits.count > 1, PARTS=parts, **sizes,
    )  # fmt: skip
    split_width = splits.pieces * sizes["BLOCK"] * (len(W) // D)
    launch_join(sums, [z, rstd, mu], len(W), split_width, eps)
    return new, z, rstd, mu


def pending_write(H: Tensor, Y: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Y and beta; H for one that is None, as a pointer that the kernel does not read."""
    return H if Y is None else Y, H if beta is None else beta


@_write_norm_project.register_fake
def _empty_outputs(H: Tensor, W: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (*H.shape[:-2], 1 if W.shape[0] > H.shape[-1] else H.shape[-2])
    z = W.new_empty(*rows, W.shape[1])
    return H.new_empty(H.shape), z, z.new_empty(rows), z.new_empty(rows if centred else 0)


@partial(LibraryOp, keeps_strides="W")
def _write_norm_project_backward(
    dnew: Tensor,
    dz: Tensor,
    new: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    z: Tensor,
    rstd: Tensor,
    mu: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = new.shape[-2]
    D = new.shape[-1]
    N = new.shape[:-2].numel()
    # Each piece of D reads a token's g and c again, so pieces are long and tiles have few tokens.
    tokens = max(1, 16 // launch.next_power_of_2(n))
    sizes = _tile_sizes(new, W, joint_tokens=16, tokens=tokens, elements=4096, keeps_W=True)
    centred = mu.numel() > 0
    W = centre_columns(W) if centred else W
    g = dz * rstd[..., None]
    c = (dz * z).sum(-1) * rstd * rstd / len(W)
    pieces = launch.ceil_div(D, sizes["BLOCK"])
    tiles = launch.ceil_div(N, sizes["TILE"])
    splits = launch.token_split_count(tiles, pieces, new)
    dH = torch.empty_like(new)
    dY, dbeta = _empty_pending_gradients(Y, new)
    dbeta_parts = launch.empty_partial_sums(W, pieces, *dbeta.shape)
    dW_parts = launch.empty_partial_sums(W, splits, *W.shape)
    operand, parts = weight_operand(W, new)
    launch.launch_kernel(
        write_norm_project_backward, (pieces, splits),
        new, *pending_write(new, Y, beta), operand, g, c, mu if centred else c, dnew,
        dH, dY, dbeta_parts, dW_parts, N, D, W.shape[1],
        CENTRED=centred, PENDING=Y is not None, EACH=Y is not None and Y.shape[-2] > 1,
        PARTS=parts, **sizes,
    )  # fmt: skip
    dW = launch.add_partial_sums(dW_parts, 0)
    dbeta = launch.add_partial_sums(dbeta_parts, 0)
    return dH, dY, dbeta, centre_columns(dW) if centred else dW


def _empty_pending_gradients(Y: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for dY and dbeta, empty where no write with weights is pending."""
    if Y is None:
        return new.new_empty(0), new.new_empty(0, dtype=torch.float32)
    return Y.new_empty(Y.shape), new.new_empty(new.shape[:-1], dtype=torch.float32)


@_write_norm_project_backward.register_fake
def _(new: Tensor, Y: Tensor | None, W: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dY, dbeta = _empty_pending_gradients(Y, new)
    return new.new_empty(new.shape), dY, dbeta, W.new_empty(W.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, Y, beta, W, eps, centred = inputs
    ctx.eps = eps
    ctx.centred = centred
    new, z, rstd, mu = output
    ctx.mark_non_differentiable(rstd, mu)
    ctx.save_for_backward(new, None if beta is None else Y, beta, W, z, rstd, mu)
    ctx.unweighted = describe_unweighted(Y, beta)


def _backward(ctx: Any, dnew: Tensor, dz: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # torch.utils.checkpoint lets them be read once
    new, Y, beta, W, *_ = saved
    if torch.is_grad_enabled():  # create_graph
        return differentiable_backward(ctx, new, Y, beta, W, dnew, dz)
    dH, dY, dbeta, dW = _write_norm_project_backward(dnew, dz, *saved)
    if Y is None:
        return dH, unweighted_gradient(dH, ctx.unweighted), None, dW, None, None
    return dH, dY, dbeta, dW, None, None


_write_norm_project.register_autograd(_backward, setup_context=_save_for_backward)
