"""Pre-norm residual: every sub-layer adds its output to one stream.

Paper: On Layer Normalization in the Transformer Architecture (Xiong et al., 2020),
arXiv 2002.04745.

    x ← x + F(Norm(x))

A parallel block (GPT-J, Pythia) reads the same x twice: x ← x + attn(n1(x)) + mlp(n2(x)).
State: one stream.
Learned parameters: none.
Traffic: 4D elements per token and site.
"""

from typing import NamedTuple

from torch import Tensor

from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import NormSpec
from ..ops import add_norm


class SingleStream(NamedTuple):
    """One stream: the state of pre-norm and post-norm."""

    h: Tensor  # [B T D]
    y: Tensor | None = None  # [B T D]: pending write


class PreNorm(FusedNormConnection[SingleStream]):
    """Pre-norm residual: every sub-layer adds its output to one stream.

    The baseline of every comparison.

    Paper: On Layer Normalization in the Transformer Architecture (Xiong et al., 2020),
    arXiv 2002.04745.
    """

    initial_function = "bitwise prenorm"

    def initial_state(self, x: Tensor) -> SingleStream:
        return SingleStream(x)

    def fused_read(
        self, state: SingleStream, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], SingleStream]:
        h, x = add_norm(*state, *norms)
        return (x,), SingleStream(h)

    def state_parts(self, state: SingleStream) -> tuple[Tensor, ...]:
        return (state.h,)

    def mixing_weights(self, state: SingleStream) -> MixingWeights:
        one = identity_weights(1, state.h)
        return MixingWeights(one if state.y is None else join_columns(one, one), one, one)
