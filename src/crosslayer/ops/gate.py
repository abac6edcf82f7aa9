"""Gated interpolation of streams towards a sub-layer's output."""

import torch
from torch import Tensor

from .attend import attend, scores
from .dispatch import kernel
from .norm import wide


def gate(S: tuple[Tensor, ...], y: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """s_i + beta_i · (y − s_i).

    S: n x [B T D].  y: [B T D].  beta: [B T n] float32.  ->  n x [B T D] in S's dtype, interpolated in beta's.
    Moves (2n + 1)·D elements a token.
    """
    y, beta = wide(y), wide(beta)
    return tuple(torch.lerp(wide(s), y, b[..., None]).to(s.dtype) for s, b in zip(S, beta.unbind(-1), strict=True))


@kernel("gate")
def gate_pool(
    S: tuple[Tensor, ...], y: Tensor, beta: Tensor, pool: Tensor, score: Tensor | None = None, eps: float = 1e-6
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """The streams gated towards y, attention over them, and their scores for the gate to come.

    S' = gate(S, y, beta),   h = attend(S', pool),   q = scores(S', score) where there is a gate to come.

    S: n x [B T D].  y: [B T D].  beta: [B T n] float32.  pool, score: [D] float32.
    ->  n x [B T D], [B T D], [B T n] float32 or None.  Moves (2n + 2)·D elements a token.
    """
    S = gate(S, y, beta)
    return S, attend(S, pool, eps), None if score is None else scores(S, score, eps)
