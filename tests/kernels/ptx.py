"""Compile for a GPU every kernel that the cases launch, without a GPU: python ptx.py <compute capability> [case …]

Prints a line a kernel: name, warps, bytes of shared memory.
"""

import sys
import warnings
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crosslayer.kernels import launch
from tests.kernels.accuracy import kernels
from tests.kernels.cases import CASES

NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}
SHARED = (
    99 * 1024
)  # bytes a program may have on any of these, and on the smaller GPUs of their generations


def kind(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return tuple(kind(a) for a in argument)
    if isinstance(argument, torch.Tensor):
        return NAMES[argument.dtype]
    if argument is None:
        return "constexpr"
    return "fp32" if isinstance(argument, float) else "i32"


def divisible(args: tuple[Any, ...]) -> dict[tuple[int, ...], list[list[Any]]]:
    """What a launch tells the compiler of its arguments, without which no load is wider than an element."""
    attributes = {}
    for i, argument in enumerate(args):
        if isinstance(argument, tuple | list):
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(argument))}
        elif isinstance(argument, torch.Tensor) or (
            isinstance(argument, int) and argument % 16 == 0
        ):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return attributes


def compile_for(capability: int, cases: list[str]) -> None:
    seen = set()

    def record(
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        signature = dict(zip(kernel.arg_names, map(kind, args), strict=False)) | dict.fromkeys(
            constants, "constexpr"
        )
        assert list(signature) == kernel.arg_names, f"{kernel.__name__}: {list(signature)}"
        key = kernel.__name__, num_warps, str(signature), str(constants)
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(
            fn=kernel, signature=signature, constexprs=constants, attrs=divisible(args)
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert f".target sm_{capability}" in out.asm["ptx"]
        assert out.metadata.shared <= SHARED, (
            f"{kernel.__name__}: {out.metadata.shared} bytes of shared memory"
        )
        print(kernel.__name__, num_warps, out.metadata.shared, flush=True)

    launch.launch = record
    op = kernels()
    for name in cases:
        case = CASES[name]
        for dtype, D in ((torch.bfloat16, 4096),):
            rows, weights = case.make(2, D, dtype)
            leaves = [x.to(dtype).requires_grad_() for x in rows] + [
                w.float().requires_grad_() for w in weights
            ]
            outs = case.run(op, leaves[: len(rows)], leaves[len(rows) :])
            sum(out.sum() for out in outs).backward()
    assert seen


if __name__ == "__main__":
    warnings.simplefilter("error")
    compile_for(int(sys.argv[1]), sys.argv[2:] or list(CASES))
