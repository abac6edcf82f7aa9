"""Every arm beside PreNorm: the two by turns in one process, eager and compiled, at each width."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.clock import Calls, Clock, Measured, alternate
from benchmarks.rows import Row
from benchmarks.settings import Settings

Build = Callable[
    [str, int, Settings, str], Calls
]  # given arm, width, settings, and "eager" or "compiled"


class Pair(NamedTuple):
    shape: Row  # what a row says of the arm and its sizes
    D: int
    own: Measured
    prenorm: Measured


def pairs(settings: Settings, build: Build, arms: Sequence[str], compiled: str) -> Iterator[Pair]:
    """Args: compiled: what is compiled as one, as a row names it."""
    clock = Clock(settings.on)
    for D in settings.dims:
        for arm in arms:
            for variant in [v for v in ("eager", "compiled") if v in settings.variants]:
                settings.forget()
                builds = {
                    name: functools.partial(build, name, D, settings, variant)
                    for name in ("prenorm", arm)
                }
                found = alternate(builds, clock, settings.rounds, settings.seconds)
                shape = {
                    "arm": arm, "layers": settings.layers, "D": D, "dtype": settings.dtype,
                    "variant": variant + f" {compiled}" * (variant == "compiled"),
                    "rounds": found[arm].rounds, "note": found[arm].note,
                }  # fmt: skip
                yield Pair(shape, D, found[arm], found["prenorm"])
