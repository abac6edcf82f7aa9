"""Gated interpolation of streams towards a sub-layer's output."""

import torch
from torch import Tensor

from .norm import wide


def gate(S: tuple[Tensor, ...], y: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """s_i + beta_i · (y − s_i).

    S: n x [B T D].  y: [B T D].  beta: [B T n] float32.  ->  n x [B T D] in S's dtype, interpolated in beta's.
    Moves (2n + 1)·D elements a token.
    """
    y, beta = wide(y), wide(beta)
    return tuple(torch.lerp(wide(s), y, b[..., None]).to(s.dtype) for s, b in zip(S, beta.unbind(-1), strict=True))
