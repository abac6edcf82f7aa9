"""A training step of a llama: forward, loss, backward, clipping and AdamW, by the `Trainer`.

The bound is the step that pre-norm's time and the connection's least memory traffic allow.
"""

from collections.abc import Callable, Iterator

import torch
from lightning.fabric import Fabric
from torch import nn

from benchmarks.model import build_connected_llama, make_llama_config
from benchmarks.paired import time_with_prenorm
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import Calls, copy_bandwidth, ratio_or_none
from crosslayer.cost import estimate_cost
from crosslayer.train.recipe import Arm
from crosslayer.train.settings import Settings
from crosslayer.train.task import Examples
from crosslayer.train.trainer import Trainer

COLUMNS = (
    *("connection", "layers", "tokens", "D", "dtype", "variant"),
    *("ms", "half IQR ms", "tokens/s", "of PreNorm", "PreNorm has kernels"),
    *("bound MB", "bound ms", "of PreNorm at bound", "copy GB/s", "rounds"),
)


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    bandwidth = copy_bandwidth(settings.torch_device)
    tokens = settings.batch * settings.context
    for pair in time_with_prenorm(settings, build_calls, settings.specs, settings.compile):
        cost = estimate_cost(
            pair.row["connection"],
            make_llama_config(pair.row["D"], settings),
            settings.batch,
            settings.context,
            settings.torch_dtype,
        )
        bound_ms = 1e3 * cost.model.bytes_moved / bandwidth
        prenorm_bound_ms = 1e3 * cost.baseline.bytes_moved / bandwidth
        ms = pair.timings.median_ms("step")
        prenorm_ms = pair.prenorm.median_ms("step")
        speed_at_bound = None
        if prenorm_ms is not None:
            speed_at_bound = prenorm_ms / (prenorm_ms + bound_ms - prenorm_bound_ms)
        yield pair.row | {
            "tokens": f"{settings.batch} x {settings.context}",
            "ms": ms,
            "half IQR ms": pair.timings.half_iqr_ms("step"),
            "tokens/s": ratio_or_none(1e3 * tokens, ms),
            "of PreNorm": ratio_or_none(1, pair.timings.paired_ratio(pair.prenorm, "step")),
            "PreNorm has kernels": pair.prenorm_kernels,
            "bound MB": cost.model.bytes_moved / 1e6,
            "bound ms": bound_ms,
            "of PreNorm at bound": speed_at_bound,
            "copy GB/s": bandwidth / 1e9,
        }


def build_calls(
    spec: str, D: int, settings: BenchmarkSettings, variant: str, recompute: str = "none"
) -> Calls:
    """A step of crosslayer's `Trainer`, on one batch."""
    train_settings = Settings.from_options(
        batch=settings.batch,
        context=settings.context,
        compile=settings.compile if variant == "compiled" else "none",
        recompute=recompute,
        lr=1e-4,
    )
    model = build_connected_llama(spec, D, settings)
    return {"step": training_step(model, train_settings, Arm.from_row(spec), settings.vocab)}


def training_step(
    model: nn.Module, settings: Settings, arm: Arm, vocab: int
) -> Callable[[], object]:
    """A step of crosslayer's `Trainer`, on one batch of random tokens."""
    sequences = torch.randint(vocab, (settings.data.batch, settings.data.context + 1))
    examples = Examples(sequences, {}, vocab, digest="", sizes={})
    device = next(model.parameters()).device.type
    return Trainer(Fabric(accelerator=device, devices=1), model, examples, settings, arm).step
