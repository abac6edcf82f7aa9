"""Norms as functions: what ops, kernels and connections share. Imports torch alone."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast_to_float32(x: Tensor) -> Tensor:
    """x in the precision of coefficients: float32, or float64 where x is float64."""
    return x if x.dtype == torch.float64 else x.float()


def add_write(h: Tensor, y: Tensor | None) -> Tensor:
    """h + y, or h where no write is pending: [B T D], in the wider of the two dtypes."""
    return h if y is None else h + y


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS(x) = x · rsqrt(mean(x²) + eps) over the last axis, without a weight.

    Computed in float32, or in float64 where x is float64.
    """
    return F.rms_norm(upcast_to_float32(x), x.shape[-1:], eps=eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x²) + eps), the factor of RMS(x). [..., D] -> [...]. Reads x once."""
    return torch.rsqrt(
        torch.linalg.vector_norm(upcast_to_float32(x), dim=-1).square() / x.shape[-1] + eps
    )


class NormSpec(NamedTuple):
    """An RMSNorm, or a LayerNorm where `centred`, as its weights. Kernels fuse it into an op."""

    weight: Tensor  # [D]
    bias: Tensor | None  # [D]
    eps: float
    centred: bool


def apply_norm(x: Tensor, norm: NormSpec | None) -> Tensor:
    """norm(x), or x where `norm` is None. [... D] in x's dtype; computed in float32 or wider."""
    if norm is None:
        return x
    input_dtype = x.dtype
    x = upcast_to_float32(x)
    weight = norm.weight.to(x.dtype)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps).to(input_dtype)
    return F.rms_norm(x, x.shape[-1:], weight, norm.eps).to(input_dtype)
