"""What a call of each op takes in Python: microseconds on one token, the least of all rounds.

The first rows are the scale: an addition, and ops that do nothing. Without a GPU a stub takes the
place of triton's driver. Kernels are then compiled for a Hopper GPU and not run, and what the
driver takes for a launch is not in the times.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases import Case, each_shape, kernel_ops
from benchmarks.compilation import HOPPER
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import Calls, describe_error, forward_and_backward

COLUMNS = ("op", "n", "D", "dtype", "no gradient us", "forward us", "forward+backward us", "driver")


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    on_gpu = settings.device == "cuda"
    conditions = {"dtype": settings.dtype, "driver": "CUDA" if on_gpu else "stub"}
    leaves = [torch.randn(64, device=settings.device, requires_grad=True) for _ in range(12)]
    with nullcontext() if on_gpu else stub_driver():
        for name, run in scale_ops().items():
            yield conditions | {"op": name, "n": 12, "D": 64} | _row(run, leaves, settings.rounds)
        for case, D, shape in each_shape(settings):
            run, leaves = kernel_call(case, D, settings)
            try:
                times = _row(run, leaves, settings.rounds)
            except ValueError as error:  # there is no kernel for these sizes
                times = {"note": describe_error(error)}
            yield conditions | shape | times


def scale_ops() -> dict[str, Callable[..., Tensor]]:
    """An addition, and two ops on a list that only allocate: ours, and that of torch.library."""
    from crosslayer.kernels.library_op import LibraryOp

    @torch.library.custom_op("crosslayer_benchmark::nothing", mutates_args=())
    def nothing(X: Sequence[Tensor]) -> Tensor:
        return torch.empty_like(X[0])

    def _benchmark_nothing(X: Sequence[Tensor]) -> Tensor:
        return torch.empty_like(X[0])

    def count_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = len(inputs[0])

    ours = LibraryOp(_benchmark_nothing)
    for op in (nothing, ours):
        op.register_autograd(lambda ctx, d: ([d] * ctx.count,), setup_context=count_inputs)
    return {
        "addition": lambda *X: X[0] + X[1],
        "nothing": lambda *X: ours(X),
        "nothing, by custom_op": lambda *X: torch.ops.crosslayer_benchmark.nothing(X),
    }


def kernel_call(
    case: Case, D: int, settings: BenchmarkSettings
) -> tuple[Callable[..., Any], list[Tensor]]:
    """An op's kernel as a function of leaves, and the leaves."""
    op = kernel_ops()
    rows, weights = case.make_tensors(1, D, settings.torch_dtype)
    rows = [x.to(settings.device, settings.torch_dtype) for x in rows]
    leaves = [*rows, *(w.to(settings.device, torch.float32) for w in weights)]
    leaves = [x.requires_grad_() for x in leaves]
    return lambda *leaves: case.run(op, leaves[: len(rows)], leaves[len(rows) :]), leaves


def _row(run: Callable[..., Any], leaves: list[Tensor], rounds: int) -> Row:
    def as_tuple(*leaves: Tensor) -> tuple[Tensor, ...]:
        outs = run(*leaves)
        return (outs,) if isinstance(outs, Tensor) else tuple(outs)

    calls: Calls = forward_and_backward(as_tuple, leaves)
    with torch.no_grad():
        without = least_microseconds(lambda: run(*leaves), rounds)
    return {
        "no gradient us": without,
        "forward us": least_microseconds(calls["forward"], rounds),
        "forward+backward us": least_microseconds(calls["forward+backward"], rounds),
    }


def least_microseconds(call: Callable[[], Any], rounds: int) -> float:
    """The least time of a call: whatever else the machine does only adds to it."""
    for _ in range(10):
        call()
    least = float("inf")
    gc.disable()
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        call()
        least = min(least, time.perf_counter_ns() - begin)
    gc.enable()
    return least / 1e3


@contextmanager
def stub_driver() -> Iterator[None]:
    """A driver for triton that compiles for a GPU and launches nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", HOPPER, 32)
    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    driver = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: lambda *args: None,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    # Without a GPU triton has no driver, which `reset_active` would look for.
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        yield
