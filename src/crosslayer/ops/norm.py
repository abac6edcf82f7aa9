"""The pending write, the root mean square, and the norm that follows an op."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import kernel
from .products import wide


def add(h: Tensor, y: Tensor | None) -> Tensor:
    """h + y where a write is pending."""
    return h if y is None else h + y


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
    x, like = wide(x), x
    weight, bias = norm.weight.to(x.dtype), None if norm.bias is None else norm.bias.to(x.dtype)
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps).to(like.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, norm.eps).to(like.dtype)


@kernel("norm")
def add_norm(h: Tensor, y: Tensor | None, norm: Following | None = None) -> tuple[Tensor, Tensor]:
    """h' = h + y where a write is pending, and its norm where one follows, else h' again.

    h, y: [B T D].  ->  [B T D] twice, in h's dtype; normed in float32.  Moves 4·D elements a token.
    """
    h = add(h, y)
    return h, follow(h, norm)
