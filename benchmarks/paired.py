"""Time a connection together with pre-norm: both interleaved in one process."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.results import Row
from benchmarks.settings import Settings
from benchmarks.timing import Calls, Timer, Timings, reset_compiler, time_interleaved

# (spec, D, settings, "eager" or "compiled") -> the calls to time
BuildCalls = Callable[[str, int, Settings, str], Calls]
COLUMNS = ("connection", "layers", "D", "dtype", "variant", "rounds", "note")


class PairedTimings(NamedTuple):
    """One measurement.

    Args:
        row: the `COLUMNS` of the result.
        timings: of the connection.
        prenorm: of pre-norm, in the same rounds.
    """

    row: Row
    timings: Timings
    prenorm: Timings


def time_with_prenorm(
    settings: Settings, build: BuildCalls, specs: Sequence[str], compiled_part: str
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
                    reset_compiler(settings.layers)
                builds = {
                    name: functools.partial(build, name, D, settings, variant)
                    for name in ("prenorm", spec)
                }
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
                yield PairedTimings(row, timings[spec], timings["prenorm"])
