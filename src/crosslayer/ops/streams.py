"""n streams: write one output to all of them, project them for their coefficients, read mixtures of them.

A site is `probe`, then coefficients made of what it gives, then `carry`: (4n + 2)·D elements a token forward and
(6n + 3)·D backward. All in one pass would be (2n + 2)·D and (3n + 3)·D: the coefficients need every stream whole before
any is mixed, and a token's streams would have to stay on the chip until then.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..norms import NormSpec, apply_norm, rstd, upcast
from .dispatch import kernel_op
from .products import mix_streams, project_back, project_manual_grad, row_dots, stream_gram


def expand_to_streams(x: Tensor, n: int) -> Tensor:
    """n equal streams, a view: [B T D] -> [B T n D]."""
    return x[..., None, :].expand(*x.shape[:-1], n, x.shape[-1])


def depth_connection(H: Tensor, Y: Tensor | None, beta: Tensor | None) -> Tensor:
    """H_s + beta_s · Y_s, where a write is pending.

    H: [B T n D].  Y: [B T n D], or [B T 1 D] for all streams.  beta: [n] static, or [B T n], float32.
    ->  [B T n D] in H's dtype.
    """
    if Y is None or beta is None:
        return H
    return torch.addcmul(upcast(H), upcast(beta)[..., None], upcast(Y)).to(H.dtype)


@kernel_op
def write_norm_project(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    eps: float = 1e-6,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """The pending write, and projections of the normed streams, which coefficients are made of.

    H' = deposit(H, Y, beta),   z = N(H') W, N(v) = (v − μ) · rsqrt(mean((v − μ)²) + eps), μ the mean or, uncentred, 0.

    H: [B T n D].  Y: [B T 1 D], or [B T n D], or None where nothing is pending.  beta: [n] static, or [B T n].
    W: [D K] for each stream by itself, or [nD K] for all as one vector; float32.
    ->  [B T n D] in H's dtype, [B T n K] or [B T 1 K] float32.
    Moves (2n + 1)·D elements a token, and W.
    """
    return Probe.apply(H, Y, beta, W, eps, centred)


@kernel_op
def width_connection(
    H: Tensor, pre: Tensor, res: Tensor, norm: NormSpec | None = None
) -> tuple[Tensor, Tensor]:
    """What is read of n streams, and what goes on.

    x = Σ_s pre_s H_s, normed where a norm follows,   H'_c = Σ_s res[s, c] H_s.

    H: [B T n D].  pre: [n] static, or [B T n].  res: [n n] or [B T n n], rows the source; float32.
    ->  [B T D], [B T n D] in H's dtype.  Moves (2n + 1)·D elements a token.
    """
    lead, n = H.shape[:-2], H.shape[-2]
    x, H = Carry.apply(H, pre.expand(*lead, n), res.expand(*lead, n, n))
    return apply_norm(x, norm), H


class Probe(Function):
    """g = dz r,   c = ⟨dz, z⟩ r²/width,   dH = dH' + g Wᵀ − c (H' − μ),   dW = (H' − μ)ᵀ g,   dY = Σ_s β_s dH_s

    of rows that are a stream each, or all of a token's. Where they are centred so is W, column by column: what is the
    same along a row is not seen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        H: Tensor,
        Y: Tensor | None,
        beta: Tensor | None,
        W: Tensor,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        new = H.clone() if Y is None else depth_connection(H, Y, beta)
        rows = upcast(new).reshape(-1, len(W))
        mean = rows.mean(-1, keepdim=True) if centred else None
        rows = rows if mean is None else rows - mean
        r = rstd(rows, eps)[:, None]
        z = project_manual_grad(rows, W) * r
        ctx.save_for_backward(new, Y, beta, W, z, r, mean)
        return new, z.view(*H.shape[:-2], -1, W.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnew: Tensor, dz: Tensor) -> Any:
        new, Y, beta, W, z, r, mean = ctx.saved_tensors
        rows, dz = upcast(new).reshape(-1, len(W)), dz.reshape(z.shape)
        g, c = dz * r, (dz * z).sum(-1, keepdim=True) * r * r / len(W)
        dW = (g.mT @ rows).mT
        if mean is None:
            dH = project_back(g, W).addcmul_(c, rows, value=-1)
        else:
            dW -= (g.mT @ mean).mT
            dH = project_back(g, W - W.mean(0)).addcmul_(c, rows, value=-1).add_(c * mean)
        dH = dH.view(new.shape).add_(dnew)
        if Y is None:
            return dH.to(new.dtype), None, None, dW, None, None
        dbeta = row_dots(Y, dH).sum_to_size(beta.shape)
        dY = (
            upcast(beta)[..., None] * dH
            if Y.shape[-2] > 1
            else mix_streams(dH, upcast(beta)[..., None])
        )
        return dH.to(new.dtype), dY.to(Y.dtype), dbeta.to(beta.dtype), dW, None, None


class Carry(Function):
    """dpre_s = ⟨dx, H_s⟩,   dres[s, c] = ⟨dH'_c, H_s⟩,   dH_s = pre_s dx + Σ_c res[s, c] dH'_c"""

    @staticmethod
    def forward(ctx: Any, H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(H, pre, res)
        return mix_streams(H, pre[..., None]).squeeze(-2), mix_streams(H, res)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, pre, res = ctx.saved_tensors
        dout = upcast(dout).contiguous()  # that of a sum over streams has no strides
        dH = mix_streams(dout, res.mT).addcmul_(pre[..., None], upcast(dx)[..., None, :])
        return dH.to(H.dtype), row_dots(dx[..., None, :], H), stream_gram(H, dout)
