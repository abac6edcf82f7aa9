"""Attention over depth: every token attends to its own sources."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm, inverse_rms, rms_norm, upcast_to_float32
from .dispatch import kernel_op
from .manual_backward import definition_gradients, run_function, separate_outputs
from .mix import add_weighted_sum, pass_sources_on, plain_weighted_sum, weighted_sum
from .products import project_manual_grad, row_dot

_FEW_ELEMENTS = 2**15  # of a source, as when decoding


@kernel_op
def depth_attention(
    X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6, norm: NormSpec | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """norm(Σ_l softmax_l(⟨q, RMS(X_l)⟩) · X_l): keys are normalised, values are not.

    Moves (L + 1)·D elements a token; (3L + 1)·D backward.

    Args:
        X: the L sources, [B T D] each.
        q: the query [D] float32, multiplied by any scale and key-norm weight beforehand.
        eps: of the keys' norm.
        norm: the norm of the output; None for no norm.

    Returns:
        [B T D] in X's dtype; and the sources for their next reader (see `mix`).
    """
    h, *passed = run_function(_DepthAttention, q, eps, *X)
    return apply_norm(h, norm), pass_sources_on(X, passed)


def depth_scores(X: tuple[Tensor, ...], q: Tensor, eps: float = 1e-6) -> Tensor:
    """⟨q, RMS(X_l)⟩ of every source: [B T L] float32."""
    return torch.stack([_score(upcast_to_float32(x), q, eps) for x in X], -1)


def _score(x: Tensor, q: Tensor, eps: float) -> Tensor:
    """⟨q, RMS(x)⟩. Autograd keeps x alone for it, not RMS(x), and its second derivative is finite
    where x is zero, as that of `inverse_rms` is not.
    """
    return x @ q * torch.rsqrt(x.square().mean(-1) + eps)


class _DepthAttention(Function):
    """r_l = inverse_rms(X_l),   z_l = r_l ⟨q, X_l⟩,   p = softmax(z),   out = Σ_l p_l X_l

    a_l = ⟨dout, X_l⟩,   e_l = a_l − Σ_j p_j a_j,   dz_l = p_l e_l
    dX_l = dX'_l + p_l (dout + project_rms_dx(e_l)),   dq = Σ_l project_rms_dq(dz_l)
    """

    @staticmethod
    def definition(q: Tensor, eps: float, *X: Tensor) -> tuple[Tensor, ...]:
        z = torch.stack([rms_norm(x, eps) @ q for x in X], -1)
        return plain_weighted_sum(X, z.softmax(-1)), *X

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: see `_DepthMix`.
        ctx, q, eps, *X = args
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # a source without a later reader has no gradient
        r, scores = score_sources(X, q[None], eps)
        z = scores[..., 0, :]  # [B T L]
        p = z.softmax(-1)
        ctx.save_for_backward(q, r, z, p, *X)
        return *separate_outputs(weighted_sum(X, p)), *X

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *later: Tensor | None) -> tuple[Tensor | None, ...]:
        q, r, z, p, *X = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            inputs = (q, ctx.eps, *X)
            return definition_gradients(_DepthAttention.definition, inputs, dout, *later)
        if dout is None:
            return None, None, *later
        a = torch.stack([row_dot(dout, x) for x in X], -1)
        e = a - (p * a).sum(-1, keepdim=True)
        dX = []
        dQ = torch.zeros_like(q)[None]
        for l, x in enumerate(X):
            e_l = e[..., l, None]
            p_l = p[..., l, None]
            z_l = z[..., l, None]
            dQ = dQ + project_rms_dq(x, r[l], p_l * e_l)
            # One product at the end, because dX'_l is large: it is rounded once a site.
            dx = project_rms_dx(x, q[None], r[l], z_l, e_l, dout)
            dX.append(add_weighted_sum(later[l], [dx], p_l).to(x.dtype))
        return dQ[0], None, *dX


def score_sources(X: Sequence[Tensor], Q: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """r_l = inverse_rms(X_l) and z_sl = r_l ⟨Q_s, X_l⟩.

    Args:
        X: L tensors [B T D].
        Q: [S D].
        eps: of the RMS norm.

    Returns:
        r [L B T] and z [B T S L], float32.
    """
    if not torch.compiler.is_compiling() and X[0].numel() <= _FEW_ELEMENTS:
        # A copy of all sources takes less time than calling each function once a source.
        H = torch.stack([*X])
        r = inverse_rms(H, eps)
        return r, _project_rms(H, Q, r).movedim(0, -1)
    r = torch.stack([inverse_rms(x, eps) for x in X])
    scores = [_project_rms(x, Q, r_l) for x, r_l in zip(X, r, strict=True)]
    return r, torch.stack(scores, -1)


def _project_rms(x: Tensor, Q: Tensor, r: Tensor) -> Tensor:
    """z_s = r ⟨Q_s, x⟩, r = inverse_rms(x).  x: [B T D].  Q: [S D].  r: [B T].  ->  [B T S]."""
    return project_manual_grad(upcast_to_float32(x), Q.mT) * r[..., None]


def project_rms_dx(x: Tensor, Q: Tensor, r: Tensor, z: Tensor, dz: Tensor, dx: Tensor) -> Tensor:
    """The gradient of `_project_rms`'s x, added to dx.

    dx + Σ_s dz_s r Q_s − (Σ_s dz_s z_s) r²/D · x

    Args:
        x: [B T D].
        Q: [S D].
        r: inverse_rms(x), [B T].
        z: the result of `_project_rms`, [B T S].
        dz: its gradient, [B T S].
        dx: [B T D].

    Returns:
        A new tensor [B T D] in dz's dtype.
    """
    g = dz * r[..., None]
    c = (g * z).sum(-1, keepdim=True) * r[..., None]
    dx = torch.addcmul(dx, c, upcast_to_float32(x), value=-1 / x.shape[-1])
    for s, q in enumerate(Q):
        dx.addcmul_(g[..., s, None], q)
    return dx


def project_rms_dq(x: Tensor, r: Tensor, dz: Tensor) -> Tensor:
    """The gradient of `_project_rms`'s Q, [S D]. Arguments: see `project_rms_dx`."""
    g = dz * r[..., None]
    return g.reshape(-1, g.shape[-1]).mT @ upcast_to_float32(x).reshape(-1, x.shape[-1])
