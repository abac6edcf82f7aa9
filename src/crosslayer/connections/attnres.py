"""Attention residuals: every sub-layer attends over the outputs before it.

Paper: Attention Residuals (Kimi Team, 2026), arXiv 2603.15031, equations 1-6.

    input_k = Σ_i p_i v_i,   p = softmax_i ⟨w_k, RMSNorm(v_i; g_k)⟩
            y_0 the embedding, y_k the output of sub-layer k
    full:   v = [y_0, y_1, …, y_{k−1}]
    block:  v = [y_0, sums of the completed blocks …, the current block's sum so far if it has one]

The values are raw, there is no 1/√D, and the readout has its own query. The first sub-layer
has one source and so no parameters. w [D] is 0 and g [D] is 1 at initialisation: the uniform
average is the plain residual stream divided by the number of sources. The norms remove this factor
up to their eps, which is visible where embeddings are tiny.
State: the sources.
Learned parameters: 2D per sub-layer except the first, and 2D for the readout.
Names: query is w, key_norm g.
Traffic of a sub-layer after the first with m sources (m = k for full attention): (m + 1)D elements
per token, (3m + 1)D backward; 2D more forward where y joins the sum of a block that has begun. The
readout moves (2m + 1)D backward, and D more forward where y joins such a sum.

The paper reads the completed blocks once for all queries of a block. Here every site reads them
again: the first site of a block would need the queries of the later sites, but a site has only its
own parameters.
"""

from typing import NamedTuple

from torch import Tensor, nn

from ..connection import NormFactory
from ..float32_parameters import float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import NormSpec, add_write, apply_norm
from ..ops import depth_attention, depth_scores
from ..sites import Site
from ..validation import check_non_negative, check_positive


class Values(NamedTuple):
    """What sub-layers attend over."""

    done: tuple[Tensor, ...]  # y_0 and the completed blocks' sums, [B T D] each
    partial: Tensor | None = None  # [B T D]: the current block's sum so far
    y: Tensor | None = None  # [B T D]: pending write


class AttnRes(FusedNormConnection[Values]):
    """Attention residuals: every sub-layer attends over the outputs before it.

    Paper: Attention Residuals (Kimi Team, 2026), arXiv 2603.15031, equations 1-6.

    Args:
        block_size: S, the number of sub-layers in a block, whose outputs are summed to one source.
            Attention and MLP count one each, a parallel block counts one. 1 is full attention. The
            last block may be short.
        eps: eps of the keys' RMSNorm. Where the outputs of sub-layers are small, it must be that of
            the checkpoint: 1e-5 in Kimi K3.
    """

    part_label = "v_{}"
    initial_function = "prenorm up to scales"
    test_variants = ("attnres(block_size=3)", "attnres(block_size=4)")

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        block_size: int = 1,
        eps: float = 1e-6,
    ):
        super().__init__(site, dim, norm)
        check_positive(block_size=block_size)
        check_non_negative(eps=eps)
        self.eps = eps
        # The pending write is the last of its block.
        self.completes_block = site.index % block_size == 0
        # Whether the pending write is the first of its block, and so the block's sum.
        self.starts_block = (site.index - 1) % block_size == 0
        # y_0, the completed blocks and the current block.
        self.source_count = (site.index - 1) // block_size + 2
        self.query = float32_parameter(dim) if site.index else None
        self.key_norm = float32_parameter(dim) if site.index else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.query is not None and self.key_norm is not None:
            nn.init.zeros_(self.query)
            nn.init.ones_(self.key_norm)

    def initial_state(self, x: Tensor) -> Values:
        return Values((x,))

    def fused_read(
        self, state: Values, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Values]:
        norm = norms[0] if norms else None
        if self.query is None or self.key_norm is None or state.y is None:  # the first sub-layer
            return (apply_norm(state.done[0], norm),), state
        y = state.y
        if not self.completes_block:  # Under autocast y is in half precision. A block's sum is not.
            y = y.to(state.done[0].dtype)
        partial = add_write(y, state.partial)
        sources = (*state.done, partial)
        h, sources = depth_attention(sources, self.query * self.key_norm, self.eps, norm)
        if self.completes_block:
            return (h,), Values(sources)
        return (h,), Values(sources[:-1], sources[-1])

    def state_parts(self, state: Values) -> tuple[Tensor, ...]:
        partial = () if state.partial is None else (state.partial,)
        return (*state.done, *partial)

    def mixing_weights(self, state: Values) -> MixingWeights:
        parts = identity_weights(len(self.state_parts(state)), state.done[0])
        if self.query is None or self.key_norm is None or state.y is None:  # the first sub-layer
            return MixingWeights(parts, parts, parts)
        sources = (*state.done, add_write(state.y, state.partial))
        p = depth_scores(sources, self.query * self.key_norm, self.eps).softmax(-1)
        kept = identity_weights(len(sources), state.y)
        # y joins the current block's sum, or starts a new one
        write = kept if state.partial is None else join_columns(kept, kept[:, -1:])
        return MixingWeights(write, p[..., None, :, None], kept)

    def memory_traffic(self) -> float:
        reads_sum = 0 if self.starts_block or self.query is None else 1
        writes_sum = 0 if self.is_readout else reads_sum
        return self.source_count + reads_sum + writes_sum + len(self.ports)

    def backward_memory_traffic(self) -> float:
        if self.query is None:
            return super().backward_memory_traffic()
        read_later = 0 if self.is_readout else self.source_count
        return 2 * self.source_count + read_later + len(self.ports)
