"""A row of connections outside any model: width `D`, `LAYERS` layers, asymmetric sub-layers."""

import torch
from torch import nn

import crosslayer
from crosslayer.sites import plan_layers

D, LAYERS = 12, 3


def row(spec: str, parallel: bool = False, layers: int = LAYERS) -> list[crosslayer.Connection]:
    make = crosslayer.make(spec)
    return [make(site, D, lambda port: nn.Identity()) for site in crosslayer.plan(layers, parallel)]


def flat(sites: int) -> list[crosslayer.Site]:
    """Sub-layers that are each a layer of its own."""
    return plan_layers([[("mlp",)]] * sites)


def sublayer(k: int, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh((k + 1) * x.roll(1, -1)) - 0.3 * x


def run(sites: list[crosslayer.Connection], x: torch.Tensor) -> torch.Tensor:
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        (h, *_), state = site.read(state)
        state = site.write(state, sublayer(k, h))
    return sites[-1].readout(state)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.3
