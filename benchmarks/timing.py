"""Comparable times: all variants in one process, interleaved round by round."""

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from crosslayer.errors import error_in_one_line, error_with_class

Calls = dict[str, Callable[[], Any]]  # the calls of a variant that are timed, by name
PASSES = ("forward", "forward+backward")
Name = TypeVar("Name", bound=Hashable)
WARMUP_CALLS = 2  # they compile and tune
MIN_ROUNDS = 3  # before the time limit ends a measurement
GPU_CYCLES_PER_MS = 2_000_000  # roughly


class NotMeasured(Exception):
    """A variant cannot run here: its package is missing, or its kernels need a GPU."""


class Timings(NamedTuple):
    """A variant's milliseconds, by call and round; empty if it failed.

    Args:
        rounds_ms: milliseconds of each round, by name of the call.
        note: why there are none.
    """

    rounds_ms: dict[str, list[float]]
    note: str = ""

    @property
    def rounds(self) -> int:
        return min(map(len, self.rounds_ms.values()), default=0)

    def median_ms(self, call: str) -> float | None:
        times = self.rounds_ms.get(call)
        return statistics.median(times) if times else None

    def least_ms(self, call: str) -> float | None:
        """The least of the rounds: whatever else the machine does only adds to it."""
        return min(self.rounds_ms.get(call, []), default=None)

    def half_iqr_ms(self, call: str) -> float | None:
        """Half the interquartile range of the rounds, in ms."""
        times = self.rounds_ms.get(call, [])
        if len(times) < 2:
            return None
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / 2

    def paired_ratio(self, baseline: "Timings", call: str) -> float | None:
        """The median of the rounds' ratios to the baseline: what slows the machine slows both."""
        pairs = zip(self.rounds_ms.get(call, []), baseline.rounds_ms.get(call, []), strict=False)
        ratios = [ms / baseline_ms for ms, baseline_ms in pairs]
        return statistics.median(ratios) if ratios else None


def ratio_or_none(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator; None if one of them was not measured."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


class Timer:
    """Milliseconds of one call.

    On a GPU by CUDA events, after the L2 cache was flushed; on a CPU by the wall clock.

    Args:
        device: the device that computes.
        hide_launches: let the GPU wait until the kernels are launched, so that Python's time does
            not count.
    """

    def __init__(self, device: torch.device, hide_launches: bool = False):
        self.device = device
        self.hide_launches = hide_launches
        if device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            # Read, not written: written lines would be moved to memory within the timed call.
            self._flush = torch.zeros(cache_bytes, dtype=torch.float32, device=device)

    def __call__(self, call: Callable[[], Any], launch_seconds: float = 0.0) -> float:
        """Time a call. `launch_seconds`: how long it took to return before."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._flush.sum()
        if self.hide_launches:
            # private, but torch's own tests rely on it
            wait_ms = min(20, 1 + 1.5e3 * launch_seconds)
            torch.cuda._sleep(int(GPU_CYCLES_PER_MS * wait_ms))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def time_interleaved(
    variants: Mapping[Name, Callable[[], Calls]], timer: Timer, rounds: int, seconds: float
) -> dict[Name, Timings]:
    """Time every variant once per round.

    Args:
        variants: by name, a function that builds the variant's calls. One that fails gets a note.
        timer: of the device.
        rounds: largest number of rounds.
        seconds: no round begins later than this, after `MIN_ROUNDS`.
    """
    gc.collect()  # models have reference cycles: free those measured before
    torch.cuda.empty_cache()  # does nothing without a GPU
    timings: dict[Name, Timings] = {}
    calls: dict[Name, Calls] = {}
    launch_seconds: dict[Name, dict[str, float]] = {}

    # Build all variants before the first one runs.
    for name, build in variants.items():
        try:
            calls[name] = build()
        except Exception as error:
            timings[name] = Timings({}, describe_error(error))
    for name in list(calls):
        try:
            launch_seconds[name] = _warm_up(calls[name], timer.device)
        except Exception as error:
            timings[name] = Timings({}, describe_error(error))
            del calls[name]
        else:
            timings[name] = Timings({key: [] for key in calls[name]})

    begin = time.perf_counter()
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for name in list(calls):
            try:
                _time_calls(calls[name], launch_seconds[name], timer, timings[name])
            except Exception as error:
                timings[name] = Timings({}, describe_error(error))
                del calls[name]
    return {name: timings[name] for name in variants}


def _time_calls(
    calls: Calls, launch_seconds: dict[str, float], timer: Timer, timings: Timings
) -> None:
    for key, call in calls.items():
        timings.rounds_ms[key].append(timer(call, launch_seconds[key]))


def _warm_up(calls: Calls, device: torch.device) -> dict[str, float]:
    """Run each call `WARMUP_CALLS` times; the seconds that it took to return the last time."""
    seconds = {}
    for key, call in calls.items():
        for _ in range(WARMUP_CALLS):
            begin = time.perf_counter()
            call()
            seconds[key] = time.perf_counter() - begin
            if device.type == "cuda":
                torch.cuda.synchronize()
    return seconds


def describe_error(error: Exception) -> str:
    """An error as one line of at most 160 characters."""
    is_expected = isinstance(error, NotMeasured)
    words = error_in_one_line(error) if is_expected else error_with_class(error)
    return words if len(words) <= 160 else words[:157] + "..."


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes, by default a large one."""
    if size is None:
        size = 2**30 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def build() -> Calls:
        return {"copy": lambda: target.copy_(source)}

    timer = Timer(device, hide_launches=True)
    ms = time_interleaved({"copy": build}, timer, rounds=9, seconds=5)["copy"].median_ms("copy")
    if ms is None:
        raise RuntimeError("a copy could not be measured")
    return 2 * size / (1e-3 * ms)


def forward_and_backward(run: Callable[..., Any], leaves: list[Tensor]) -> Calls:
    """The calls `PASSES` of a function of leaves: its forward pass under autograd, or both."""
    output_gradients = [torch.randn_like(out) for out in run(*leaves)]

    def forward() -> None:
        run(*leaves)

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, output_gradients, allow_unused=True)

    return {"forward": forward, "forward+backward": both}
