"""How kernels are launched: block sizes, numbers of programs and of warps, the launch itself."""

from typing import Any

import torch
import triton
from torch import Tensor

# The longest piece of a row that a kernel without a sum over D processes at once.
MAX_ROW_BLOCK = 4096
# Bytes of rows that one program may keep in registers: measured to compile with hardly a spill.
REGISTER_BYTES = 160 * 1024


def token_count(x: Tensor) -> int:
    """B·T of a tensor [B T D]."""
    return x.numel() // x.shape[-1]


def block_size(D: int, longest: int = 1 << 30) -> int:
    """Elements of a row that a program processes at once: all of them, but at most `longest`."""
    return min(triton.next_power_of_2(D), longest)


def processor_count(like: Tensor) -> int:
    """The number of processors that run programs side by side."""
    if not like.is_cuda:
        return 1
    return torch.cuda.get_device_properties(like.device).multi_processor_count


def program_count(tokens: int, like: Tensor) -> int:
    """How many programs share the tokens where each has a partial sum: enough to fill the GPU."""
    return min(tokens, 4 * processor_count(like))


def split_count(programs: int, pieces: int, like: Tensor) -> int:
    """In how many splits a row of so many pieces is processed, if there are few programs.

    One, if the programs fill the GPU. While tokens are decoded there are few, and each would
    process one piece after another.
    """
    return max(1, min(pieces, processor_count(like) // max(1, programs)))


def fits_in_registers(sources: list[Tensor], block: int, rows: int) -> bool:
    """Whether a program can keep a token's sources in registers between two passes.

    Args:
        sources: the tensors of which a row each is kept, in their own dtype.
        block: elements of a row.
        rows: the number of other rows in registers, float32.
    """
    return (4 * rows + sum(x.element_size() for x in sources)) * block <= REGISTER_BYTES


def warp_count(elements: int) -> int:
    """Warps of a program with this number of elements in registers: 16 elements a thread."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


def empty_partial_sums(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised float32 memory for the partial sums of all programs."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def add_partial_sums(partial: Tensor, *axes: int) -> Tensor:
    """The sum of all programs' partial sums. The order is fixed, whichever program ends first."""
    return partial.sum(axes)


def launch_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its first tensor; do nothing where there are no tokens."""
    if 0 in grid:
        return
    args = tuple(tuple(a) if isinstance(a, list) else a for a in args)
    first = args[0][0] if isinstance(args[0], tuple) else args[0]
    with torch.cuda.device_of(first):
        # The default of enable_fp_fusion, written out because triton 3.9 warns where it is not.
        kernel[grid](
            *args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True
        )
