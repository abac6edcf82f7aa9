"""The most memory a training step holds, plain and with what connections read recomputed in the backward pass.

Measured by torch's allocator on a GPU. Elsewhere the step runs on the meta device, by the references, and torch's own
tracker adds up what would be held: that takes no memory, so a CPU can tell of a GPU's sizes.
"""

import gc
from collections.abc import Callable, Iterator

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from ..costs import loss_of, on_meta
from ..train.parallel import prepare
from ..train.settings import Engine
from .body import config
from .clock import line
from .rows import Row
from .settings import Settings
from .step import build

COLUMNS = ("arm", "layers", "tokens", "D", "dtype", "recompute", "MiB", "of PreNorm", "how")


def measure(settings: Settings) -> Iterator[Row]:
    for D in settings.dims:
        plain: float | None = None
        for arm in dict.fromkeys(("prenorm", *settings.arms)):
            for recompute in ("none", "reads"):
                peak, note = None, ""
                try:
                    peak = HOW[settings.device](arm, D, settings, recompute) / 2**20
                except Exception as error:
                    note = line(error)
                plain = peak if (arm, recompute) == ("prenorm", "none") else plain
                yield {
                    "arm": arm, "layers": settings.layers, "tokens": f"{settings.batch} x {settings.context}", "D": D,
                    "dtype": settings.dtype, "recompute": recompute, "MiB": peak,
                    "of PreNorm": peak and plain and peak / plain, "how": HOW[settings.device].__name__, "note": note,
                }  # fmt: skip


def allocated(arm: str, D: int, settings: Settings, recompute: str) -> int:
    """Bytes, as the GPU's allocator counts them, once the optimizer has its moments."""
    gc.collect()
    torch.cuda.empty_cache()
    step = build(arm, D, settings, "eager", recompute)["step"]
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def tracked(arm: str, D: int, settings: Settings, recompute: str) -> int:
    """Bytes, with AdamW's moments, two numbers a parameter in its dtype."""
    host = on_meta(arm, config(D, settings), settings.context, settings.type).train()
    called = prepare(host, Engine(recompute=recompute))
    tracker = MemTracker()
    tracker.track_external(host)
    with tracker:
        loss_of(called, torch.zeros(settings.batch, settings.context + 1, dtype=torch.long, device="meta")).backward()
    (device,) = tracker.get_tracker_snapshot("peak").values()
    return device["Total"] + 2 * sum(p.nbytes for p in host.parameters())


HOW: dict[str, Callable[[str, int, Settings, str], int]] = {"cuda": allocated, "cpu": tracked, "none": tracked}
