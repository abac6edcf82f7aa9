"""A whole training step: forward, loss, backward and AdamW, beside PreNorm's, and the best its traffic allows."""

import functools
from collections.abc import Iterator

from ..costs import estimates, loss_of
from ..ops import dispatch
from .body import config, model, tokens
from .clock import Calls, Clock, alternate, copy_bandwidth
from .rows import Row
from .settings import Settings

COLUMNS = (
    "arm", "layers", "tokens", "D", "dtype", "variant", "ms", "spread ms", "tokens/s", "of PreNorm", "floor MB",
    "floor ms", "of PreNorm at the floor", "copy GB/s", "rounds",
)  # fmt: skip


def measure(settings: Settings) -> Iterator[Row]:
    clock, copied = Clock(settings.on), copy_bandwidth(settings.on)
    for D in settings.dims:
        costs = estimates(settings.arms, config(D, settings), settings.batch, settings.context, settings.type)
        for arm, cost in zip(settings.arms, costs, strict=True):
            for variant in [v for v in ENGINES if v in settings.variants]:
                names = dict.fromkeys(("prenorm", arm))
                found = alternate(
                    {name: functools.partial(build, name, D, settings, variant) for name in names}, clock,
                    settings.rounds, settings.seconds,
                )  # fmt: skip
                own, base = found[arm], found["prenorm"]
                ms, slower, plain = own.ms("step"), own.ratio(base, "step"), base.ms("step")
                floor, least = cost.model.moved, cost.body.moved
                extra = 1e3 * (floor - least) / copied
                yield {
                    "arm": arm, "layers": settings.layers, "tokens": f"{settings.batch} x {settings.context}", "D": D,
                    "dtype": settings.dtype, "variant": named(variant, settings), "ms": ms,
                    "spread ms": own.spread("step"),
                    "tokens/s": ms and settings.batch * settings.context / (1e-3 * ms),
                    "of PreNorm": slower and 1 / slower, "floor MB": floor / 1e6, "floor ms": 1e3 * floor / copied,
                    "of PreNorm at the floor": plain and plain / (plain + extra), "copy GB/s": copied / 1e9,
                    "rounds": own.rounds, "note": own.note,
                }  # fmt: skip


ENGINES = {"eager": "none", "compiled": None}  # what is compiled; None is what the settings say


def named(variant: str, settings: Settings) -> str:
    """A variant as a row names it: what was compiled, and whether kernels ran."""
    shown = f"compiled {settings.compile}" if variant == "compiled" else variant
    return shown + (", kernels" if settings.device in dispatch.DEVICES else "")


def build(arm: str, D: int, settings: Settings, variant: str, recompute: str = "none") -> Calls:
    """A step of `crosslayer train`, on one batch over and over."""
    settings.hurry()
    from ..train.optimizers import optimizers
    from ..train.parallel import prepare
    from ..train.settings import Engine, Optimization

    host = model(arm, D, settings).train()
    engine = Engine(compile=ENGINES[variant] or settings.compile, recompute=recompute)
    called, batch = prepare(host, engine), tokens(settings, settings.batch, settings.context + 1)
    (optimizer,) = optimizers(host, Optimization(lr=1e-4))

    def step() -> None:
        loss_of(called, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"step": step}
