"""What all kernels share: how rows are cut into blocks, how many programs and warps run, and the launch itself."""

from typing import Any

import torch
import triton
from torch import Tensor

ROW = 4096  # the longest piece of a row that a kernel without a sum over D takes at once
HELD = (
    160 * 1024
)  # bytes of rows that one program keeps in registers, seen to compile with hardly a spill


def tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def block(D: int, longest: int = 1 << 30) -> int:
    """Elements of D a program takes at once: all of it, or pieces where it is longer than that."""
    return min(triton.next_power_of_2(D), longest)


def programs(N: int, like: Tensor) -> int:
    """How many programs share N tokens where each keeps a part of a sum over them: enough to fill the GPU."""
    count = (
        torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 1
    )
    return min(N, 4 * count)


def holds(X: list[Tensor], size: int, rows: int) -> bool:
    """Whether a token's sources stay in registers until a second pass, beside so many float32 rows; else read twice."""
    return (4 * rows + sum(x.element_size() for x in X)) * size <= HELD


def warps(elements: int) -> int:
    """Warps for a program that has so many elements in flight: 16 a thread."""
    return max(1, min(16, triton.next_power_of_2(elements) // 512))


def part(like: Tensor, *shape: int) -> Tensor:
    """Room for sums in float32, one of each program's: `total` adds them up."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def total(parts: Tensor, *axes: int) -> Tensor:
    """The sum of all programs' parts, in an order that does not depend on when they ended."""
    return parts.sum(axes)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its tensors; no tokens, no launch."""
    if 0 in grid:
        return
    args = tuple(tuple(a) if isinstance(a, list) else a for a in args)
    first = args[0][0] if isinstance(args[0], tuple) else args[0]
    with torch.cuda.device_of(first):
        # fused multiply-adds are wanted; triton 3.9 warns where it is not told
        kernel[grid](
            *args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True
        )
