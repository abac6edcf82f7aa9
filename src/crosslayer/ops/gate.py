"""Gated interpolation of streams towards a sub-layer's output."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm, rms_norm, upcast_to_float32
from .attention import project_rms_dq, project_rms_dx, score_sources
from .dispatch import kernel_op
from .manual_backward import definition_gradients, run_function, separate_outputs
from .mix import plain_weighted_sum, weighted_sum
from .products import row_dot


def gate_streams(S: tuple[Tensor, ...], y: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """s_i + beta_i · (y − s_i), interpolated in float32 or wider.

    Moves (2n + 1)·D elements a token.

    Args:
        S: the n streams, [B T D] each.
        y: [B T D].
        beta: [B T n] float32.

    Returns:
        n tensors [B T D] in S's dtype.
    """
    y = upcast_to_float32(y)
    gates = upcast_to_float32(beta).unbind(-1)
    return tuple(
        torch.lerp(upcast_to_float32(s), y, b[..., None]).to(s.dtype)
        for s, b in zip(S, gates, strict=True)
    )


@kernel_op
def gate_pool(
    S: tuple[Tensor, ...],
    y: Tensor,
    beta: Tensor,
    pool_query: Tensor,
    gate_query: Tensor | None = None,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """The streams gated towards y, attention over them, and their scores for the next gate.

    S' = gate_streams(S, y, beta)
    h = depth_attention(S', pool_query, eps, norm),   scores = depth_scores(S', gate_query, eps)

    Moves (2n + 2)·D elements a token.

    Args:
        S: the n streams, [B T D] each.
        y: [B T D].
        beta: [B T n] float32.
        pool_query: of the attention, [D] float32.
        gate_query: of the next gate's scores, [D] float32; None where no gate follows.
        eps: of the streams' RMS norm.
        norm: the norm of h; None for no norm.

    Returns:
        S', n tensors [B T D]; h [B T D]; scores [B T n] float32, or None without `gate_query`.
    """
    Q = pool_query[None] if gate_query is None else torch.stack([pool_query, gate_query])
    h, z, *gated = run_function(_GatePool, y, beta, Q, eps, *S)
    return tuple(gated), apply_norm(h, norm), None if gate_query is None else z


class _GatePool(Function):
    """Q: the query of the pool and, where a gate follows, the query of its scores.

    ds'_i = dout_i + p_i dh + project_rms_dx(dz_i)
    ds_i = (1 − β_i) ds'_i,   dy = Σ β_i ds'_i,   dβ_i = ⟨ds'_i, y − s_i⟩
    """

    @staticmethod
    def definition(
        y: Tensor, beta: Tensor, Q: Tensor, eps: float, *S: Tensor
    ) -> tuple[Tensor, ...]:
        gated = gate_streams(S, y, beta)
        z = torch.stack([rms_norm(s, eps) @ Q.mT for s in gated], -1)
        return plain_weighted_sum(gated, z[..., 0, :].softmax(-1)), z[..., -1, :], *gated

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: see `_DepthMix`.
        ctx, y, beta, Q, eps, *S = args
        ctx.eps = eps
        gated = gate_streams(tuple(S), y, beta)
        r, z = score_sources(gated, Q, eps)  # z: [B T 1|2 n]
        p = z[..., 0, :].softmax(-1)
        ctx.save_for_backward(y, beta, Q, r, z, p, *S, *gated)
        return separate_outputs(weighted_sum(gated, p), z[..., -1, :].clone(), *gated)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dq: Tensor, *dgated: Tensor) -> tuple[Tensor | None, ...]:
        y, beta, Q, r, z, p, *streams = ctx.saved_tensors
        S = streams[: len(dgated)]
        gated = streams[len(dgated) :]
        if torch.is_grad_enabled():  # create_graph
            inputs = (y, beta, Q, ctx.eps, *S)
            return definition_gradients(_GatePool.definition, inputs, dh, dq, *dgated)
        a = torch.stack([row_dot(dh, s) for s in gated], -1)
        dz_pool = p * (a - (p * a).sum(-1, keepdim=True))
        # without a gate that follows, Q is the pool's query alone
        dz = dz_pool[..., None, :] if len(Q) == 1 else torch.stack([dz_pool, dq], -2)
        dS = []
        dbeta = []
        dQ = torch.zeros_like(Q)
        dy: Any = None
        for i, s in enumerate(S):
            b = beta[..., i, None]
            ds = torch.addcmul(upcast_to_float32(dgated[i]), p[..., i, None], upcast_to_float32(dh))
            ds = project_rms_dx(gated[i], Q, r[i], z[..., i], dz[..., i], ds)
            dQ = dQ + project_rms_dq(gated[i], r[i], dz[..., i])
            dbeta.append(row_dot(ds, upcast_to_float32(y) - s))
            dy = b * ds if dy is None else dy.addcmul_(b, ds)
            dS.append(ds.mul_(1 - b).to(s.dtype))
        return dy.to(y.dtype), torch.stack(dbeta, -1), dQ, None, *dS
