"""A training step of a llama: forward, loss, backward and AdamW.

The bound is the step that pre-norm's time and the connection's least memory traffic allow.
"""

from collections.abc import Iterator

from benchmarks.model import build_connected_llama, make_llama_config, random_tokens
from benchmarks.paired import time_with_prenorm
from benchmarks.results import Row
from benchmarks.settings import Settings
from benchmarks.timing import Calls, copy_bandwidth, ratio_or_none
from crosslayer.cost import estimate_cost, language_model_loss
from crosslayer.train.optimizers import build_optimizers
from crosslayer.train.parallel import prepare_model
from crosslayer.train.settings import Engine, Optimization

COLUMNS = (
    *("connection", "layers", "tokens", "D", "dtype", "variant"),
    *("ms", "half IQR ms", "tokens/s", "of PreNorm"),
    *("bound MB", "bound ms", "of PreNorm at bound", "copy GB/s", "rounds"),
)


def measure(settings: Settings) -> Iterator[Row]:
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
            "bound MB": cost.model.bytes_moved / 1e6,
            "bound ms": bound_ms,
            "of PreNorm at bound": speed_at_bound,
            "copy GB/s": bandwidth / 1e9,
        }


def build_calls(
    spec: str, D: int, settings: Settings, variant: str, recompute: str = "none"
) -> Calls:
    """A training step on one batch, repeated."""
    model = build_connected_llama(spec, D, settings).train()
    compiled_part = settings.compile if variant == "compiled" else "none"
    engine = Engine(compile=compiled_part, recompute=recompute)  # type: ignore[arg-type]
    called = prepare_model(model, engine)
    (optimizer,) = build_optimizers(model, Optimization(lr=1e-4))
    tokens = random_tokens(settings, settings.batch, settings.context + 1)

    def step() -> None:
        language_model_loss(called, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}
