"""The pieces every op shares: the pending write, the coefficients' precision, the root mean square."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import kernel


def add(h: Tensor, y: Tensor | None) -> Tensor:
    """h + y where a write is pending."""
    return h if y is None else h + y


def wide(x: Tensor) -> Tensor:
    """x in the precision coefficients are computed in: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


def loops(products: int) -> bool:
    """Whether so many small products are best written as sums.

    A compiler makes sums a part of the loop around them, where a BLAS call would read the rows once more.
    """
    return torch.compiler.is_compiling() and products <= 16


def project(x: Tensor, W: Tensor) -> Tensor:
    """x W for a tall W: [… D] and [D K] -> [… K]."""
    if loops(W.shape[-1]):
        return torch.stack([(x * w).sum(-1) for w in W.unbind(-1)], -1)
    # laid out by output, as BLAS takes many times as long for the gradient of a tall matrix as for that of a wide one
    return F.linear(x, W.mT.contiguous())


def spread(g: Tensor, W: Tensor) -> Tensor:
    """g Wᵀ for a tall W, the way back from `project`: [… K] and [D K] -> [… D]."""
    if loops(W.shape[-1]):
        return sum((g_k[..., None] * w for g_k, w in zip(g.unbind(-1), W.unbind(-1), strict=True)), W.new_zeros(()))
    return g @ W.mT


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS(x) = x · rsqrt(mean(x²) + eps) over the last axis, no weight; float32 inside and out."""
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps)


def rstd(x: Tensor, eps: float = 1e-6) -> Tensor:
    """rsqrt(mean(x²) + eps): what RMS(x) multiplies x by. [..., D] -> [...], reading x once."""
    return torch.rsqrt(torch.linalg.vector_norm(wide(x), dim=-1).square() / x.shape[-1] + eps)


class Following(NamedTuple):
    """The norm of what an op gives, for its kernel to take along: LayerNorm where centred, else RMSNorm."""

    weight: Tensor  # [D]
    bias: Tensor | None  # [D]
    eps: float
    centred: bool


def follow(x: Tensor, norm: Following | None = None) -> Tensor:
    """N(x)·weight + bias where a norm follows, else x. [... D], in x's dtype; normed in float32."""
    if norm is None:
        return x
    new = F.layer_norm(wide(x), x.shape[-1:], eps=norm.eps) if norm.centred else rms(x, norm.eps)
    new = new * norm.weight
    return (new if norm.bias is None else new + norm.bias).to(x.dtype)


@kernel("norm")
def add_norm(h: Tensor, y: Tensor | None, norm: Following | None = None) -> tuple[Tensor, Tensor]:
    """h' = h + y where a write is pending, and its norm where one follows, else h' again.

    h, y: [B T D].  ->  [B T D] twice, in h's dtype; normed in float32.  Moves 4·D elements a token.
    """
    h = add(h, y)
    return h, follow(h, norm)
