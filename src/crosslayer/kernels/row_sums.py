"""Many sums over rows at once: device functions.

A sum over a row is a wait for all warps of a program. So a kernel asks for all rows before it waits
for a sum, and computes independent sums together: each thread adds up its own elements, and what
is left of all rows is reduced once.

`sum_rows` does both steps. A kernel that does not hold all rows at once does them itself:
`sum_in_thread` for a row, then `sum_partial_sums` for all. Either way the sums are in one tensor,
which a kernel computes on as a whole, or takes numbers out of with `pick_number`.
"""

import triton
import triton.language as tl

from .launch import INTERPRETED


@triton.constexpr_function
def _padded_count(count):
    return max(2, triton.next_power_of_2(count))


@triton.jit
def sum_in_thread(x, BLOCK: tl.constexpr):
    """The first step for one row [BLOCK]: the sums of 8 neighbours each, [BLOCK / 8].

    One thread has the neighbours, as it loads 16 bytes at once, so no thread waits for another.
    """
    EACH: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    return tl.sum(tl.reshape(x, [BLOCK // EACH, EACH]), 1)


@triton.jit
def sum_partial_sums(partial):
    """The second step for all rows: a tensor with the sum of each, which every thread has whole.

    Its length is the next power of two, at least 2. The numbers beyond the rows are 0.

    Args:
        partial: a tuple with the `sum_in_thread` of each row.
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
    """Both steps for a tuple of rows [BLOCK]: the tensor that `sum_partial_sums` returns."""
    partial = ()
    for i in tl.static_range(len(rows)):
        partial = partial + (sum_in_thread(rows[i], BLOCK),)
    return sum_partial_sums(partial)


@triton.jit
def pick_number(numbers, index: tl.constexpr):
    """numbers[index] of the tensor that `sum_rows` returns, or of one computed from it.

    triton indexes no tensor, so all other numbers are replaced by zeros, and the sum is the number.
    """
    COUNT: tl.constexpr = numbers.numel
    # -0.0 is what a compiler can leave out of a sum.
    return tl.sum(tl.where(tl.arange(0, COUNT) == index, numbers, -0.0), 0)


@triton.jit
def repeat_conversion(x):
    """x, of which a compiler does not know that it has been converted to float32.

    Otherwise it keeps the float32 row in registers instead of the row, which takes half of them.
    """
    PAIRS: tl.constexpr = x.numel >= 64  # in each thread of a warp
    if not INTERPRETED and PAIRS and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x.to(tl.float32)
