"""DenseFormer: depth-weighted averages of the blocks' outputs.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, sections 3, 3.2 and 3.3.

    X_0 the embedding, X_i = B_i(Y_{i−1}) the output of block i, Y_0 = X_0
    Y_i = Σ_{j ≤ i, j ≡ i mod k} α_{i,j} X_j   where p divides i, else Y_i = X_i
    block i + 1 reads Y_i; the readout reads Y_L

k is the `dilation` and p the `period`, counted in blocks as the paper defines them (its experiment code counts the
dilation in groups of blocks). No softmax, no normalisation; α starts one-hot on X_i, which is the plain Transformer.
State: the outputs of all blocks so far. Parameters: ⌊i/k⌋ + 1 at each averaged depth i, L(L + 3)/2 for 1 × 1.
Traffic: (i + 2)D a token at depth i, over k·p.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..connection import Connection, Norm, Site, positive, weight
from ..ops import add, mix


class History(NamedTuple):
    X: tuple[Tensor, ...]  # X_0 .. X_i, one [B T D] a finished block
    h: Tensor  # the stream inside the block
    y: Tensor | None = None  # pending write


class DenseFormer(Connection):
    variants = ("denseformer(dilation=2, period=3)", "denseformer(dilation=4, period=2)")

    def __init__(self, site: Site, dim: int, norm: Norm, dilation: int = 1, period: int = 1):
        super().__init__(site, dim, norm)
        positive(dilation=dilation, period=period)
        averages = site.opens and site.layer > 0 and site.layer % period == 0
        self.sources = slice(site.layer % dilation, None, dilation)
        self.alpha = weight(site.layer // dilation + 1) if averages else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.alpha is not None:
            self.alpha.zero_()[-1] = 1

    def init(self, x: Tensor) -> History:
        return History((), x)

    def traffic(self) -> float:
        return super().traffic() if self.alpha is None else len(self.alpha) + len(self.ports)

    def gather(self, state: History) -> tuple[tuple[Tensor, ...], History]:
        X, h = state.X, add(state.h, state.y)
        if self.opens:
            X = (*X, h)
        if self.alpha is not None:
            (h,) = mix(X[self.sources], self.alpha[None])
        return (h,), History(X, h)
