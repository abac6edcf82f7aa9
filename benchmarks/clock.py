"""Times that can be compared: variants measured in one process, by turns, round by round."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Calls = dict[str, Callable[[], Any]]  # what is timed of a variant
PASSES = ("forward", "forward+backward")  # of an op, or a row of connections
Name = TypeVar("Name", bound=Hashable)
WARM, LEAST = (
    2,
    3,
)  # calls before the first measured one, which compile and tune; rounds before time can run out

CYCLES = 2_000_000  # of a GPU in a millisecond, about


def keep_pages() -> None:
    """Let glibc keep the memory that is freed, as other allocators do: to ask for its pages anew takes a CPU long.

    Pieces of more than 32 MiB are given back all the same. Nothing happens where the C library is another one.
    """
    trim, mmap = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, which takes at most 32 MiB
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap, 1 << 25)
        mallopt(trim, (1 << 31) - 1)


class Measured(NamedTuple):
    """A variant's milliseconds, round by round, of each of its calls; or none, and why."""

    times: dict[str, list[float]]
    note: str = ""

    @property
    def rounds(self) -> int:
        return min(map(len, self.times.values()), default=0)

    def ms(self, call: str) -> float | None:
        return statistics.median(self.times[call]) if self.times.get(call) else None

    def spread(self, call: str) -> float | None:
        """Half of what the middle half of the rounds spans, in ms: how far a median of others may be off."""
        times = self.times.get(call, [])
        if len(times) < 2:
            return None
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / 2

    def ratio(self, base: "Measured", call: str) -> float | None:
        """The median of the rounds' ratios to another's: what slows the machine for a while slows both of a round."""
        pairs = zip(self.times.get(call, []), base.times.get(call, []), strict=False)
        ratios = [own / other for own, other in pairs]
        return statistics.median(ratios) if ratios else None


class Clock:
    """Milliseconds of a call: of a GPU by CUDA events with its L2 cache flushed before, of a CPU by the wall clock.

    Args:
        device: where the call computes.
        ahead: let the GPU wait while the call's kernels are launched, so that their own time counts and not Python's.
    """

    def __init__(self, device: torch.device, ahead: bool = False):
        self.device, self.ahead = device, ahead
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(4 * cache, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[], Any], launching: float = 0.0) -> float:
        """Args: launching: seconds that the call took to return, as far as known."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()
        if self.ahead:
            # private, but torch's own tests and profilers of launches rely on it
            torch.cuda._sleep(int(CYCLES * min(20, 1 + 1.5e3 * launching)))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def alternate(
    variants: Mapping[Name, Callable[[], Calls]], clock: Clock, rounds: int, seconds: float
) -> dict[Name, Measured]:
    """Time every variant once a round, all of them in every round.

    Args:
        variants: by name, what makes a variant's calls. One that fails, here or in its first calls, is left out.
        clock: of the device.
        rounds: at most so many.
        seconds: no round is begun after so many, once there have been a few.
    """
    if clock.device.type == "cuda":
        gc.collect()  # models have cycles, and what was measured before is to leave its memory
        torch.cuda.empty_cache()
    made: dict[Name, Calls] = {}
    found: dict[Name, Measured] = {}
    launching: dict[tuple[Name, str], float] = {}
    for name, build in variants.items():
        try:
            made[name] = build()
        except Exception as error:
            found[name] = Measured({}, line(error))
    for name, calls in list(made.items()):
        try:
            for key, call in calls.items():
                for _ in range(WARM):
                    begin = time.perf_counter()
                    call()
                    launching[name, key] = time.perf_counter() - begin
                    if clock.device.type == "cuda":
                        torch.cuda.synchronize()
        except Exception as error:
            found[name] = Measured({}, line(error))
            del made[name]
    times: dict[Name, dict[str, list[float]]] = {
        name: {key: [] for key in calls} for name, calls in made.items()
    }
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST and time.perf_counter() - begin > seconds:
            break
        for name, calls in made.items():
            for key, call in calls.items():
                times[name][key].append(clock(call, launching[name, key]))
    found |= {name: Measured(own) for name, own in times.items()}
    return {name: found[name] for name in variants}


def line(error: Exception) -> str:
    """An error as a row of a table can hold it."""
    words = " ".join(str(error).split()) or "no message"
    words = words if isinstance(error, NotMeasured) else f"{type(error).__name__}: {words}"
    return words if len(words) <= 160 else words[:157] + "..."


class NotMeasured(Exception):
    """A variant cannot be here: its package is not installed, its kernels run nowhere, time is up."""


def copy_bandwidth(device: torch.device, rounds: int = 9) -> float | None:
    """Bytes a second of a large copy, read and written: what memory gives, and a floor of bytes can be held to."""
    if device.type == "meta":
        return None
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    found = alternate(
        {"copy": lambda: {"copy": lambda: target.copy_(source)}},
        Clock(device, ahead=True),
        rounds,
        5,
    )
    ms = found["copy"].ms("copy")
    return ms and 2 * source.numel() / (1e-3 * ms)


def passes(run: Callable[..., Any], leaves: list[Tensor]) -> Calls:
    """A function's forward pass with all it keeps for the backward, and both, by the leaves it is given."""
    outs = run(*leaves)
    douts = [torch.randn_like(out) for out in outs]

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, douts, allow_unused=True)

    return dict(zip(PASSES, (lambda: run(*leaves), both), strict=True))
