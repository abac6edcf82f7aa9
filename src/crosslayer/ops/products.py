"""Products of which one side is a few numbers: projections of rows, mixtures of few rows, products of rows with rows.

As they are called, BLAS is best. A compiler would call BLAS too, between its loops; given sums, inductor makes them
part of the loop that reads or writes the rows anyway.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ..norms import upcast


def prefer_sums(products: int) -> bool:
    """Whether so many products, of a row each, are sums."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and products <= 16


def project_tall(x: Tensor, W: Tensor) -> Tensor:
    """x W for a tall W: [… D] and [D K] -> [… K]."""
    # laid out by output, as BLAS takes many times as long for the gradient of a tall matrix as for that of a wide one
    return F.linear(x, W.mT.contiguous())


def project_manual_grad(x: Tensor, W: Tensor) -> Tensor:
    """`project` where its backward is written out: inductor's of the sums is wrong in some graphs (torch 2.13)."""
    if prefer_sums(W.shape[-1]):
        return torch.stack([(x * w).sum(-1) for w in W.unbind(-1)], -1)
    return project_tall(x, W)


def project_back(g: Tensor, W: Tensor) -> Tensor:
    """g Wᵀ for a tall W, the way back from `project_once`: [… K] and [D K] -> [… D]."""
    if prefer_sums(W.shape[-1]):
        return reduce(
            torch.add,
            (g_k[..., None] * w for g_k, w in zip(g.unbind(-1), W.unbind(-1), strict=True)),
        )
    return g @ W.mT


def mix_streams(H: Tensor, w: Tensor) -> Tensor:
    """out_c = Σ_s w[…, s, c] · H_s: C mixtures of n streams, rows of w the source, columns the destination.

    H: [B T n D].  w: [n C] static, or [B T n C] a token's own, float32.  ->  [B T C D] in H's dtype, summed in w's.
    Moves (n + C)·D elements a token.
    """
    if prefer_sums(w.shape[-2] * w.shape[-1]):
        return (w[..., None] * upcast(H)[..., None, :]).sum(-3).to(H.dtype)
    # a copy of the weights, as a batch of matrices with gaps in them is multiplied one by one
    return (w.mT.contiguous() @ upcast(H)).to(H.dtype)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ over the last axis, multiplied and summed wide: [… D] -> […]."""
    return (upcast(a) * b).sum(-1)


def row_dots(Y: Tensor, H: Tensor) -> Tensor:
    """⟨Y_s, H_s⟩, or ⟨Y, H_s⟩ of one Y for all: [… n|1 D], [… n D] -> [… n]."""
    return row_dot(Y, H) if Y.shape[-2] > 1 else stream_gram(Y, H).squeeze(-2)


def stream_gram(A: Tensor, B: Tensor) -> Tensor:
    """⟨A_s, B_c⟩, multiplied and summed wide: [… n D], [… m D] -> [… n m]."""
    if prefer_sums(A.shape[-2] * B.shape[-2]):
        return torch.stack(
            [torch.stack([row_dot(a, b) for b in B.unbind(-2)], -1) for a in A.unbind(-2)], -2
        )
    return upcast(A) @ upcast(B).mT
