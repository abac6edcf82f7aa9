"""n streams: write one output to all of them, read mixtures of them."""

from torch import Tensor

from .norm import wide


def streams(H: Tensor, w: Tensor) -> Tensor:
    """out_c = Σ_s w[…, s, c] · H_s: C mixtures of n streams, rows of w the source, columns the destination.

    H: [B T n D].  w: [n C] static, or [B T n C] a token's own, float32.  ->  [B T C D] in H's dtype, summed in w's.
    Moves (n + C)·D elements a token.
    """
    return (w.mT @ wide(H)).to(H.dtype)


def deposit(H: Tensor, y: Tensor | None, beta: Tensor | None) -> Tensor:
    """H_s + beta_s · y where a write is pending.

    H: [B T n D].  y: [B T D].  beta: [n] static, or [B T n], float32.  ->  [B T n D] in H's dtype.
    """
    if y is None or beta is None:
        return H
    return (H + beta[..., None] * y[..., None, :]).to(H.dtype)
