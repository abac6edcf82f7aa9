"""Highway: a learned gate between carrying the stream and taking the output.

Paper: Highway Networks (Srivastava et al., 2015), arXiv 1505.00387, equation 3 (carry gate 1 − T).

    x ← (1 − g) ⊙ x + g ⊙ F(Norm(x)),   g = σ(x W + b)      W [D, D], b [D]

W = 0 and b is negative at initialisation, so that g = σ(b) everywhere and most of the stream is
carried. Every write carries less than the whole stream, so the method neither starts as pre-norm
nor can represent it. The gate depends on the stream alone. So the read computes the gate, and the
state holds it until the write is applied.
State: one stream, and the gate of the pending write.
Learned parameters: D² + D per sub-layer.
Traffic: 6D elements per token and site.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection, NormFactory
from ..float32_parameters import float32_parameter
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import upcast_to_float32
from ..sites import Site


class Carried(NamedTuple):
    """One stream, and the gate of the pending write."""

    h: Tensor  # [B T D]
    y: Tensor | None = None  # [B T D]: pending write ...
    g: Tensor | None = None  # ... and how far the stream moves to it, [B T D]


class Highway(Connection[Carried]):
    """Highway: a learned gate between carrying the stream and taking the output.

    Paper: Highway Networks (Srivastava et al., 2015), arXiv 1505.00387, equation 3.

    Args:
        bias: initial value of b. If it is negative, most of the stream is carried at the start.
    """

    initial_function = "other"
    gate_field = "g"
    gate_limits = (0.0, 1.0)
    weight_decay_params = frozenset({"W"})

    def __init__(self, site: Site, dim: int, norm: NormFactory, bias: float = -2.0):
        super().__init__(site, dim, norm)
        self.bias = bias
        self.weighs_channels = True
        self.W = None if self.is_readout else float32_parameter(dim, dim)
        self.b = None if self.is_readout else float32_parameter(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.W is not None and self.b is not None:
            nn.init.zeros_(self.W)
            nn.init.constant_(self.b, self.bias)

    def initial_state(self, x: Tensor) -> Carried:
        return Carried(x)

    def mix_inputs(self, state: Carried) -> tuple[tuple[Tensor, ...], Carried]:
        h, y, g = state
        if y is not None and g is not None:
            h = torch.lerp(upcast_to_float32(h), upcast_to_float32(y), upcast_to_float32(g)).to(
                h.dtype
            )
        if self.W is None or self.b is None:
            return (h,), Carried(h)
        gate = (upcast_to_float32(h) @ self.W + self.b).sigmoid()
        return (h,), Carried(h, g=gate)

    def state_parts(self, state: Carried) -> tuple[Tensor, ...]:
        return (state.h,)

    def mixing_weights(self, state: Carried) -> MixingWeights:
        one = identity_weights(1, state.h)
        write = one
        if state.g is not None:
            gate = state.g[..., None, None, :]
            write = join_columns(1 - gate, gate)
        return MixingWeights(write, one, one)

    def memory_traffic(self) -> float:
        # In addition to a single stream's: the gate of the pending write is read, the next written.
        reads_gate = self.site.index > 0
        writes_gate = not self.is_readout
        return super().memory_traffic() + reads_gate + writes_gate
