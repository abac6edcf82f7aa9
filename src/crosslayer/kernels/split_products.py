"""Products on tensor cores with the precision of float32.

A bfloat16 number has 8 significant bits, so a float32 number is a sum of three. Products of
bfloat16 numbers are exact on a tensor core, and twice as fast as those of TF32. Where the streams
are bfloat16, the other operand alone is split: three products for the six of `tf32x3`.

A tensor core truncates every sum to float32. Long sums are therefore added outside: each piece
starts from zero, with the smallest parts first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import INTERPRETED


@triton.jit
def _multiply_parts(a, b, acc):
    """acc + a b of two bfloat16 tensors."""
    if INTERPRETED:  # It multiplies the bits of bfloat16 numbers, not their values.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _split_parts(x):
    """Three bfloat16 tensors whose sum is x, the largest first."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    return first, second, third


@triton.jit
def split_operand(x, PARTS: tl.constexpr):
    """x in one part, itself, or in three."""
    if PARTS == 1:
        parts = (x,)
    else:
        parts = _split_parts(x)
    return parts


@triton.jit
def stored_columns(K, PARTS: tl.constexpr):
    """The number of columns of `weight_operand`: those of W, or the next multiple of 8."""
    if PARTS == 1:
        columns = K
    else:
        columns = tl.cdiv(K, 8) * 8
    return columns


@triton.jit
def load_parts(at, mask, size, PARTS: tl.constexpr):
    """The parts of a piece of `weight_operand`, the largest first.

    Args:
        at: where the piece of the first part is.
        mask: which of its elements exist.
        size: elements of a part.
    """
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tl.load(at + part * size, mask=mask, other=0.0),)
    return parts


@triton.jit
def multiply_by_parts(rows, parts):
    """rows × the sum of the parts. Rows that are multiplied by three parts are bfloat16."""
    COUNT: tl.constexpr = len(parts)
    if COUNT == 1:
        product = tl.dot(rows.to(tl.float32), parts[0], input_precision="tf32x3")
    else:
        product = tl.zeros([rows.shape[0], parts[0].shape[1]], tl.float32)
        for i in tl.static_range(COUNT):
            product = _multiply_parts(rows, parts[COUNT - 1 - i], product)
    return product


@triton.jit
def multiply_split(a, b):
    """a bᵀ of two tensors in the same number of parts."""
    if len(a) == 1:
        product = tl.dot(a[0], tl.trans(b[0]), input_precision="tf32x3")
    else:
        # The products that float32 can hold, the smallest first.
        product = tl.zeros([a[0].shape[0], b[0].shape[0]], tl.float32)
        product = _multiply_parts(a[2], tl.trans(b[0]), product)
        product = _multiply_parts(a[1], tl.trans(b[1]), product)
        product = _multiply_parts(a[0], tl.trans(b[2]), product)
        product = _multiply_parts(a[1], tl.trans(b[0]), product)
        product = _multiply_parts(a[0], tl.trans(b[1]), product)
        product = _multiply_parts(a[0], tl.trans(b[0]), product)
    return product


@triton.jit(do_not_specialize=["row_stride", "K"])
def split_weight_rows(
    W, parts, rows, row_stride, column_stride, K, WIDE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    k = tl.arange(0, WIDE)[None, :]
    w = tl.load(W + row * row_stride + k * column_stride, mask=(row < rows) & (k < K), other=0.0)
    first, second, third = _split_parts(w)
    columns = stored_columns(K, 3)
    at = parts + row * columns + k
    size = tl.cast(rows, tl.int64) * columns
    stored = (row < rows) & (k < columns)
    tl.store(at, first, mask=stored)
    tl.store(at + size, second, mask=stored)
    tl.store(at + 2 * size, third, mask=stored)


def weight_operand(W: Tensor, H: Tensor, is_reused: bool = True) -> tuple[Tensor, int]:
    """A matrix of weights as a kernel reads it, and the number of its parts.

    For bfloat16 streams, three bfloat16 tensors [rows, _aligned_columns(K)] whose sum is W, the
    largest first. Their rows are multiples of 16 bytes: columns beyond K are 0.

    Args:
        W: [rows K] float32.
        H: the streams.
        is_reused: many programs read the same rows of W. Else it is not split.
    """
    rows, K = W.shape
    if not is_reused or H.dtype != torch.bfloat16:
        return W.contiguous(), 1
    columns = _aligned_columns(K)
    tile = 64
    parts = torch.empty(3, rows, columns, dtype=torch.bfloat16, device=W.device)
    launch.launch_kernel(
        split_weight_rows, (launch.ceil_div(rows, tile),),
        W, parts, rows, W.stride(0), W.stride(1), K, WIDE=padded_columns(K), TILE=tile,
        num_warps=4,
    )  # fmt: skip
    return parts, 3


def centre_columns(W: Tensor) -> Tensor:
    """W without the mean of each column: a constant added to v adds nothing to v W."""
    return W - W.mean(0)


def _aligned_columns(K: int) -> int:
    """The number of columns that are stored of a part."""
    return 8 * launch.ceil_div(K, 8)


def padded_columns(K: int) -> int:
    """The number of columns that products are computed with."""
    return max(16, launch.next_power_of_2(K))


def weight_gradient(rows: Tensor, g: Tensor) -> Tensor:
    """Σ_tokens rowᵀ g, the gradient of weights W in row W.

    Args:
        rows: of each token all streams, [B T n D].
        g: [B T K] float32.

    Returns:
        [nD K] float32.
    """
    width = rows.shape[-2:].numel()
    K = g.shape[-1]
    N = g.shape[:-1].numel()
    tile = 64
    block = 128
    pieces = launch.ceil_div(width, block)
    tiles = launch.ceil_div(N, tile)
    splits = launch.token_split_count(tiles, pieces, rows)
    partial = launch.empty_partial_sums(g, splits, width, K)
    launch.launch_kernel(
        sum_weight_gradient, (pieces, splits),
        rows, g, partial, N, width, PARTS=3 if rows.dtype == torch.bfloat16 else 1, K=K,
        WIDE=padded_columns(K), TILE=tile, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return launch.add_partial_sums(partial, 0)


@triton.jit(do_not_specialize=["N"])
def sum_weight_gradient(
    rows, g, dW, N, width, PARTS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDE)[None, :]
    dw = tl.zeros([BLOCK, WIDE], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(N, TILE), tl.num_programs(1)):
        t = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)[:, None]
        on = (t < N) & (column < width)[None, :]
        v = tl.trans(tl.load(rows + t * width + column[None, :], mask=on, other=0.0))
        g_t = tl.load(g + t * K + k, mask=(t < N) & (k < K), other=0.0)
        dw += multiply_by_parts(v, split_operand(g_t, PARTS))
    at = tl.program_id(1).to(tl.int64) * width * K + column[:, None] * K + k
    tl.store(dW + at, dw, mask=(column < width)[:, None] & (k < K))
