"""Products with one small side: projections of rows, mixtures of few rows, rows with rows.

In eager mode BLAS is fastest, so these are matrix products. Inductor calls BLAS too, between its
own loops; written as sums, the products become part of the loop that reads or writes the rows
anyway.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ..norms import upcast_to_float32


def _prefer_sums(products: int) -> bool:
    """Whether to write so many products of rows as sums: if torch.compile traces and they are few.

    An exported graph has matrix products.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and products <= 16


def project_tall(x: Tensor, W: Tensor) -> Tensor:
    """x W for a tall W: [… D] and [D K] -> [… K]."""
    # Laid out by output: BLAS takes many times as long for the gradient of a tall matrix as for
    # that of a wide one.
    return F.linear(x, W.mT.contiguous())


def project_manual_grad(x: Tensor, W: Tensor) -> Tensor:
    """`project_tall` for a caller that writes its own backward.

    Inductor's gradient of the sums is wrong in some graphs (torch 2.13).
    """
    if _prefer_sums(W.shape[-1]):
        return torch.stack([(x * w).sum(-1) for w in W.unbind(-1)], -1)
    return project_tall(x, W)


def project_back(g: Tensor, W: Tensor) -> Tensor:
    """g Wᵀ for a tall W, the gradient of `project_manual_grad`'s x: [… K] and [D K] -> [… D]."""
    if _prefer_sums(W.shape[-1]):
        columns = zip(g.unbind(-1), W.unbind(-1), strict=True)
        return reduce(torch.add, (g_k[..., None] * w for g_k, w in columns))
    return g @ W.mT


def mix_streams(H: Tensor, w: Tensor) -> Tensor:
    """out_c = Σ_s w[…, s, c] · H_s: C mixtures of n streams.

    Moves (n + C)·D elements a token.

    Args:
        H: [B T n D].
        w: [n C] static, or [B T n C] for each token; float32. The sums are computed in its dtype.

    Returns:
        [B T C D] in H's dtype.
    """
    if _prefer_sums(w.shape[-2] * w.shape[-1]):
        return (w[..., None] * upcast_to_float32(H)[..., None, :]).sum(-3).to(H.dtype)
    # A contiguous copy of the weights: torch multiplies a batch of strided matrices one by one.
    return (w.mT.contiguous() @ upcast_to_float32(H)).to(H.dtype)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ over the last axis, computed in float32 or wider: [… D] -> […]."""
    return (upcast_to_float32(a) * b).sum(-1)


def row_dots(Y: Tensor, H: Tensor) -> Tensor:
    """⟨Y_s, H_s⟩, or ⟨Y, H_s⟩ where all streams share Y: [… n|1 D], [… n D] -> [… n]."""
    return row_dot(Y, H) if Y.shape[-2] > 1 else stream_gram(Y, H).squeeze(-2)


def stream_gram(A: Tensor, B: Tensor) -> Tensor:
    """⟨A_s, B_c⟩, computed in float32 or wider: [… n D], [… m D] -> [… n m]."""
    if _prefer_sums(A.shape[-2] * B.shape[-2]):
        rows = [torch.stack([row_dot(a, b) for b in B.unbind(-2)], -1) for a in A.unbind(-2)]
        return torch.stack(rows, -2)
    return upcast_to_float32(A) @ upcast_to_float32(B).mT
