"""Rows that several programs share, because a batch has fewer tokens than a GPU has processors.

While one token is decoded, a single program would process all pieces of its row one by one. Here
each program has some of the pieces. It stores its sums, and `join_splits` adds them.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import launch


class RowSplits(NamedTuple):
    """How the pieces of a row are shared."""

    count: int  # programs that share a row
    pieces: int  # of each of them


def split_rows(programs: int, pieces: int, like: Tensor) -> RowSplits:
    """Share the pieces of each row if so few programs leave most of a GPU idle.

    Args:
        programs: the number of programs if no row is shared.
        pieces: of a row.
        like: a tensor on the device.
    """
    wanted = launch.split_count(programs, pieces, like)
    pieces_a_split = launch.ceil_div(pieces, wanted)
    return RowSplits(launch.ceil_div(pieces, pieces_a_split), pieces_a_split)


def empty_sums(splits: RowSplits, *outputs: Tensor) -> list[Tensor]:
    """Memory for what programs sum for each output: the outputs themselves where none share."""
    if splits.count == 1:
        return list(outputs)
    return [launch.empty_partial_sums(x, splits.count, *x.shape) for x in outputs]


def launch_join(
    sums: list[Tensor], outputs: list[Tensor], width: int, split_width: int, eps: float
) -> None:
    """Compute the outputs from the sums of all splits; nothing to do where these are the outputs.

    Args:
        sums: of each split, the products [splits rows K]; the sums of squares [splits rows], for a
            centred norm about the split's mean; and for a centred norm the means [splits rows],
            else empty.
        outputs: z [rows K], rstd [rows] and mu [rows]; mu may be empty.
        width: numbers in a row.
        split_width: numbers in a split of it.
        eps: of the norm.
    """
    dots, spreads, means = sums
    z, rstd, mu = outputs
    if dots is z:
        return
    rows = rstd.numel()
    K = z.shape[-1]
    launch.launch_kernel(
        join_splits, (rows,),
        dots, spreads, means, z, rstd, mu, rows, K, width, split_width, len(dots), eps,
        CENTRED=mu.numel() > 0, WIDE=launch.next_power_of_2(K),
        SIDE=launch.next_power_of_2(len(dots)), num_warps=4,
    )  # fmt: skip


# triton compiles an integer that is 1 as a constant unless told not to.
@triton.jit(do_not_specialize=["rows", "K", "splits"])
def join_splits(
    dots, spreads, means, z, rstd, mu, rows, K, width, split_width, splits, eps,
    CENTRED: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SIDE)
    k = tl.arange(0, WIDE)
    on = split < splits
    at = split * tl.cast(rows, tl.int64) + row
    sums = tl.load(dots + at[:, None] * K + k, mask=on[:, None] & (k < K), other=0.0)
    spread = tl.sum(tl.load(spreads + at, mask=on, other=0.0), 0)
    if CENTRED:
        count = tl.minimum(tl.maximum(width - split * split_width, 0), split_width)
        split_mean = tl.load(means + at, mask=on, other=0.0)
        mean = tl.sum(split_mean * count, 0) / width
        step = tl.where(on, split_mean - mean, 0.0)
        spread += tl.sum(step * step * count, 0)
        tl.store(mu + row, mean)
    r = tl.rsqrt(spread / width + eps)
    tl.store(rstd + row, r)
    tl.store(z + row * K + k, tl.sum(sums, 0) * r, mask=k < K)
