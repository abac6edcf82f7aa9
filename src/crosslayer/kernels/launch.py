"""How kernels are launched: block sizes, numbers of programs and of warps, the launch itself."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Whether triton's interpreter runs the kernels.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# The longest piece of a row that a program of `depth_mix` processes at once. One of
# `width_connection` may take four times as much. A norm is fused where the row is one piece.
MAX_ROW_BLOCK = 4096
# What triton compiled, by the kernel and everything that it was compiled for.
_compiled_kernels: dict[tuple[Any, ...], Any] = {}
# Bytes of rows that one program may keep in registers. A multiprocessor has 256 KiB of them, and
# addresses, masks and sums need the rest. `python -m benchmarks machine_code` compiles all kernels
# without a GPU; its column "spilled bytes" shows what the limit allows. In benchmarks/results most
# kernels spill nothing, and none more than 512 bytes a thread.
REGISTER_BYTES = 160 * 1024


def token_count(x: Tensor) -> int:
    """B·T of a tensor [B T D]."""
    return x.numel() // x.shape[-1]


def block_size(D: int, longest: int = 1 << 30) -> int:
    """Elements of a row that a program processes at once: all of them, but at most `longest`."""
    return min(next_power_of_2(D), longest)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n. triton's own function takes as long as a launch."""
    return 1 << (int(n) - 1).bit_length()  # a compiler may have a symbol for n


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def processor_count(like: Tensor) -> int:
    """The number of processors that run programs side by side."""
    return _processors_of_device(like.get_device()) if like.is_cuda else 1


def program_count(tokens: int, like: Tensor, per_processor: int = 4) -> int:
    """How many programs share the tokens, each several in turn: enough to fill the GPU.

    Args:
        tokens: the number of tokens.
        like: a tensor on the device.
        per_processor: programs for each processor. Each program that adds up gradients of
            parameters stores one partial sum.
    """
    return min(tokens, per_processor * processor_count(like))


def token_split_count(tiles: int, pieces: int, like: Tensor) -> int:
    """In how many splits tiles of tokens are summed, where each piece of a row has a program."""
    return min(tiles, max(1, 4 * processor_count(like) // pieces))


def split_count(programs: int, pieces: int, like: Tensor) -> int:
    """In how many splits a row of so many pieces is processed, if there are few programs.

    One, if the programs fill the GPU. While tokens are decoded there are few, and each would
    process one piece after another.
    """
    return max(1, min(pieces, processor_count(like) // max(1, programs)))


@functools.cache
def _processors_of_device(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits_in_registers(sources: Sequence[Tensor], block: int, rows: int) -> bool:
    """Whether a program can keep a token's sources in registers between two passes.

    Args:
        sources: the tensors of which a row each is kept, in their own dtype.
        block: elements of a row.
        rows: the number of other rows in registers, float32.
    """
    return (4 * rows + sum(x.element_size() for x in sources)) * block <= REGISTER_BYTES


def warp_count(elements: int) -> int:
    """Warps of a program with this number of elements in registers: 16 elements a thread."""
    return max(1, min(16, next_power_of_2(elements) // 512))


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
    max_registers: int | None = None,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its first tensor; do nothing where there are no tokens.

    Args:
        kernel: a triton function.
        grid: the number of programs along one or two axes.
        args: what the kernel takes: tensors, numbers, None, and lists of tensors and None.
        num_warps: of each program.
        num_stages: of a pipelined loop.
        max_registers: of a thread, so that more programs run side by side; None for no limit.
        constants: the kernel's compile-time constants, in its order.
    """
    if 0 in grid:
        return
    first = args[0] if isinstance(args[0], Tensor) else args[0][0]
    device = first.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_kernel(
                kernel, grid, *args, num_warps=num_warps, num_stages=num_stages,
                max_registers=max_registers, **constants,
            )  # fmt: skip
        return
    # triton takes longer to find a compiled kernel than to launch it, so it is asked once.
    addresses, types = _describe_arguments(args)
    options = (num_warps, num_stages, max_registers)
    key = (id(kernel), device, *options, *constants.values(), *types)
    compiled = _compiled_kernels.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*addresses, *constants.values())
        return
    _check_one_device(kernel, args)
    compiled = kernel[grid](
        *[tuple(a) if isinstance(a, list) else a for a in args],
        **constants,
        **compiler_options(*options),
    )
    if compiled is not None:  # triton's interpreter compiles nothing
        _compiled_kernels[key] = compiled


def compiler_options(num_warps: int, num_stages: int, max_registers: int | None) -> dict[str, Any]:
    """The options of `launch_kernel` as triton takes them."""
    # The default of enable_fp_fusion, written out because triton 3.9 warns where it is not.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return options


def _check_one_device(kernel: Any, args: Sequence[Any]) -> None:
    lists = [a if isinstance(a, list) else [a] for a in args]
    devices = {str(a.device) for group in lists for a in group if isinstance(a, Tensor)}
    if len(devices) > 1:
        names = " and ".join(sorted(devices))
        raise ValueError(f"{kernel.__name__}: tensors on {names}, expected one device")


def _describe_arguments(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The arguments with addresses for tensors; and of each, what triton compiles a kernel for."""
    values: list[Any] = []
    types: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            address = a.data_ptr()
            values.append(address)
            types.append((a.dtype, a.get_device(), address % 16 == 0))
        elif a is None or isinstance(a, float):
            values.append(a)
            types.append(type(a))
        elif isinstance(a, int):
            values.append(a)
            types.append((a == 1, a % 16 == 0, a >= 2**31))
        else:
            list_values, list_types = _describe_arguments(a)
            values.append(tuple(list_values))
            types.append(tuple(list_types))
    return values, types
