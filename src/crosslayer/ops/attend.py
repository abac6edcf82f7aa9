"""Attention over depth."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..norms import NormSpec, apply_norm, rstd, upcast
from .dispatch import kernel_op
from .mix import weighted_sum
from .products import project_manual_grad, row_dot


@kernel_op
def depth_attention(
    X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> Tensor:
    """Σ_l softmax_l(⟨q, RMS(X_l)⟩) · X_l: keys are normalised, values are not; their mean is, where a norm follows.

    X: L x [B T D].  q: [D] float32, with any scale and key-norm weight multiplied in.  ->  [B T D] in X's dtype.
    Moves (L + 1)·D elements a token.
    """
    return apply_norm(Attend.apply(q[None], eps, *X)[1], norm)


def depth_scores(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """⟨q, RMS(X_l)⟩ of every source: [B T L] float32."""
    return torch.stack([x @ q * rstd(x, eps) for x in map(upcast, X)], -1)


@kernel_op
def attend_ahead(X: tuple[Tensor, ...], Q: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Phase 1 of block attention: sources that are complete, attended to once for all of a block's queries.

    X: L x [B T D].  Q: [S D].  ->  S outputs [S B T D], and the log of their softmax denominators [S B T].
    """
    lse, *out = Attend.apply(Q, eps, *X)
    return torch.stack(out), lse


@kernel_op
def attend_merge(
    out: Tensor, lse: Tensor, x: Tensor, q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> Tensor:
    """Phase 2: one query's output over the complete sources, merged with one more source, the block's sum so far.

    out: [B T D].  lse: [B T].  x: [B T D].  q: [D].  ->  what `attend` gives for all of them at once.
    """
    share = (depth_scores((x,), q, eps)[..., 0] - lse).sigmoid()
    return apply_norm(torch.lerp(upcast(out), upcast(x), share[..., None]).to(x.dtype), norm)


class Attend(Function):
    """z_sl = r_l ⟨Q_s, X_l⟩,   p_s = softmax_l(z_s),   out_s = Σ_l p_sl X_l;   lse_s [S B T] beside the outputs

    a_sl = ⟨dout_s, X_l⟩,   dz_sl = p_sl (a_sl − Σ_j p_sj a_sj + dlse_s)
    dX_l = Σ_s p_sl dout_s + through_rms,   dQ likewise
    """

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        ctx, Q, eps, *X = given  # see `Mix`
        r = torch.stack([rstd(x, eps) for x in X])
        z = torch.stack(
            [project_rms(x, Q, r_l) for x, r_l in zip(X, r, strict=True)], -1
        )  # [B T S L]
        p = z.softmax(-1)
        ctx.save_for_backward(Q, r, z, p, *X)
        return z.logsumexp(-1).movedim(-1, 0), *(weighted_sum(X, p_s) for p_s in p.unbind(-2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlse: Tensor, *dout: Tensor) -> tuple[Tensor | None, ...]:
        Q, r, z, p, *X = ctx.saved_tensors
        a = torch.stack([torch.stack([row_dot(d, x) for x in X], -1) for d in dout], -2)
        dz = p * (a - (p * a).sum(-1, keepdim=True) + dlse.movedim(0, -1)[..., None])
        dX, dQ = [], torch.zeros_like(Q)
        for l, x in enumerate(X):
            dx = weighted_sum(dout, p[..., l]) if len(dout) > 1 else p[..., 0, l, None] * dout[0]
            dQ += through_rms(x, Q, r[l], z[..., l], dz[..., l], into=dx)
            dX.append(dx.to(x.dtype))
        return dQ, None, *dX


def project_rms(x: Tensor, Q: Tensor, r: Tensor) -> Tensor:
    """z_s = r ⟨Q_s, x⟩, where r is x's `rstd`. x: [B T D].  Q: [S D].  r: [B T].  ->  [B T S]."""
    return project_manual_grad(upcast(x), Q.mT) * r[..., None]


def through_rms(x: Tensor, Q: Tensor, r: Tensor, z: Tensor, dz: Tensor, into: Tensor) -> Tensor:
    """The backward of `project_rms`: adds Σ_s dz_s r Q_s − (Σ_s dz_s z_s) r²/D · x to `into`, and returns dQ.

    x, into: [B T D].  r: [B T].  z, dz: [B T S].  ->  [S D].
    """
    g = dz * r[..., None]
    into.addcmul_((g * z).sum(-1, keepdim=True) * r[..., None], upcast(x), value=-1 / x.shape[-1])
    for s, q in enumerate(Q):
        into.addcmul_(g[..., s, None], q)
    return g.flatten(0, -2).mT @ upcast(x).flatten(0, -2)
