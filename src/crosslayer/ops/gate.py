"""Gated interpolation of streams towards a sub-layer's output."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..norms import NormSpec, apply_norm, rstd, upcast
from .attend import project_rms, through_rms
from .dispatch import kernel_op
from .mix import weighted_sum
from .products import row_dot


def gate_streams(S: tuple[Tensor, ...], y: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """s_i + beta_i · (y − s_i).

    S: n x [B T D].  y: [B T D].  beta: [B T n] float32.  ->  n x [B T D] in S's dtype, interpolated in beta's.
    Moves (2n + 1)·D elements a token.
    """
    y, beta = upcast(y), upcast(beta)
    return tuple(
        torch.lerp(upcast(s), y, b[..., None]).to(s.dtype)
        for s, b in zip(S, beta.unbind(-1), strict=True)
    )


@kernel_op
def gate_pool(
    S: tuple[Tensor, ...], y: Tensor, beta: Tensor, pool: Tensor, score: Tensor | None = None, eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:  # fmt: skip
    """The streams gated towards y, attention over them, and their scores for the gate to come.

    S' = gate(S, y, beta),   h = attend(S', pool, norm),   q = scores(S', score) where there is a gate to come.

    S: n x [B T D].  y: [B T D].  beta: [B T n] float32.  pool, score: [D] float32.
    ->  n x [B T D], [B T D], [B T n] float32 or None.  Moves (2n + 2)·D elements a token.
    """
    Q = pool[None] if score is None else torch.stack([pool, score])
    h, z, *new = GatePool.apply(y, beta, Q, eps, *S)
    return tuple(new), apply_norm(h, norm), None if score is None else z


class GatePool(Function):
    """Q: the queries of the pool and, where there is one to come, of the gate.

    ds'_i = dout_i + p_i dh + through_rms;   ds_i = (1 − β_i) ds'_i,   dy = Σ β_i ds'_i,   dβ_i = ⟨ds'_i, y − s_i⟩
    """

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        ctx, y, beta, Q, eps, *S = given  # see `Mix`
        new = gate_streams(tuple(S), y, beta)
        r = torch.stack([rstd(s, eps) for s in new])
        z = torch.stack(
            [project_rms(s, Q, r_i) for s, r_i in zip(new, r, strict=True)], -1
        )  # [B T 1|2 n]
        p = z[..., 0, :].softmax(-1)
        ctx.save_for_backward(y, beta, Q, r, z, p, *S, *new)
        return weighted_sum(new, p), z[..., -1, :].clone(), *new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dq: Tensor, *dnew: Tensor) -> tuple[Tensor | None, ...]:
        y, beta, Q, r, z, p, *rest = ctx.saved_tensors
        S, new = rest[: len(dnew)], rest[len(dnew) :]
        a = torch.stack([row_dot(dh, s) for s in new], -1)
        dz = torch.stack([p * (a - (p * a).sum(-1, keepdim=True)), dq][: len(Q)], -2)
        dS, dbeta, dQ, dy = [], [], torch.zeros_like(Q), torch.zeros_like(upcast(y))
        for i, s in enumerate(S):
            b = beta[..., i, None]
            ds = torch.addcmul(upcast(dnew[i]), p[..., i, None], upcast(dh))
            dQ += through_rms(new[i], Q, r[i], z[..., i], dz[..., i], into=ds)
            dbeta.append(row_dot(ds, upcast(y) - s))
            dy.addcmul_(b, ds)
            dS.append(ds.mul_(1 - b).to(s.dtype))
        return dy.to(y.dtype), torch.stack(dbeta, -1), dQ, None, *dS
