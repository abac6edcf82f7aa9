"""DenseFormer: depth-weighted averages of the blocks' outputs.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, sections 3, 3.2 and 3.3.

    X_0 the embedding, X_i = B_i(Y_{i−1}) the output of block i, Y_0 = X_0
    Y_i = Σ_{j ≤ i, j ≡ i mod k} α_{i,j} X_j   where p divides i, else Y_i = X_i
    block i + 1 reads Y_i; the readout reads Y_L

k is the `dilation` and p the `period`, counted in blocks as the paper defines them (its experiment code counts the
dilation in groups of blocks). No softmax, no normalisation; α starts one-hot on X_i, which is the plain Transformer.
    last_k=K            only the last K blocks and the embedding are averaged ("Last K", Table 4)
    period="last"       one average alone, after the last block ("Connect to Last", Table 4)
    prune(threshold)    after training: small weights to zero (section 5, Figure 7)
State: the outputs of all blocks so far. Parameters: ⌊i/k⌋ + 1 at each averaged depth i, L(L + 3)/2 for 1 × 1.
Traffic: (i + 2)D a token at depth i, over k·p.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..connection import NormFactory, Site, float32_parameter
from ..fused_norms import FusedNormConnection
from ..norms import NormSpec
from ..ops import add_norm, depth_mix
from ..validation import check_positive


class History(NamedTuple):
    X: tuple[Tensor, ...]  # X_0 .. X_i, one [B T D] a finished block
    h: Tensor  # the stream inside the block
    y: Tensor | None = None  # pending write


class DenseFormer(FusedNormConnection[History]):
    bitwise_prenorm = True
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
        self.sources = mixed_sources(site, dilation, period, last_k)
        self.alpha = float32_parameter(len(self.sources)) if self.sources else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.alpha is not None:
            self.alpha.zero_()[-1] = 1

    def initial_state(self, x: Tensor) -> History:
        return History((), x)

    def memory_traffic(self) -> float:
        return super().memory_traffic() if self.alpha is None else len(self.alpha) + len(self.ports)

    def fused_read(
        self, state: History, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], History]:
        X, alpha = state.X, self.alpha
        h, x = add_norm(state.h, state.y, *(norms if alpha is None else ()))
        if self.opens_layer:
            X = (*X, h)
        if alpha is not None:
            S = depth_mix(
                tuple(X[j] for j in self.sources), alpha[None], tuple((0, norm) for norm in norms)
            )
            h, x = S[0], S[-1]
        return (x,), History(X, h)

    @torch.no_grad()
    def prune(self, threshold: float) -> int:
        """Set weights below the threshold in magnitude to zero, and return how many those were."""
        if self.alpha is None:
            return 0
        small = self.alpha.abs() < threshold
        self.alpha[small] = 0
        return int(small.sum())


def mixed_sources(
    site: Site, dilation: int, period: int | Literal["last"], window: int | None
) -> tuple[int, ...]:
    """Which blocks' outputs are averaged where a layer opens; none at a site without an average.

    Those at a distance that the dilation divides; with a window, of those only the nearest, and the embedding.
    """
    check_positive(dilation=dilation)
    if period != "last":
        check_positive(period=period)
    if window is not None:
        check_positive(window=window)
    i = site.layer
    if (
        not site.opens_layer
        or i == 0
        or (site.index < site.depth if period == "last" else i % period)
    ):
        return ()
    near = [
        j for j in range(i + 1) if (i - j) % dilation == 0 and (window is None or i - j < window)
    ]
    return tuple(near if window is None or near[0] == 0 else [0, *near])
