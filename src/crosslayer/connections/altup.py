"""AltUp: K streams of which each layer runs on one, by turns, and corrects the others from a prediction.

Paper: Alternating Updates (Baykal et al., 2023), arXiv 2301.13310, Algorithm 1.

    X = the embedding, repeated K times;  at layer l, on block j = l mod K:
    predict  X̂_i = Σ_k P_{i,k} X_k           P [K, K]
    compute  o = L(X_j), the whole layer with its residuals
    correct  X_i ← X̂_i + g_i (o − X̂_j)       g [K];   readout: the sum of the blocks, then the final norm

The embedding is repeated and the blocks summed as in the paper's Recycled-AltUp, for the host's width is D. P = I and
g = 1 at the start: the blocks are then equal copies of the plain residual, which the final norm reads up to its eps.
State: the prediction's K blocks, the stream inside the layer, and g of the pending correction. Parameters: K² + K a
layer. Traffic: (2K + 4)D a token where a layer opens, 4D inside.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection, Norm, Site, positive, weight
from ..ops import add, deposit, mixtures, repeat, wide


class Alternating(NamedTuple):
    X: Tensor  # [B T K D]: predicted blocks, or the embedding's before the first layer
    h: Tensor  # the stream inside the layer
    y: Tensor | None = None  # pending write
    g: Tensor | None = None  # what each block takes of the correction, [K]
    active: Tensor | None = None  # X̂_j, against which the layer's output is measured


class AltUp(Connection):
    weighs = ("g",)
    variants = ("altup(streams=3)",)

    def __init__(self, site: Site, dim: int, norm: Norm, streams: int = 2):
        super().__init__(site, dim, norm)
        positive(streams=streams)
        self.K, self.j = streams, site.layer % streams  # j makes K graphs of per-block compile, one a turn
        begins = site.opens and not self.last
        self.P = weight(streams, streams) if begins else None
        self.g = weight(streams) if begins else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.P is not None and self.g is not None:
            nn.init.eye_(self.P)
            nn.init.ones_(self.g)

    def begin(self, x: Tensor) -> Alternating:
        return Alternating(repeat(x, self.K), x)

    def traffic(self) -> float:
        if not self.opens:
            return super().traffic()
        read = self.K + 2 if self.site.index else 1  # the prediction, h and y
        return read + len(self.ports) + (0 if self.last else self.K + 1)

    def gather(self, state: Alternating) -> tuple[tuple[Tensor, ...], Alternating]:
        h, X = add(state.h, state.y), state.X
        if not self.opens:
            return (h,), state._replace(h=h, y=None)
        if state.g is not None and state.active is not None:
            X = deposit(X, wide(h - state.active)[..., None, :], state.g)
        if self.P is None or self.g is None:
            return (X.sum(-2),), Alternating(X, h)
        h, predicted = X[..., self.j, :], mixtures(X, self.P.mT)
        return (h,), Alternating(predicted, h, g=self.g.clone(), active=predicted[..., self.j, :])
