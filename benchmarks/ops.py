"""Each op alone: the kernel beside its reference, eager and compiled, beside peers, and against the bytes it must move.

Times are of the device: Python's launches are hidden, as a model's compiled step or CUDA graph hides them.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases import OPS, Case, kernel_ops, reference_ops
from benchmarks.clock import PASSES, Calls, Clock, NotMeasured, alternate, copy_bandwidth, passes
from benchmarks.peers import PEERS, Peer, import_peer
from benchmarks.rows import Row
from benchmarks.settings import Settings
from crosslayer.ops import dispatch

COLUMNS = (
    "op", "n", "tokens", "D", "dtype", "variant", *(
        f"{call} {what}" for call in PASSES for what in ("ms", "spread ms", "floor MB", "GB/s", "of copy")
    ), "copy GB/s", "rounds",
)  # fmt: skip


def measure(settings: Settings) -> Iterator[Row]:
    N, copied = settings.batch * settings.context, copy_bandwidth(settings.on)
    for name in settings.ops or OPS:
        op = OPS[name]
        for D in settings.dims:
            for n in settings.streams if op.counts else [1]:
                shape = {
                    "op": name,
                    "n": n if op.counts else "",
                    "tokens": N,
                    "D": D,
                    "dtype": settings.dtype,
                }
                for row in rows(name, op.case(n), N, D, copied, settings):
                    yield shape | row


def rows(
    name: str, case: Case, N: int, D: int, copied: float | None, settings: Settings
) -> Iterator[Row]:
    """Of one op on one shape: every variant's, given the bytes a second of a copy."""
    chosen: dict[str, str | Peer] = {v: v for v in OWN if v in settings.variants}
    if "peers" in settings.variants:
        chosen |= {peer.package: peer for peer in PEERS if peer.op == name}
    builds = {v: functools.partial(build, case, N, D, settings, what) for v, what in chosen.items()}
    settings.forget()
    # the references are asked for by name, and what they call inside is to be torch too
    with mock.patch.object(dispatch, "kernel_devices", ()):
        found = alternate(builds, Clock(settings.on, ahead=True), settings.rounds, settings.seconds)
    floors = floor(case, N, D, settings.type.itemsize)
    for variant, measured in found.items():
        row: Row = {
            "variant": variant, "copy GB/s": copied and copied / 1e9, "rounds": measured.rounds, "note": measured.note
        }  # fmt: skip
        for call in PASSES:
            ms, least = measured.ms(call), floors[call]
            speed = least / (1e-3 * ms) if ms and least else None
            row |= {
                f"{call} ms": ms, f"{call} spread ms": measured.spread(call), f"{call} floor MB": least and least / 1e6,
                f"{call} GB/s": speed and speed / 1e9, f"{call} of copy": speed and copied and speed / copied,
            }  # fmt: skip
        yield row


def floor(case: Case, N: int, D: int, size: int) -> dict[str, int | None]:
    """Bytes that must move, forward, and forward and backward; unknown where triton is not."""
    try:
        forward, backward = case.memory_traffic_bytes(N, D, size)
    except ModuleNotFoundError:
        return dict.fromkeys(PASSES)
    return dict(zip(PASSES, (forward, forward + backward), strict=True))


def build(case: Case, N: int, D: int, settings: Settings, variant: "str | Peer") -> Calls:
    settings.hurry()
    with torch.device(settings.on):
        rows, weights = case.make_tensors(N, D, settings.type)
    rows, weights = [x.to(settings.type) for x in rows], [w.float() for w in weights]
    if isinstance(variant, Peer):
        rows, weights = variant.change_layout(rows, weights)
        run: Callable[..., Any] = functools.partial(variant.run, import_peer(variant))
    else:
        run = functools.partial(case.run, OWN[variant](settings))

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        return run(leaves[: len(rows)], leaves[len(rows) :])

    leaves = [t.requires_grad_() for t in (*rows, *weights)]
    return passes(
        torch.compile(call, fullgraph=True, dynamic=False) if variant == "compiled" else call,
        leaves,
    )


def launched(settings: Settings) -> Any:
    if settings.on.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotMeasured("kernels run on a GPU")
    return kernel_ops()


# our own variants: by name, whose functions they are
OWN: dict[str, Callable[[Settings], Any]] = {
    "kernel": launched,
    "eager": lambda settings: reference_ops(),
    "compiled": lambda settings: reference_ops(),
}
