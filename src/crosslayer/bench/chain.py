"""Connections alone: a row of them around sub-layers that only copy, forward and backward, beside PreNorm's.

A sub-layer is opaque to the compiler both ways, as a real one is to the connections: else it would inline all of depth.
Norms are left out, as every method has the same.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import crosslayer

from ..ops import dispatch
from .clock import Calls, Clock, alternate, passes
from .peers import DEPTHS
from .rows import Row
from .settings import Settings

COLUMNS = (
    "arm", "layers", "tokens", "D", "dtype", "variant", "forward ms", "forward spread ms", "both ms", "both spread ms",
    "PreNorms", "rounds",
)  # fmt: skip
BOTH = "forward + backward"


@torch.library.custom_op("crosslayer::sublayer", mutates_args=())
def sublayer(inputs: Sequence[Tensor]) -> Tensor:
    """The first of the inputs, copied; each has the output's gradient, copied."""
    return inputs[0].clone()


@torch.library.custom_op("crosslayer::sublayer_backward", mutates_args=())
def sublayer_backward(dy: Tensor, ports: int) -> list[Tensor]:
    return [dy.clone() for _ in range(ports)]


sublayer.register_fake(lambda inputs: torch.empty_like(inputs[0]))
sublayer_backward.register_fake(lambda dy, ports: [torch.empty_like(dy) for _ in range(ports)])
sublayer.register_autograd(
    lambda ctx, dy: sublayer_backward(dy, ctx.ports),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "ports", len(inputs[0])),
)


class Depth(nn.Module):
    """Every site of so many layers, and the sub-layers between them: [B T D] -> [B T D]."""

    def __init__(self, arm: str, dim: int, layers: int):
        super().__init__()
        make = crosslayer.make(arm)
        self.sites: Any = nn.ModuleList(make(site, dim, lambda port: nn.Identity()) for site in crosslayer.plan(layers))

    def forward(self, x: Tensor) -> Tensor:
        state = self.sites[0].init(x)
        for site in self.sites[:-1]:
            inputs, state = site(state)
            state = site.write(state, sublayer(inputs))
        return self.sites[-1].readout(state)


def measure(settings: Settings) -> Iterator[Row]:
    clock, peers = Clock(settings.on), DEPTHS if "peers" in settings.variants else ()
    for D in settings.dims:
        shape = {
            "layers": settings.layers, "tokens": f"{settings.batch} x {settings.context}", "D": D,
            "dtype": settings.dtype,
        }  # fmt: skip
        for arm in (*settings.arms, *peers):
            settings.forget()
            names = [(a, v) for v in HOW if v in settings.variants for a in dict.fromkeys(("prenorm", arm))]
            found = alternate(
                {name: functools.partial(build, *name, D, settings) for name in names}, clock, settings.rounds,
                settings.seconds,
            )  # fmt: skip
            for name, measured in found.items():
                if name[0] == arm:
                    yield {
                        "arm": arm, **shape, "variant": how(*name, settings), "rounds": measured.rounds,
                        "forward ms": measured.ms("forward"), "forward spread ms": measured.spread("forward"),
                        "both ms": measured.ms(BOTH), "both spread ms": measured.spread(BOTH),
                        "PreNorms": measured.ratio(found["prenorm", name[1]], BOTH), "note": measured.note,
                    }  # fmt: skip


def build(arm: str, variant: str, D: int, settings: Settings) -> Calls:
    settings.hurry()
    with torch.device(settings.on):
        model = DEPTHS[arm](D, 2 * settings.layers, sublayer) if arm in DEPTHS else Depth(arm, D, settings.layers)
        x = torch.randn(settings.batch, settings.context, D, dtype=settings.type, requires_grad=True)
    if arm in DEPTHS:
        model = model.to(settings.type)
    HOW[variant](model, settings)
    leaves = [x, *model.parameters()]
    return passes(lambda *_: (model(x),), leaves)


def compiled(model: nn.Module, settings: Settings) -> None:
    """Whole, or its sites one by one."""
    if settings.compile == "model":
        model.compile(fullgraph=True)
    else:
        for site in getattr(model, "sites", ()):
            site.compile(fullgraph=True)


HOW: dict[str, Callable[[nn.Module, Settings], None]] = {"eager": lambda model, settings: None, "compiled": compiled}


def how(arm: str, variant: str, settings: Settings) -> str:
    """A variant as a row names it: what was compiled, and whether kernels ran."""
    by = {"layers": "reads", "model": "row"}[settings.compile]
    own = arm not in DEPTHS and settings.device in dispatch.DEVICES
    return (f"compiled {by}" if variant == "compiled" else variant) + (", kernels" if own else "")
