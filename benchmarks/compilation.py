"""Compile the kernels that an op launches for a GPU, on a machine without one.

for kernel in compile_launches(width_connection_case(n=4), N=16, D=2048, dtype=torch.bfloat16):
    print(kernel.name, kernel.launch.num_warps, kernel.binary.metadata.shared)
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.cases import Case, kernel_ops

TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}
HOPPER = 90


class Launch(NamedTuple):
    """The arguments of `launch.launch_kernel`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None


class CompiledKernel(NamedTuple):
    """A kernel as it was launched.

    Args:
        launch: the first one of this binary.
        launches: their number.
        binary: what `triton.compile` returned.
        seconds: of a processor that triton took; hardly any where its cache has the kernel.
    """

    launch: Launch
    launches: int
    binary: Any
    seconds: float

    @property
    def name(self) -> str:
        """That of the triton function."""
        return self.launch.kernel.__name__


def compile_launches(
    case: Case, N: int, D: int, dtype: torch.dtype, capability: int = HOPPER
) -> list[CompiledKernel]:
    """The kernels of an op's forward and backward, in the order of their first launches.

    Args:
        case: the op's inputs.
        N: number of tokens.
        D: width.
        dtype: of the rows.
        capability: of the GPU, 90 for Hopper.
    """
    with recorded_launches() as launches:
        run_forward_and_backward(case, N, D, dtype)
    return [compile_binary(same, capability) for same in launches.values()]


@contextmanager
def recorded_launches() -> Iterator[dict[str, list[Launch]]]:
    """Launches run nothing within. The dict gets those of each binary that they need."""
    from crosslayer.kernels import launch

    launches: dict[str, list[Launch]] = {}
    signature = inspect.signature(launch.launch_kernel)

    def record_launch(*args: Any, **options: Any) -> None:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        recorded = Launch(**bound.arguments)
        types = launch_signature(recorded.kernel, recorded.args, recorded.constants)
        compiled_with = (recorded.num_warps, recorded.num_stages, recorded.max_registers)
        key = f"{recorded.kernel.__name__} {types} {compiled_with}"
        launches.setdefault(key, []).append(recorded)

    with mock.patch.object(launch, "launch_kernel", record_launch):
        yield launches


@contextmanager
def without_cache() -> Iterator[None]:
    """triton compiles every kernel within, whatever it has compiled before."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        yield


def run_forward_and_backward(case: Case, N: int, D: int, dtype: torch.dtype) -> None:
    """Run an op's kernels on random numbers."""
    rows, weights = case.make_tensors(N, D, torch.float32)
    leaves = [x.to(dtype).requires_grad_() for x in rows]
    leaves += [w.float().requires_grad_() for w in weights]
    outs = case.run(kernel_ops(), leaves[: len(rows)], leaves[len(rows) :])
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])


class LaunchSignature(NamedTuple):
    """What triton compiles a kernel for. Launches with equal signatures run one binary.

    Args:
        types: of the arguments, by name.
        constants: the constexpr arguments, and integers that are 1.
        divisible: which arguments are multiples of 16, by position.
    """

    types: dict[str, Any]
    constants: dict[str, Any]
    divisible: dict[tuple[int, ...], list[list[Any]]]


def launch_signature(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> LaunchSignature:
    """The signature of a launch."""
    specialised = {p.name: a for a, p in zip(args, kernel.params, strict=False) if _is_one(a, p)}
    constants = specialised | constants
    signature = dict(zip(kernel.arg_names, map(_triton_type, args), strict=False))
    signature |= dict.fromkeys(constants, "constexpr")
    if list(signature) != kernel.arg_names:
        raise TypeError(f"{kernel.__name__}: launched with {list(signature)}")
    # Without this attribute no load is wider than an element.
    divisible = [["tt.divisibility", 16]]
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (argument, parameter) in enumerate(zip(args, kernel.params, strict=False)):
        if isinstance(argument, tuple | list):
            for j, element in enumerate(argument):
                if element is not None:
                    attributes[(i, j)] = divisible
        elif isinstance(argument, torch.Tensor) or (
            isinstance(argument, int) and argument % 16 == 0 and not parameter.do_not_specialize
        ):
            attributes[(i,)] = divisible
    return LaunchSignature(signature, constants, attributes)


def _is_one(argument: Any, parameter: Any) -> bool:
    """Whether triton compiles this argument as the constant 1."""
    return type(argument) is int and argument == 1 and not parameter.do_not_specialize


def compile_binary(launches: Sequence[Launch], capability: int = HOPPER) -> CompiledKernel:
    """The kernel of launches that need one binary, as triton compiles it for a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from crosslayer.kernels.launch import compiler_options

    launch = launches[0]
    types, constants, divisible = launch_signature(launch.kernel, launch.args, launch.constants)
    source = ASTSource(launch.kernel, types, constants, divisible)
    options = compiler_options(launch.num_warps, launch.num_stages, launch.max_registers)
    target = GPUTarget("cuda", capability, 32)
    begin = _processor_seconds()
    binary = triton.compile(source, target=target, options=options)
    seconds = _processor_seconds() - begin
    return CompiledKernel(launch, len(launches), binary, seconds)


def _processor_seconds() -> float:
    """What this process has used, and the assemblers that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _triton_type(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return tuple(_triton_type(a) for a in argument)
    if isinstance(argument, torch.Tensor):
        return TRITON_TYPES[argument.dtype]
    if argument is None:
        return "constexpr"
    return "fp32" if isinstance(argument, float) else "i32"
