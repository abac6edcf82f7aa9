"""Products of which one side is a few numbers: projections of rows, mixtures of few rows, products of rows with rows.

As they are called, BLAS is best. A compiler would call BLAS too, between its loops; given sums, inductor makes them
part of the loop that reads or writes the rows anyway.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the precision coefficients are computed in: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


def sums(products: int) -> bool:
    """Whether so many products, of a row each, are sums."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and products <= 16


def project(x: Tensor, W: Tensor) -> Tensor:
    """x W for a tall W: [… D] and [D K] -> [… K]."""
    # laid out by output, as BLAS takes many times as long for the gradient of a tall matrix as for that of a wide one
    return F.linear(x, W.mT.contiguous())


def project_once(x: Tensor, W: Tensor) -> Tensor:
    """`project` where its backward is written out: inductor's of the sums is wrong in some graphs (torch 2.13)."""
    if sums(W.shape[-1]):
        return torch.stack([(x * w).sum(-1) for w in W.unbind(-1)], -1)
    return project(x, W)


def spread(g: Tensor, W: Tensor) -> Tensor:
    """g Wᵀ for a tall W, the way back from `project_once`: [… K] and [D K] -> [… D]."""
    if sums(W.shape[-1]):
        return reduce(torch.add, (g_k[..., None] * w for g_k, w in zip(g.unbind(-1), W.unbind(-1), strict=True)))
    return g @ W.mT


def mixtures(H: Tensor, w: Tensor) -> Tensor:
    """out_c = Σ_s w[…, s, c] · H_s: C mixtures of n streams, rows of w the source, columns the destination.

    H: [B T n D].  w: [n C] static, or [B T n C] a token's own, float32.  ->  [B T C D] in H's dtype, summed in w's.
    Moves (n + C)·D elements a token.
    """
    if sums(w.shape[-2] * w.shape[-1]):
        return (w[..., None] * wide(H)[..., None, :]).sum(-3).to(H.dtype)
    # a copy of the weights, as a batch of matrices with gaps in them is multiplied one by one
    return (w.mT.contiguous() @ wide(H)).to(H.dtype)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ over the last axis, multiplied and summed wide: [… D] -> […]."""
    return (wide(a) * b).sum(-1)


def dots(Y: Tensor, H: Tensor) -> Tensor:
    """⟨Y_s, H_s⟩, or ⟨Y, H_s⟩ of one Y for all: [… n|1 D], [… n D] -> [… n]."""
    return dot(Y, H) if Y.shape[-2] > 1 else gram(Y, H).squeeze(-2)


def gram(A: Tensor, B: Tensor) -> Tensor:
    """⟨A_s, B_c⟩, multiplied and summed wide: [… n D], [… m D] -> [… n m]."""
    if sums(A.shape[-2] * B.shape[-2]):
        return torch.stack([torch.stack([dot(a, b) for b in B.unbind(-2)], -1) for a in A.unbind(-2)], -2)
    return wide(A) @ wide(B).mT
