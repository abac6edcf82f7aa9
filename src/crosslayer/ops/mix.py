"""Weighted sums over depth."""

import torch
from torch import Tensor

from .dispatch import kernel


@kernel("mix")
def mix(X: tuple[Tensor, ...], w: Tensor) -> tuple[Tensor, ...]:
    """out_c = Σ_l w[…, c, l] · X_l: C mixtures of L sources.

    X: L x [B T D].  w: [C L] static, or [B T C L] a token's own, float32.  ->  C x [B T D] in X's dtype, summed in w's.
    Moves (L + C)·D elements a token, and the weights.
    """
    if len(X) != w.shape[-1]:
        raise ValueError(f"mix: {len(X)} sources but weights for {w.shape[-1]}")
    return tuple(weighted_sum(X, w[..., c, :]) for c in range(w.shape[-2]))


def weighted_sum(X: tuple[Tensor, ...], w: Tensor) -> Tensor:
    # w[..., l, None] is never 0-d, so it lifts a bf16 source to float32 inside the multiplication, without a copy
    out = w[..., 0, None] * X[0]
    for l in range(1, len(X)):
        out = torch.addcmul(out, w[..., l, None], X[l])
    return out.to(X[0].dtype)
