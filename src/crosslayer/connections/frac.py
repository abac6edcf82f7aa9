"""Frac-connections: hyper-connections over m fractions of the width instead of m copies of it.

Paper: Frac-Connections (Zhu et al., 2025), arXiv 2503.14125, Algorithms 2 and 3.

    H = reshape(h, (m, D/m))
    alpha = s_a · tanh(LayerNorm(H) W_a) + static_alpha   [B T m 2m]     static_alpha = [I | I]
    beta  = s_b · tanh(LayerNorm(H) w_b) + static_beta    [B T m]        static_beta = 1
            W_a [D/m, 2m], w_b [D/m]
    mixed = alphaᵀ H;   input = concat(mixed_{1..m})
    H ← beta · reshape(F(Norm(input))) + mixed_{m+1..2m}

The stream is as wide as that of a plain residual. W_a = w_b = 0 at initialisation: exactly the
plain residual.
State: one stream in m fractions, and beta of the pending write.
Learned parameters per sub-layer: 2m² + m, and when dynamic (D/m)(2m + 3) + 2 more.
Names: dynamic_alpha_fn is W_a, dynamic_beta_fn w_b, dynamic_alpha_scale s_a, dynamic_beta_scale
s_b, norm_weight and norm_bias are the LayerNorm's.
Traffic: 4D elements per token and site.
"""

import torch
from torch import Tensor

from ..connection import Connection, NormFactory
from ..mixing import MixingWeights, identity_weights
from ..ops import depth_connection, hyper_connection, mix_streams
from ..ops.hyper import BoundName
from ..sites import Site
from ..validation import check_idle_options, check_positive
from ._alpha_beta import (
    STREAM_NORMS,
    add_alpha_and_beta,
    coefficient_map,
    reset_alpha_and_beta,
    width_weights,
)
from ._streams import Streams, write_to_streams


class Frac(Connection[Streams]):
    """Frac-connections: hyper-connections over fractions of the width.

    Paper: Frac-Connections (Zhu et al., 2025), arXiv 2503.14125, Algorithms 2 and 3.

    Args:
        fractions: m, the number of fractions; it divides the width.
        dynamic: alpha and beta depend on the input; False for the static part alone.
        tanh: whether tanh bounds the dynamic part, as in the paper.
    """

    initial_function = "bitwise prenorm"
    parts_are_streams = True
    gate_field = "beta"
    test_variants = ("frac(dynamic=False)",)
    weight_decay_params = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        fractions: int = 2,
        dynamic: bool = True,
        tanh: bool = True,
    ):
        super().__init__(site, dim, norm)
        check_positive(fractions=fractions)
        if dim % fractions:
            raise ValueError(f"fractions must divide the width {dim}, got {fractions}")
        if not dynamic:
            check_idle_options(Frac, "dynamic=False", tanh=tanh)
        self.fractions = fractions
        self.weighs_channels = True
        self.dynamic = dynamic
        self.bound: BoundName = "tanh" if tanh else "none"
        self.stream_norm = STREAM_NORMS["layernorm"]
        if not self.is_readout:
            add_alpha_and_beta(
                self, width=dim // fractions, streams=fractions, columns=2 * fractions
            )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.is_readout:
            return
        m = self.fractions
        static_alpha = [[float(s == t % m) for t in range(2 * m)] for s in range(m)]
        reset_alpha_and_beta(self, static_alpha, static_beta=[1.0] * m)

    def initial_state(self, x: Tensor) -> Streams:
        return Streams(x.unflatten(-1, (self.fractions, -1)))

    def mix_inputs(self, state: Streams) -> tuple[tuple[Tensor, ...], Streams]:
        H, y, beta = state
        Y = None if y is None else y.unflatten(-1, (self.fractions, -1))
        if self.is_readout:
            H = depth_connection(H, Y, beta)
            return (H.flatten(-2),), Streams(H)
        if self.dynamic:
            x, H, beta = hyper_connection(H, Y, beta, coefficient_map(self), inputs=self.fractions)
            return (x,), Streams(H, beta=beta)
        H = depth_connection(H, Y, beta)
        mixed, H = mix_streams(H, self.static_alpha).tensor_split(2, -2)
        return (mixed.flatten(-2),), Streams(H, beta=self.static_beta.clone())

    def state_parts(self, state: Streams) -> tuple[Tensor, ...]:
        return state.H.unbind(-2)

    def mixing_weights(self, state: Streams) -> MixingWeights:
        write = write_to_streams(state.H, state.beta, outputs=self.fractions)
        if self.is_readout:
            every_fraction = identity_weights(self.fractions, write)
            return MixingWeights(write, every_fraction, every_fraction)
        Y = None if state.y is None else state.y.unflatten(-1, (self.fractions, -1))
        alpha = width_weights(self, state.H, Y, state.beta)
        read, carry = alpha.mT[..., None].tensor_split(2, -3)
        return MixingWeights(write, read, carry)
