"""Compile every kernel that the cases launch for a GPU, on a machine without one.

python ptx.py <compute capability> [case …]

Prints a line for each kernel: name, warps, bytes of shared memory.
"""

import sys
import warnings
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.cases import kernel_ops
from crosslayer.kernels import launch
from tests.kernels.cases import CASES

TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}
# Bytes of shared memory that a program may have, also on the smaller GPUs of each generation.
SHARED_MEMORY = 99 * 1024


def triton_type(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return tuple(triton_type(a) for a in argument)
    if isinstance(argument, torch.Tensor):
        return TRITON_TYPES[argument.dtype]
    if argument is None:
        return "constexpr"
    return "fp32" if isinstance(argument, float) else "i32"


def divisible_arguments(args: tuple[Any, ...]) -> dict[tuple[int, ...], list[list[Any]]]:
    """The arguments that are multiples of 16; without them no load is wider than an element."""
    divisible = [["tt.divisibility", 16]]
    attributes = {}
    for i, argument in enumerate(args):
        if isinstance(argument, tuple | list):
            attributes |= {(i, j): divisible for j in range(len(argument))}
        elif isinstance(argument, torch.Tensor) or (
            isinstance(argument, int) and argument % 16 == 0
        ):
            attributes[(i,)] = divisible
    return attributes


def compile_for(capability: int, names: list[str]) -> None:
    """Compile the kernels of the named cases, with bf16 streams of width 4096."""
    compiled = set()

    def compile_kernel(
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        signature = dict(zip(kernel.arg_names, map(triton_type, args), strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        assert list(signature) == kernel.arg_names, f"{kernel.__name__}: {list(signature)}"
        key = kernel.__name__, num_warps, str(signature), str(constants)
        if key in compiled:
            return
        compiled.add(key)
        source = ASTSource(
            fn=kernel, signature=signature, constexprs=constants, attrs=divisible_arguments(args)
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        shared = out.metadata.shared
        assert f".target sm_{capability}" in out.asm["ptx"]
        assert shared <= SHARED_MEMORY, f"{kernel.__name__}: {shared} bytes of shared memory"
        print(kernel.__name__, num_warps, shared, flush=True)

    launch.launch_kernel = compile_kernel
    for name in names:
        case = CASES[name]
        rows, weights = case.make_tensors(2, 4096, torch.bfloat16)
        rows = [x.bfloat16().requires_grad_() for x in rows]
        weights = [w.float().requires_grad_() for w in weights]
        outs = case.run(kernel_ops(), rows, weights)
        sum(out.sum() for out in outs).backward()
    assert compiled


if __name__ == "__main__":
    warnings.simplefilter("error")
    compile_for(int(sys.argv[1]), sys.argv[2:] or list(CASES))
