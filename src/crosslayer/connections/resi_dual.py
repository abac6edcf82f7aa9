"""ResiDual: a post-norm stream that feeds the layers beside a plain sum that is read at the end.

Paper: ResiDual (Xie et al., 2023), arXiv 2304.14802, equations 3-5.

    x ← Norm(x + y),   d ← d + y        for every write y, the embedding's y_0 included
    sub-layers read x;   readout: x + Norm(d)

As in `postnorm`, the norm a pre-norm host keeps before sub-layer k is the norm after write k − 1 and the final norm the
one after the last; the norm of d is one of its own, a copy of the final norm where a host is connected.
Computes another function than PreNorm from the start.
State: two streams. Parameters: one more norm. Traffic: 5D a token and boundary.
"""

from typing import NamedTuple

from torch import Tensor

from ..connection import Connection, NormFactory, Site
from ..norms import add_write


class Dual(NamedTuple):
    x: Tensor  # post-norm stream [B T D]
    d: Tensor  # the sum of all writes [B T D]
    y: Tensor | None = None  # pending write


class ResiDual(Connection[Dual]):
    starts_as_prenorm = False
    norms_its_stream = True

    def __init__(self, site: Site, dim: int, norm: NormFactory):
        super().__init__(
            site, dim, norm, ports=("out", "dual") if site.index == site.depth else None
        )

    def initial_state(self, x: Tensor) -> Dual:
        return Dual(x, x)

    def memory_traffic(self) -> float:
        # x, d and y are read; what the layers read is x itself, and d is written too
        if not self.site.index:
            return 1 + len(self.ports)
        return 4 if self.is_readout else 4 + len(self.ports)

    def mix_inputs(self, state: Dual) -> tuple[tuple[Tensor, ...], Dual]:
        x, d = add_write(state.x, state.y), add_write(state.d, state.y)
        return (x, d) if self.is_readout else (x,), Dual(x, d)

    def read(self, state: Dual) -> tuple[tuple[Tensor, ...], Dual]:
        xs, (_, d, _) = super().read(state)
        if self.is_readout:
            return (xs[0] + xs[1],), Dual(xs[0], d)
        return xs, Dual(xs[0], d)
