"""Connections alone: a row of them around sub-layers that only copy, forward and backward, beside PreNorm's.

A sub-layer is opaque to the compiler both ways, as a real one is to the connections: else it would inline all of depth.
Norms are left out, as every method has the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import crosslayer
from benchmarks.beside import pairs
from benchmarks.clock import PASSES, Calls, passes
from benchmarks.peers import DEPTHS
from benchmarks.rows import Row
from benchmarks.settings import Settings

COLUMNS = (
    "arm", "layers", "tokens", "D", "dtype", "variant", *(f"{call} {what}" for call in PASSES for what in (
        "ms", "spread ms", "PreNorms"
    )), "rounds",
)  # fmt: skip


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
        self.sites: Any = nn.ModuleList(
            make(site, dim, lambda port: nn.Identity()) for site in crosslayer.plan(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.sites[0].init(x)
        for site in self.sites[:-1]:
            inputs, state = site(state)
            state = site.write(state, sublayer(inputs))
        return self.sites[-1].readout(state)


def measure(settings: Settings) -> Iterator[Row]:
    arms = [*settings.arms, *(DEPTHS if "peers" in settings.variants else ())]
    for shape, _, own, prenorm in pairs(
        settings, build, arms, {"layers": "reads", "model": "row"}[settings.compile]
    ):
        row: Row = shape | {"tokens": f"{settings.batch} x {settings.context}"}
        for call in PASSES:
            row |= {f"{call} ms": own.ms(call), f"{call} spread ms": own.spread(call)}
            row |= {f"{call} PreNorms": own.ratio(prenorm, call)}
        yield row


def build(arm: str, D: int, settings: Settings, variant: str) -> Calls:
    settings.hurry()
    with torch.device(settings.on):
        model = (
            DEPTHS[arm](D, 2 * settings.layers, sublayer)
            if arm in DEPTHS
            else Depth(arm, D, settings.layers)
        )
        x = torch.randn(
            settings.batch, settings.context, D, dtype=settings.type, requires_grad=True
        )
    if arm in DEPTHS:  # what is a connection's stays float32
        model = model.to(settings.type)
    if variant == "compiled" and settings.compile == "model":
        model.compile(fullgraph=True)
    elif variant == "compiled":
        for site in getattr(model, "sites", ()):
            site.compile(fullgraph=True)
    return passes(lambda *_: (model(x),), [x, *model.parameters()])
