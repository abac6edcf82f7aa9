"""Many sums over rows at once: device functions.

A sum over a row is a wait for all warps of a program. So a kernel asks for all rows before it waits
for a sum, and computes independent sums together: each thread adds up its own elements, and what
is left of all rows is reduced once.
"""

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED

# Where PTX may be written inline: the interpreter has no assembly, and AMD another one.
TAKES_PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)


@triton.constexpr_function
def _padded_count(count):
    return max(2, triton.next_power_of_2(count))


@triton.jit
def sum_in_thread(x, BLOCK: tl.constexpr):
    """Partial sums of a row [BLOCK]: those of 8 neighbours.

    One thread has them, as it loads 16 bytes at once, so no thread waits for another.
    """
    EACH: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    return tl.sum(tl.reshape(x, [BLOCK // EACH, EACH]), 1)


@triton.jit
def sum_partial_sums(partial):
    """The sums of a tuple of `sum_in_thread`, in one tensor that every thread has whole.

    Its length is a power of two: `row_sum` takes a number out of it.
    """
    LANES: tl.constexpr = partial[0].shape[0]
    COUNT: tl.constexpr = _padded_count(len(partial))
    joined = partial
    for _ in tl.static_range(COUNT - len(partial)):
        joined = joined + (tl.zeros([LANES], tl.float32),)
    for _ in tl.static_range(16):
        if len(joined) > 1:
            pairs = ()
            for i in tl.static_range(len(joined) // 2):
                pairs = pairs + (tl.join(joined[i], joined[i + len(joined) // 2]),)
            joined = pairs
    return tl.sum(tl.reshape(joined[0], [LANES, COUNT]), 0)


@triton.jit
def sum_rows(rows, BLOCK: tl.constexpr):
    """The sum of each of a tuple of rows [BLOCK], as `sum_partial_sums` returns it."""
    partial = ()
    for i in tl.static_range(len(rows)):
        partial = partial + (sum_in_thread(rows[i], BLOCK),)
    return sum_partial_sums(partial)


@triton.jit
def row_sum(sums, row: tl.constexpr):
    """One number of `sum_rows`, or of a tensor computed from it."""
    COUNT: tl.constexpr = sums.numel
    # -0.0 is what a compiler can leave out of a sum.
    return tl.sum(tl.where(tl.arange(0, COUNT) == row, sums, -0.0), 0)


@triton.jit
def repeat_conversion(x):
    """x, of which a compiler does not know that it has been converted to float32.

    Otherwise it keeps the float32 row in registers instead of the row, which takes half of them.
    """
    PAIRS: tl.constexpr = x.numel >= 64  # in each thread of a warp
    if TAKES_PTX and PAIRS and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x.to(tl.float32)
