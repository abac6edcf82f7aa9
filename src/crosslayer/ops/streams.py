"""n streams: write one output to all of them, read mixtures of them."""

import torch
from torch import Tensor

from .dispatch import kernel
from .norm import wide


def repeat(x: Tensor, n: int) -> Tensor:
    """n equal streams, a view: [B T D] -> [B T n D]."""
    return x[..., None, :].expand(*x.shape[:-1], n, x.shape[-1])


def streams(H: Tensor, w: Tensor) -> Tensor:
    """out_c = Σ_s w[…, s, c] · H_s: C mixtures of n streams, rows of w the source, columns the destination.

    H: [B T n D].  w: [n C] static, or [B T n C] a token's own, float32.  ->  [B T C D] in H's dtype, summed in w's.
    Moves (n + C)·D elements a token.
    """
    # a copy of the weights, as a batch of matrices with gaps in them is multiplied one by one
    return (w.mT.contiguous() @ wide(H)).to(H.dtype)


def deposit(H: Tensor, Y: Tensor, beta: Tensor) -> Tensor:
    """H_s + beta_s · Y_s.

    H: [B T n D].  Y: [B T n D], or [B T 1 D] for all streams.  beta: [n] static, or [B T n], float32.
    ->  [B T n D] in H's dtype.
    """
    return torch.addcmul(wide(H), wide(beta)[..., None], wide(Y)).to(H.dtype)


@kernel("streams")
def carry(H: Tensor, y: Tensor, beta: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    """A site of n streams, given its coefficients: the pending write, what is read, and what goes on.

    H' = deposit(H, y, beta),   x = Σ_s pre_s H'_s,   H''_c = Σ_s res[s, c] H'_s.

    H: [B T n D].  y: [B T D].  beta, pre: [n] static, or [B T n].  res: [n n] or [B T n n], rows the source; float32.
    ->  [B T D], [B T n D] in H's dtype.  Moves (2n + 2)·D elements a token.
    """
    H = deposit(H, y[..., None, :], beta)
    return streams(H, pre[..., None]).squeeze(-2), streams(H, res)
