"""Compile every kernel that the cases launch for a GPU, on a machine without one.

python ptx.py <compute capability> [case …]

Prints a line for each kernel: name, warps, bytes of shared memory.
"""

import sys
import warnings

import torch

from benchmarks.compilation import compile_launches
from tests.kernels.cases import CASES

# Bytes of shared memory that a program may have, also on the smaller GPUs of each generation.
SHARED_MEMORY = 99 * 1024


def compile_for(capability: int, names: list[str]) -> None:
    """Compile the kernels of the named cases, with bf16 streams of width 4096."""
    for name in names:
        kernels = compile_launches(CASES[name], 2, 4096, torch.bfloat16, capability)
        assert kernels
        for kernel in kernels:
            shared = kernel.binary.metadata.shared
            assert f".target sm_{capability}" in kernel.binary.asm["ptx"]
            assert shared <= SHARED_MEMORY, f"{kernel.name}: {shared} bytes of shared memory"
            print(kernel.name, kernel.num_warps, shared, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    compile_for(int(sys.argv[1]), sys.argv[2:] or list(CASES))
