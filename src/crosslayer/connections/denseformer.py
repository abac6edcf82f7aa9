"""DenseFormer: depth-weighted averages of the blocks' outputs.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, sections 3, 3.2 and 3.3.

    X_0 the embedding, X_i = B_i(Y_{i−1}) the output of block i, Y_0 = X_0
    Y_i = Σ_{j ≤ i, j ≡ i mod k} α_{i,j} X_j   where p divides i, else Y_i = X_i
    block i + 1 reads Y_i; the readout reads Y_L

k is the `dilation` and p the `period`, counted in blocks as the paper defines them (its experiment
code counts the dilation in groups of blocks). No softmax, no normalisation; α starts one-hot on
X_i, which is the plain Transformer. α takes weight decay, as in the authors' code; the paper names
no exception from its decay.
State: the outputs of all blocks so far.
Learned parameters: ⌊i/k⌋ + 1 at each averaged depth i, L(L + 3)/2 for k = p = 1.
Traffic at depth i for k = p = 1: (i + 5)D elements per token, (3i + 5)D backward. A dilation leaves
1/k of the sources, and a period averages at 1/p of the depths.
"""

from typing import Literal

import torch
from torch import Tensor

from ..connection import NormFactory
from ..float32_parameters import assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, join_rows
from ..norms import NormSpec
from ..ops import add_norm, depth_mix
from ..sites import Site
from ..validation import check_positive
from ._dense import (
    DepthAverages,
    History,
    check_block_count,
    dense_backward_traffic,
    dense_memory_traffic,
    exits_early,
    replace_blocks,
    weights_inside_block,
)


class DenseFormer(FusedNormConnection[History]):
    """DenseFormer: every block reads a learned average of the outputs of the blocks before it.

    Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, sections 3, 3.2 and 3.3. In
    the paper a dilation of 4 and a period of 5 lose little against 1 and 1, and inference is
    faster: by a third with 72 blocks (Table 1).

    Args:
        dilation: k, averages over every k-th block. 1 averages over all blocks.
        period: p, averages after every p-th block. A model of fewer than p blocks has no average.
            "last" averages once, after the last block ("Connect to Last", Table 4).
        last_k: averages over only the last `last_k` blocks and the embedding ("Last K", Table 4);
            None for all blocks, the paper's method. With a dilation k, every k-th of these.
    """

    part_label = "X_{}"
    initial_function = "bitwise prenorm"
    weight_decay_params = frozenset({"alpha"})
    test_variants = (
        "denseformer(dilation=2, period=3)",
        "denseformer(dilation=4, period=2)",
        "denseformer(last_k=2)",
        "denseformer(period='last')",
    )

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        dilation: int = 1,
        period: int | Literal["last"] = 1,
        last_k: int | None = None,
    ):
        super().__init__(site, dim, norm)
        if last_k is not None:
            check_positive(last_k=last_k)
        self.averages = DepthAverages(dilation, period, window=last_k)
        self.sources = self.averages.averaged_blocks(site)
        self.alpha = float32_parameter(len(self.sources)) if self.sources else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.alpha is not None:
            last_block = torch.zeros(len(self.sources), device=self.alpha.device)
            last_block[-1] = 1
            assign_value(self.alpha, last_block)

    def initial_state(self, x: Tensor) -> History:
        return History((), x)

    def fused_read(
        self, state: History, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], History]:
        if self.alpha is None or (self.is_readout and exits_early(state, self.sources)):
            h, x = add_norm(state.h, state.y, *norms)
            return (x,), History(self._finished_blocks(state, h), h)
        # A block ends here: its output X_i joins the history, and the average Y_i replaces it.
        h, _ = add_norm(state.h, state.y)
        X = self._finished_blocks(state, h)
        check_block_count(X, self.site)
        averaged = tuple(X[j] for j in self.sources)
        outputs = ((0, None), *((0, norm) for norm in norms))
        (Y, *normed), averaged = depth_mix(averaged, self.alpha[None], outputs)
        x = normed[0] if normed else Y
        return (x,), History(replace_blocks(X, self.sources, averaged), Y)

    def _finished_blocks(self, state: History, h: Tensor) -> tuple[Tensor, ...]:
        return (*state.X, h) if self.opens_layer else state.X

    def state_parts(self, state: History) -> tuple[Tensor, ...]:
        return (*state.X, state.h)

    def mixing_weights(self, state: History) -> MixingWeights:
        inside_block = weights_inside_block(state)
        if not self.opens_layer:
            return inside_block
        Y = inside_block.read  # the plain Transformer: Y_i = X_i
        if self.alpha is not None:
            Y = torch.zeros_like(Y)
            Y[:, list(self.sources), 0] = self.alpha.detach()
        return MixingWeights(inside_block.write, Y, join_rows(inside_block.carry, Y))

    def memory_traffic(self) -> float:
        return dense_memory_traffic(self, self.averages, self.sources)

    def backward_memory_traffic(self) -> float:
        return dense_backward_traffic(self, self.averages, self.sources)
