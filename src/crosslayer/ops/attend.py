"""Attention over depth."""

import torch
from torch import Tensor

from .mix import weighted_sum
from .norm import rstd, wide


def attend(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """Σ_l softmax_l(⟨q, RMS(X_l)⟩) · X_l: keys are normalised, values are not.

    X: L x [B T D].  q: [D] float32, with any scale and key-norm weight multiplied in.  ->  [B T D] in X's dtype.
    Moves (L + 1)·D elements a token.
    """
    return weighted_sum(X, scores(X, q, eps).softmax(-1))


def scores(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """⟨q, RMS(X_l)⟩ of every source: [B T L] float32."""
    return torch.stack([x @ q * rstd(x, eps) for x in map(wide, X)], -1)
