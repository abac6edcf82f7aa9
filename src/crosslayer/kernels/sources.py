"""The sources of an op over depth, which are few in one launch and many in the next.

A kernel is compiled for a bucket of numbers of sources, not for each number: a model of 24 layers
needs four. It takes as many pointers as the largest number of its bucket. The pointers beyond
`count`, the number of sources, repeat the last one; nothing is loaded or stored there.

The streams of a token are loaded here too: they are rows of one tensor.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import launch

_SMALLEST_BUCKET = 4


def has_few_sources(
    most: int, X: Sequence[Tensor], *arguments: Any, **named_arguments: Any
) -> bool:
    """Whether a kernel that takes `most` sources or streams supports these; `most` comes first."""
    return len(X) <= most


def bucket_size(count: int) -> int:
    """The largest number of sources that shares a kernel with this one."""
    return max(_SMALLEST_BUCKET, launch.next_power_of_2(count))


def pad_sources(X: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sources of a bucket: the last one is repeated."""
    missing = bucket_size(len(X)) - len(X)
    return list(X) + [X[-1]] * missing


@triton.jit
def load_rows(X, first: tl.constexpr, number: tl.constexpr, count, row, d, D):
    """A row of each of the sources first, first + 1, …; zeros from `count` on; 0.0 for None.

    `row` has the int64 offsets of the elements d. They are added to a pointer last, so that a
    thread keeps them in registers and not its address in every source.
    """
    rows = ()
    for i in tl.static_range(number):
        if X[first + i] is not None:
            mask = d < D * (first + i < count)
            rows = rows + (tl.load(X[first + i] + row, mask=mask, other=0.0),)
        else:
            rows = rows + (0.0,)
    return rows


@triton.jit
def load_streams(H, t, d, D, on, n: tl.constexpr):
    """The elements d of each stream of [tokens n D], for tokens t; zeros where `on` is False."""
    streams = ()
    for s in tl.static_range(n):
        streams = streams + (tl.load(H + (t * n + s) * D + d, mask=on, other=0.0),)
    return streams


@triton.jit
def load_numbers(pointer, first: tl.constexpr, number: tl.constexpr, count, other: tl.constexpr):
    """The numbers at first, first + 1, …; `other` from `count` on."""
    numbers = ()
    for i in tl.static_range(number):
        numbers = numbers + (tl.load(pointer + first + i, mask=first + i < count, other=other),)
    return numbers
