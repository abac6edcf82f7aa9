"""The most memory a training step's activations take, plain and recomputed in the backward pass in every way.

Measured by torch's allocator on a GPU. Elsewhere the step runs on the meta device, by the references, and what would be
held is added up: that takes no memory, so a CPU can tell of a GPU's sizes.
"""

import gc
from collections.abc import Callable, Iterator

import torch

from benchmarks.body import config
from benchmarks.clock import line
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.step import build
from crosslayer.cost.estimate import build_on_meta
from crosslayer.cost.memory import measure_peak_memory
from crosslayer.train.parallel import prepare_model
from crosslayer.train.settings import Engine

COLUMNS = ("arm", "layers", "tokens", "D", "dtype", "recompute", "MiB", "of PreNorm", "how")


def measure(settings: Settings) -> Iterator[Row]:
    for D in settings.dims:
        plain: float | None = None
        for arm in dict.fromkeys(("prenorm", *settings.arms)):
            for recompute in ("none", "reads", "streams"):
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
    """Bytes, as the GPU's allocator counts them, beside parameters, their moments and their gradients."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = build(arm, D, settings, "eager", recompute)["step"]
    step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    # parameters and AdamW's two moments are held; there are a third as many gradients
    return torch.cuda.max_memory_allocated() - held - (held - before) // 3


def tracked(arm: str, D: int, settings: Settings, recompute: str) -> int:
    """Bytes of the storages alive, beside parameters and their gradients."""
    host = build_on_meta(arm, config(D, settings), settings.context, settings.type).train()
    batch = torch.zeros(settings.batch, settings.context + 1, dtype=torch.long, device="meta")
    return measure_peak_memory(prepare_model(host, Engine(recompute=recompute)), batch).peak


HOW: dict[str, Callable[[str, int, Settings, str], int]] = {
    "cuda": allocated,
    "cpu": tracked,
    "none": tracked,
}
