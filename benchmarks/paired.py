"""Time a connection together with pre-norm: both interleaved in one process.

Where kernels are on, pre-norm is timed with and without them, and the faster one is the baseline.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import Calls, Timer, Timings, time_interleaved
from crosslayer.compilation import reset_compiler
from crosslayer.ops import dispatch

# (spec, D, settings, "eager" or "compiled") -> the calls to time
BuildCalls = Callable[[str, int, BenchmarkSettings, str], Calls]
WITHOUT_KERNELS = "prenorm without kernels"
COLUMNS = ("connection", "layers", "D", "dtype", "variant", "rounds", "note")


class PairedTimings(NamedTuple):
    """One measurement.

    Args:
        row: the `COLUMNS` of the result.
        timings: of the connection.
        prenorm: of pre-norm, in the same rounds.
        prenorm_kernels: "yes" if that pre-norm ran with kernels, else "no".
    """

    row: Row
    timings: Timings
    prenorm: Timings
    prenorm_kernels: str


def time_with_prenorm(
    settings: BenchmarkSettings, build: BuildCalls, specs: Sequence[str], compiled_part: str
) -> Iterator[PairedTimings]:
    """Time every connection at every width, eager and compiled as the settings say.

    Args:
        settings: of the benchmark.
        build: makes the calls of one connection.
        specs: the connections, or names that `build` knows.
        compiled_part: what the compiled variant compiles, for the column "variant".
    """
    timer = Timer(settings.torch_device)
    for D in settings.dims:
        for spec in specs:
            for variant in ("eager", "compiled"):
                if variant not in settings.variants:
                    continue
                if variant == "compiled":
                    # up to eight reads of a layer, in a dense method with a graph each
                    reset_compiler(graphs=8 * settings.layers)
                builds = {
                    name: functools.partial(build, name, D, settings, variant)
                    for name in ("prenorm", spec)
                }
                if settings.device in dispatch.kernel_devices:
                    builds[WITHOUT_KERNELS] = functools.partial(
                        _build_without_kernels, build, "prenorm", D, settings, variant
                    )
                timings = time_interleaved(builds, timer, settings.rounds, settings.seconds)
                row = {
                    "connection": spec,
                    "layers": settings.layers,
                    "D": D,
                    "dtype": settings.dtype,
                    "variant": variant if variant == "eager" else f"compiled {compiled_part}",
                    "rounds": timings[spec].rounds,
                    "note": timings[spec].note,
                }
                base = faster_baseline(timings)
                kernels = settings.device in dispatch.kernel_devices and base != WITHOUT_KERNELS
                yield PairedTimings(row, timings[spec], timings[base], "yes" if kernels else "no")


def faster_baseline(timings: dict[str, Timings]) -> str:
    """The name of the faster pre-norm: with kernels, or without where that was timed."""
    totals = {}
    for name in ("prenorm", WITHOUT_KERNELS):
        if name in timings and timings[name].rounds:
            totals[name] = sum(map(sum, timings[name].rounds_ms.values()))
    return min(totals, key=totals.__getitem__, default="prenorm")


def _build_without_kernels(
    build: BuildCalls, spec: str, D: int, settings: BenchmarkSettings, variant: str
) -> Calls:
    """The calls of `build`, with the torch references of all ops."""
    references = mock.patch.object(dispatch, "kernel_devices", ())
    with references:
        calls = build(spec, D, settings, variant)
    return {name: references(call) for name, call in calls.items()}
