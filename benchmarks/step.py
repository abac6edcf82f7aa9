"""A whole training step: forward, loss, backward and AdamW, beside PreNorm's, and the best its traffic allows."""

from collections.abc import Iterator

from benchmarks.beside import pairs
from benchmarks.body import config, model, tokens
from benchmarks.clock import Calls, copy_bandwidth
from benchmarks.rows import Row
from benchmarks.settings import Settings
from crosslayer.cost.estimate import estimate_cost, language_model_loss
from crosslayer.train.optimizers import build_optimizers
from crosslayer.train.parallel import prepare_model
from crosslayer.train.settings import Engine, Optimization

COLUMNS = (
    "arm", "layers", "tokens", "D", "dtype", "variant", "ms", "spread ms", "tokens/s", "of PreNorm", "floor MB",
    "floor ms", "of PreNorm at the floor", "copy GB/s", "rounds",
)  # fmt: skip


def measure(settings: Settings) -> Iterator[Row]:
    copied, count = copy_bandwidth(settings.on), settings.batch * settings.context
    for shape, D, own, prenorm in pairs(settings, build, settings.arms, settings.compile):
        cost = estimate_cost(
            shape["arm"], config(D, settings), settings.batch, settings.context, settings.type
        )
        ms, slower, plain = own.ms("step"), own.ratio(prenorm, "step"), prenorm.ms("step")
        floor, least = (
            1e3 * part.moved / copied if copied else None for part in (cost.model, cost.body)
        )
        yield shape | {
            "tokens": f"{settings.batch} x {settings.context}", "ms": ms, "spread ms": own.spread("step"),
            "tokens/s": ms and count / (1e-3 * ms), "of PreNorm": slower and 1 / slower,
            "floor MB": cost.model.moved / 1e6, "floor ms": floor,
            "of PreNorm at the floor": plain and floor and least and plain / (plain + floor - least),
            "copy GB/s": copied and copied / 1e9,
        }  # fmt: skip


def build(arm: str, D: int, settings: Settings, variant: str, recompute: str = "none") -> Calls:
    """A step of `crosslayer train`, on one batch over and over."""
    settings.hurry()
    host = model(arm, D, settings).train()
    engine = Engine(
        compile=settings.compile if variant == "compiled" else "none", recompute=recompute
    )
    called, batch = (
        prepare_model(host, engine),
        tokens(settings, settings.batch, settings.context + 1),
    )
    (optimizer,) = build_optimizers(host, Optimization(lr=1e-4))

    def step() -> None:
        language_model_loss(called, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}
