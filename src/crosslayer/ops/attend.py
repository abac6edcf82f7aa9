"""Attention over depth."""

import torch
from torch import Tensor

from .dispatch import kernel
from .mix import weighted_sum
from .norm import rstd, wide


@kernel("attend")
def attend(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """Σ_l softmax_l(⟨q, RMS(X_l)⟩) · X_l: keys are normalised, values are not.

    X: L x [B T D].  q: [D] float32, with any scale and key-norm weight multiplied in.  ->  [B T D] in X's dtype.
    Moves (L + 1)·D elements a token.
    """
    return weighted_sum(X, scores(X, q, eps).softmax(-1))


def scores(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """⟨q, RMS(X_l)⟩ of every source: [B T L] float32."""
    return torch.stack([x @ q * rstd(x, eps) for x in map(wide, X)], -1)


@kernel("attend")
def attend_ahead(X: tuple[Tensor, ...], Q: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Phase 1 of block attention: sources that are complete, attended to once for all of a block's queries.

    X: L x [B T D].  Q: [S D].  ->  S outputs [S B T D], and the log of their softmax denominators [S B T].
    """
    z = torch.stack([scores(X, q, eps) for q in Q])
    return torch.stack([weighted_sum(X, p) for p in z.softmax(-1)]), z.logsumexp(-1)


@kernel("merge")
def attend_merge(out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float = 1e-6) -> Tensor:
    """Phase 2: one query's output over the complete sources, merged with one more source, the block's sum so far.

    out: [B T D].  lse: [B T].  x: [B T D].  q: [D].  ->  what `attend` gives for all of them at once.
    """
    share = (scores((x,), q, eps)[..., 0] - lse).sigmoid()
    return torch.lerp(wide(out), wide(x), share[..., None]).to(x.dtype)
