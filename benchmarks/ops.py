"""Each op alone: the kernel, its torch reference (eager and compiled), peers, and the bytes it must
move.

Times are of the device: launches by Python are hidden, as in a compiled step or a CUDA graph.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases import Case, each_shape, kernel_ops
from benchmarks.peers import PEERS, Peer, import_peer
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import (
    PASSES,
    Calls,
    NotMeasured,
    Timer,
    copy_bandwidth,
    forward_and_backward,
    ratio_or_none,
    time_interleaved,
)
from crosslayer import ops
from crosslayer.compilation import reset_compiler
from crosslayer.ops import dispatch


def _pass_columns(call: str) -> tuple[str, ...]:
    return (
        *(f"{call} ms", f"{call} half IQR ms"),
        *(f"{call} bound MB", f"{call} GB/s", f"{call} of copy"),
    )


COLUMNS = (
    *("op", "n", "tokens", "D", "dtype", "variant"),
    *(_pass_columns("forward") + _pass_columns("forward+backward")),
    *("copy GB/s", "copy GB/s at its size", "rounds"),
)


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    bandwidth = copy_bandwidth(settings.torch_device)
    N = settings.batch * settings.context
    for case, D, shape in each_shape(settings):
        for row in measure_op(shape["op"], case, N, D, bandwidth, settings):
            yield shape | {"tokens": N} | row


def measure_op(
    name: str, case: Case, N: int, D: int, bandwidth: float, settings: BenchmarkSettings
) -> Iterator[Row]:
    """All variants of one op on one shape.

    Args:
        name: a key of `OPS`.
        case: the op's inputs.
        N: number of tokens.
        D: width.
        bandwidth: bytes per second of a copy.
        settings: of the benchmark.
    """
    variants: dict[str, str | Peer] = {
        variant: variant
        for variant in ("kernel", "eager", "compiled")
        if variant in settings.variants
    }
    if "peers" in settings.variants:
        variants |= {peer.package: peer for peer in PEERS if peer.op == name}
    builds = {
        label: functools.partial(build_calls, case, N, D, settings, variant)
        for label, variant in variants.items()
    }
    if "compiled" in settings.variants:
        reset_compiler(graphs=8 * settings.layers)
    # Without their kernels the ops are their references. A kernel is called directly.
    timer = Timer(settings.torch_device, hide_launches=True)
    with mock.patch.object(dispatch, "kernel_devices", ()):
        timings = time_interleaved(builds, timer, settings.rounds, settings.seconds)
    bound_bytes = least_bytes(case, N, D, settings.torch_dtype.itemsize)
    copy_at_size = None
    if bound_bytes["forward"] is not None:
        copy_at_size = copy_bandwidth(settings.torch_device, bound_bytes["forward"] // 2)
    for label, timing in timings.items():
        row: Row = {
            "variant": label,
            "copy GB/s": bandwidth / 1e9,
            "copy GB/s at its size": ratio_or_none(copy_at_size, 1e9),
            "rounds": timing.rounds,
            "note": timing.note,
        }
        for call in PASSES:
            ms = timing.median_ms(call)
            bound = bound_bytes[call]
            bytes_per_ms = ratio_or_none(bound, ms)
            row[f"{call} ms"] = ms
            row[f"{call} half IQR ms"] = timing.half_iqr_ms(call)
            row[f"{call} bound MB"] = ratio_or_none(bound, 1e6)
            row[f"{call} GB/s"] = ratio_or_none(bytes_per_ms, 1e6)
            row[f"{call} of copy"] = ratio_or_none(bytes_per_ms, 1e-3 * bandwidth)
        yield row


def least_bytes(case: Case, N: int, D: int, itemsize: int) -> dict[str, int | None]:
    """Bytes an op must move in each of `PASSES`; None if they need triton, which is missing."""
    try:
        forward, backward = case.traffic(N, D, itemsize)
    except ModuleNotFoundError:
        return dict.fromkeys(PASSES)
    return {"forward": forward, "forward+backward": forward + backward}


def build_calls(
    case: Case, N: int, D: int, settings: BenchmarkSettings, variant: str | Peer
) -> Calls:
    """Args: variant: "kernel", "eager", "compiled", or a peer."""
    with torch.device(settings.torch_device):
        dtype = settings.torch_dtype
        rows, weights = case.make_tensors(N, D, dtype, held=dtype)
    weights = [w.float() for w in weights]
    run: Callable[..., Any]
    if isinstance(variant, Peer):
        rows, weights = variant.change_layout(rows, weights)
        run = functools.partial(variant.run, import_peer(variant.package, variant.module))
    elif variant == "kernel":
        if settings.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise NotMeasured("kernels run on a GPU")
        run = functools.partial(case.run, kernel_ops())
    else:
        run = functools.partial(case.run, ops)

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        return run(leaves[: len(rows)], leaves[len(rows) :])

    leaves = [x.requires_grad_() for x in (*rows, *weights)]
    if variant == "compiled":
        call = torch.compile(call, fullgraph=True, dynamic=False)
    return forward_and_backward(call, leaves)
