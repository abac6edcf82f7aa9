"""Each kernel compiled for a Hopper GPU: what its machine code says of its speed, without a GPU.

`modelled of copy` is a model and no measurement. A token takes a block the latency of its rounds of
loads and its barriers, or an SM the time to issue the instructions, or to move the bytes at the
bandwidth of a copy, whichever is longest. It is left out for kernels that hold several tokens or
walk a row.
"""

import math
from collections.abc import Iterator

from benchmarks.cases import each_shape
from benchmarks.compilation import CompiledKernel, compile_launches, without_cache
from benchmarks.results import Row
from benchmarks.sass import MachineCode, read_machine_code
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import describe_error

COLUMNS = (
    *("op", "n", "D", "dtype", "kernel", "warps", "registers", "spilled bytes", "load rounds"),
    *("barriers", "instructions", "blocks an SM", "modelled of copy", "compile seconds"),
)
TOKENS = 16  # more than the programs that share tokens without a GPU: at most 12
# An H200. Seconds are estimates.
PROCESSORS = 132
COPY_BANDWIDTH = 4.3e12  # bytes/s
CLOCK = 1.98e9  # cycles/s
LATENCY = 650e-9  # of a load round, seconds
BARRIER = 30e-9  # seconds
OVERHEAD = 100e-9  # of a token, seconds
# Of a multiprocessor (SM) of compute capability 9.0.
REGISTERS = 65536
WARPS = 64
SHARED_MEMORY = 233472  # bytes; a block takes 1 KiB more than it asks for
BLOCKS = 32
SCHEDULERS = 4


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark. triton's cache is not read, so it compiles every kernel."""
    with without_cache():
        yield from _measured_rows(settings)


def _measured_rows(settings: BenchmarkSettings) -> Iterator[Row]:
    for case, D, shape in each_shape(settings):
        try:
            kernels = compile_launches(case, TOKENS, D, settings.torch_dtype)
        except ValueError as error:
            yield shape | {"kernel": "none", "note": describe_error(error)}
            continue
        forward, backward = case.traffic(2**20, D, settings.torch_dtype.itemsize)
        for kernel in kernels:
            bytes_moved = backward if kernel.name.endswith("_backward") else forward
            launches = sum(other.launches for other in kernels if other.name == kernel.name)
            yield shape | describe_kernel(kernel, bytes_moved / launches / 2**20)


def describe_kernel(kernel: CompiledKernel, token_bytes: float) -> Row:
    """The columns of one kernel, whose launch must move so many bytes a token."""
    code = read_machine_code(kernel.binary)
    warps = kernel.launch.num_warps
    blocks = blocks_per_processor(code.registers, warps, kernel.binary.metadata.shared)
    return {
        "kernel": kernel.name,
        "warps": warps,
        "registers": code.registers,
        "spilled bytes": code.spilled_bytes,
        "load rounds": code.load_rounds,
        "barriers": code.barriers,
        "instructions": code.instructions,
        "blocks an SM": blocks,
        "modelled of copy": share_of_copy(kernel, code, token_bytes, blocks),
        "compile seconds": kernel.seconds,
    }


def blocks_per_processor(registers: int, num_warps: int, shared: int) -> int:
    """How many programs an SM runs at once; a warp's registers are allocated 256 at a time."""
    warps_by_registers = REGISTERS // (math.ceil(registers * 32 / 256) * 256)
    return min(
        warps_by_registers // num_warps,
        WARPS // num_warps,
        SHARED_MEMORY // (shared + 1024),
        BLOCKS,
    )


def share_of_copy(
    kernel: CompiledKernel, code: MachineCode, token_bytes: float, blocks: int
) -> float | None:
    """The modelled bandwidth, as a share of that of a copy; None where the model does not hold."""
    if "TILE" in kernel.launch.constants or kernel.name.startswith("sinkhorn"):
        return None
    programs, *others = kernel.launch.grid
    program_bytes = token_bytes / math.prod(others)
    full_waves = 1.0
    if programs < TOKENS:  # programs share the tokens, so many on a processor
        waves = programs / blocks
        full_waves = waves / math.ceil(waves) if waves > 1 else 1.0
        blocks = min(blocks, programs)
    waiting = (code.load_rounds * LATENCY + code.barriers * BARRIER + OVERHEAD) / blocks
    issuing = code.instructions * kernel.launch.num_warps / SCHEDULERS / CLOCK
    moving = program_bytes / (COPY_BANDWIDTH / PROCESSORS)
    return moving / max(waiting, issuing, moving) * full_waves
