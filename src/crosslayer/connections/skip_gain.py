"""Skips with gains: a learned scalar on every skip, DenseFormer's baseline.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, section 4.

    x ← g_k · x + F_k(Norm(x)),  g_k = 1 at initialisation

Gains have the learning rate of the model and take weight decay, as in the authors' code; the paper
names no exception from either.
State: one stream and the gain of the pending write.
Learned parameters: 1 per sub-layer.
Traffic: 4D elements per token and site.
"""

from typing import NamedTuple

from torch import Tensor, nn

from ..connection import Connection, NormFactory
from ..float32_parameters import float32_parameter
from ..mixing import MixingWeights, identity_weights, join_columns
from ..sites import Site


class Gained(NamedTuple):
    """One stream, and its factor when the pending write is added."""

    h: Tensor  # [B T D]
    y: Tensor | None = None  # [B T D]: pending write ...
    gain: Tensor | None = None  # ... and the factor of the stream when y is added, [1]


class SkipGain(Connection[Gained]):
    """Skips with gains: a learned scalar on every skip, DenseFormer's baseline.

    Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, section 4.
    """

    initial_function = "bitwise prenorm"
    gate_field = "gain"
    weight_decay_params = frozenset({"gain"})

    def __init__(self, site: Site, dim: int, norm: NormFactory):
        super().__init__(site, dim, norm)
        self.gain = None if self.is_readout else float32_parameter(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def initial_state(self, x: Tensor) -> Gained:
        return Gained(x)

    def mix_inputs(self, state: Gained) -> tuple[tuple[Tensor, ...], Gained]:
        h, y, gain = state
        if y is not None and gain is not None:
            h = (gain * h + y).to(h.dtype)
        # A clone, because the state may contain no parameter.
        next_gain = None if self.gain is None else self.gain.clone()
        return (h,), Gained(h, gain=next_gain)

    def state_parts(self, state: Gained) -> tuple[Tensor, ...]:
        return (state.h,)

    def mixing_weights(self, state: Gained) -> MixingWeights:
        one = identity_weights(1, state.h)
        write = one if state.gain is None else join_columns(state.gain[:, None, None], one)
        return MixingWeights(write, one, one)
