"""ResiDual: a post-norm stream that feeds the layers, and a plain sum that the readout adds.

Paper: ResiDual (Xie et al., 2023), arXiv 2304.14802, equations 3-5.

    x ← Norm(x + y),   d ← d + y        for every output y of a sub-layer, and the embedding y_0
    sub-layers read x;   readout: x + Norm(d)

As in `postnorm`, `connect` moves the norm before sub-layer k behind the addition of y_{k−1}, and
the final norm behind the last addition. The norm of d is the method's own; `connect` starts it as a
copy of the final norm. Not equivalent to pre-norm at initialisation.
State: two streams.
Learned parameters: one more norm.
Traffic: 5D elements per token and site.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..connection import Connection, NormFactory
from ..fused_norms import stream_norm_spec
from ..mixing import MixingWeights, identity_weights, join_columns, join_rows
from ..norms import add_write
from ..sites import Site
from .postnorm import norm_stream


class Dual(NamedTuple):
    """A post-norm stream and a sum of all writes."""

    x: Tensor  # post-norm stream [B T D]
    d: Tensor  # the sum of all writes [B T D]
    y: Tensor | None = None  # [B T D]: pending write


class ResiDual(Connection[Dual]):
    """ResiDual: a post-norm stream that feeds the layers, and a plain sum that the readout adds.

    Paper: ResiDual (Xie et al., 2023), arXiv 2304.14802, equations 3-5.
    """

    initial_function = "other"
    norms_its_stream = True

    def __init__(self, site: Site, dim: int, norm: NormFactory):
        super().__init__(site, dim, norm, ports=("out", "dual") if site.is_readout else None)

    def initial_state(self, x: Tensor) -> Dual:
        return Dual(x, x)

    def mix_inputs(self, state: Dual) -> tuple[tuple[Tensor, ...], Dual]:
        x = add_write(state.x, state.y)
        d = add_write(state.d, state.y)
        inputs = (x, d) if self.is_readout else (x,)
        return inputs, Dual(x, d)

    def norm_mixed(
        self, inputs: tuple[Tensor, ...], state: Dual
    ) -> tuple[tuple[Tensor, ...], Dual]:
        normed, x = norm_stream(self, inputs)
        if self.is_readout:
            normed = (x + normed[1],)
        return normed, Dual(x, state.d)

    def state_parts(self, state: Dual) -> tuple[Tensor, ...]:
        return state.x, state.d

    def mixing_weights(self, state: Dual) -> MixingWeights:
        both = identity_weights(2, state.x)
        write = both if state.y is None else join_columns(both, torch.ones_like(both[:, :1]))
        norms = tuple(stream_norm_spec(norm) for norm in self.norms)
        if self.is_readout:
            return MixingWeights(write, torch.ones_like(both[:1]), both, norms)
        # One normed x a port, because a parallel block applies two norms to the same sum.
        ports = len(self.ports)
        write = join_rows(*[write[:1]] * ports, write[1:])
        parts = identity_weights(ports + 1, write)
        return MixingWeights(write, parts[:ports], parts[[0, ports]], (*norms, None))

    def memory_traffic(self) -> float:
        # x, d and y are read and d is written. The input of the layers is x itself, written once.
        if self.site.index == 0:
            return 1 + len(self.ports)
        return 4 if self.is_readout else 4 + len(self.ports)
