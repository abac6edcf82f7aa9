"""Compile every kernel that the cases launch for a GPU, on a machine without one.

python ptx.py <compute capability> <dtype> [case …]

Prints a line for each kernel: name, warps, bytes of shared memory.
"""

import re
import sys
import warnings

import torch

from benchmarks.compilation import compile_launches
from tests.kernels.cases import CASES

# Bytes of shared memory that a program may have, also on the smaller GPUs of each generation.
SHARED_MEMORY = 99 * 1024


# In triton's intermediate code: what a value is computed from, for a product its accumulator.
SOURCES = (
    r"(%\w+)\S* = (?:tt\.dot|ttng\.warp_group_dot) \S+, \S+, (%\w+)",
    r"(%\w+)\S* = (?:ttg\.convert_layout|ttng\.warp_group_dot_wait|ttng\.tmem_load) (%\w+)",
)
# Blackwell's products add to tensor memory, where the flag after it is not %false.
MEMORY_PRODUCT = r"ttng\.tc_gen5_mma \S+, \S+, (%\w+)\S*, (%\w+)"
MEMORY_STORE = r"ttng\.tmem_store (%\w+)\S*, (%\w+)"


def assert_sums_added_outside(ttgir: str) -> int:
    """Assert that no product on tensor cores has the accumulator of a loop; the number of products.

    A tensor core truncates as it adds, so the error of such a sum grows with the loop's length.
    """
    carried = set()
    for arguments in re.findall(r"iter_args\((.*?)\) ->", ttgir):
        carried.update(re.findall(r"(%\w+) = ", arguments))
    products = dict(re.findall(SOURCES[0], ttgir))
    sources = products | dict(re.findall(SOURCES[1], ttgir))
    sources |= {memory: value for value, memory in re.findall(MEMORY_STORE, ttgir)}
    accumulators = [*products]
    for product in re.finditer(MEMORY_PRODUCT, ttgir):
        memory, adds = product.groups()
        in_loop = ttgir[: product.start()].rpartition("scf.for")[2]
        is_stored = any(place == memory for _, place in re.findall(MEMORY_STORE, in_loop))
        assert adds == "%false" or is_stored, f"{memory} is added to over a loop"
        accumulators.append(memory)
    for product in accumulators:
        value = product
        while value in sources:
            value = sources[value]
        assert value not in carried, f"{product} is added to {value}, which a loop carries"
    return len(accumulators)


def compile_for(capability: int, dtype: torch.dtype, names: list[str]) -> None:
    """Compile the kernels of the named cases, with streams of width 4096 if they fit."""
    for name in names:
        width = min(4096, CASES[name].widest)
        kernels = compile_launches(CASES[name], 2, width, dtype, capability)
        assert kernels
        products = 0
        for kernel in kernels:
            shared = kernel.binary.metadata.shared
            assert f".target sm_{capability}" in kernel.binary.asm["ptx"]
            products += assert_sums_added_outside(kernel.binary.asm["ttgir"])
            assert shared <= SHARED_MEMORY, f"{kernel.name}: {shared} bytes of shared memory"
            print(kernel.name, kernel.launch.num_warps, shared, flush=True)
        # An instruction of a new name would be no product here.
        assert products or not name.startswith("project")


if __name__ == "__main__":
    warnings.simplefilter("error")
    compile_for(int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:] or list(CASES))
