"""The pieces every op shares: the pending write, the coefficients' precision, the root mean square."""

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


def project(x: Tensor, W: Tensor) -> Tensor:
    """x W for a tall W: [… D] and [D K] -> [… K]."""
    # laid out by output, as BLAS takes many times as long for the gradient of a tall matrix as for that of a wide one
    return F.linear(x, W.mT.contiguous())


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS(x) = x · rsqrt(mean(x²) + eps) over the last axis, no weight; float32 inside and out."""
    return F.rms_norm(wide(x), x.shape[-1:], eps=eps)


def rstd(x: Tensor, eps: float = 1e-6) -> Tensor:
    """rsqrt(mean(x²) + eps): what RMS(x) multiplies x by. [..., D] -> [...], reading x once."""
    return torch.rsqrt(torch.linalg.vector_norm(wide(x), dim=-1).square() / x.shape[-1] + eps)


@kernel("norm")
def add_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """h' = h + y, and RMS(h')·weight.

    h, y: [B T D].  weight: [D].  ->  [B T D] twice, in h's dtype; normed in float32.  Moves 4·D elements a token.
    """
    h = h + y
    return h, (rms(h, eps) * weight).to(h.dtype)


@kernel("norm")
def add_layer_norm(h: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """h' = h + y, and LayerNorm(h')·weight + bias.

    h, y: [B T D].  weight, bias: [D].  ->  [B T D] twice, in h's dtype; normed in float32.  Moves 4·D elements a token.
    """
    h = h + y
    return h, (F.layer_norm(wide(h), h.shape[-1:], eps=eps) * weight + bias).to(h.dtype)
