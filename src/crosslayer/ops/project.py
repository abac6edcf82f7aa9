"""Projections of n normed streams with a pending write, for coefficients."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..norms import inverse_rms, rms_norm, upcast_to_float32
from .dispatch import kernel_op
from .manual_backward import definition_gradients, run_function, separate_outputs
from .products import mix_streams, project_back, project_manual_grad, row_dots
from .streams import depth_connection


@kernel_op
def write_norm_project(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    eps: float = 1e-6,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """The pending write, and projections of the normed streams.

    H' = depth_connection(H, Y, beta),   z = N(H') W
    N(v) = (v − μ) · rsqrt(mean((v − μ)²) + eps), where μ is the mean of v if `centred`, else 0

    Moves (2n + 1)·D elements a token, and W.

    Args:
        H: [B T n D].
        Y: [B T 1 D], or [B T n D]; None where no write is pending.
        beta: [n] static, or [B T n]; None for 1, or where no write is pending. Y is saved only for
            the gradient of beta.
        W: [D K] to norm and project each stream, or [nD K] to norm and project all streams as one
            vector; float32.
        eps: of the norm.
        centred: subtract the mean, as LayerNorm does.

    Returns:
        H' [B T n D] in H's dtype, and z [B T n K] or [B T 1 K] float32.
    """
    return run_function(_WriteNormProject, H, Y, beta, W, eps, centred)


class _WriteNormProject(Function):
    """g = dz r,   c = ⟨dz, z⟩ r²/width,   dH = dH' + g Wᵀ − c (H' − μ)

    dW = (H' − μ)ᵀ g,   dY = Σ_s β_s dH_s

    A row is one stream of a token, or all of its streams. For a centred norm W is centred too,
    column by column: a constant along a row does not change the result.
    """

    @staticmethod
    def definition(
        H: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, eps: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        written = depth_connection(H, Y, beta)
        return written, _norm_and_project(written, W, eps, centred)

    @staticmethod
    def forward(
        ctx: Any,
        H: Tensor,
        Y: Tensor | None,
        beta: Tensor | None,
        W: Tensor,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, ...]:
        written = H.clone() if Y is None else depth_connection(H, Y, beta)
        rows = upcast_to_float32(written).reshape(-1, len(W))
        mean = rows.mean(-1, keepdim=True) if centred else None
        rows = rows if mean is None else rows - mean
        r = inverse_rms(rows, eps)[:, None]
        z = project_manual_grad(rows, W) * r
        ctx.save_for_backward(written, None if beta is None else Y, beta, W, z, r, mean)
        ctx.unweighted = describe_unweighted(Y, beta)
        ctx.eps = eps
        ctx.centred = centred
        rows_per_token = H.shape[-2] * H.shape[-1] // len(W)
        z = z.view(*H.shape[:-2], rows_per_token, W.shape[-1])
        return separate_outputs(written, z)

    @staticmethod
    def backward(ctx: Any, dwritten: Tensor, dz: Tensor) -> Any:
        written, Y, beta, W, z, r, mean = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            return differentiable_backward(ctx, written, Y, beta, W, dwritten, dz)
        rows = upcast_to_float32(written).reshape(-1, len(W))
        dz = dz.reshape(z.shape)
        g = dz * r
        c = (dz * z).sum(-1, keepdim=True) * r * r / len(W)
        dW = (g.mT @ rows).mT
        if mean is None:
            dH = project_back(g, W).addcmul_(c, rows, value=-1)
        else:
            dW -= (g.mT @ mean).mT
            dH = project_back(g, W - W.mean(0)).addcmul_(c, rows, value=-1).add_(c * mean)
        dH = dH.view(written.shape).add_(dwritten)
        if Y is None:
            dH = dH.to(written.dtype)
            return dH, unweighted_gradient(dH, ctx.unweighted), None, dW, None, None
        dbeta = row_dots(Y, dH).sum_to_size(beta.shape)
        weights = upcast_to_float32(beta)[..., None]
        dY = weights * dH if Y.shape[-2] > 1 else mix_streams(dH, weights)
        return dH.to(written.dtype), dY.to(Y.dtype), dbeta.to(beta.dtype), dW, None, None


def _norm_and_project(H: Tensor, W: Tensor, eps: float, centred: bool) -> Tensor:
    """N(H) W for rows of len(W) numbers: [B T n D] -> [B T n|1 K]."""
    rows = upcast_to_float32(H).reshape(*H.shape[:-2], H.shape[-2] * H.shape[-1] // len(W), len(W))
    if centred:
        return F.layer_norm(rows, rows.shape[-1:], eps=eps) @ W
    return rms_norm(rows, eps) @ W


class _UnweightedWrite(NamedTuple):
    """A pending write with weight 1."""

    rows: int  # of a token
    dtype: torch.dtype


def describe_unweighted(Y: Tensor | None, beta: Tensor | None) -> _UnweightedWrite | None:
    """What a backward needs of a write with weight 1; None for any other, or for no write."""
    return _UnweightedWrite(Y.shape[-2], Y.dtype) if Y is not None and beta is None else None


def unweighted_gradient(dH: Tensor, write: _UnweightedWrite | None) -> Tensor | None:
    """dY of a write with weight 1: [B T n D] -> [B T n|1 D]; None for None."""
    if write is None:
        return None
    dY = dH.sum(-2, keepdim=True) if write.rows < dH.shape[-2] else dH
    return dY.to(write.dtype)


def differentiable_backward(
    ctx: Any,
    written: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    dwritten: Tensor,
    dz: Tensor,
) -> tuple[Tensor | None, ...]:
    """The backward of `write_norm_project` in plain torch.

    Args:
        ctx: has `eps`, `centred` and `unweighted`.
        written: the output H'.
        Y, beta, W: as in the forward, but Y is None for a write with weight 1: `ctx.unweighted`
            describes that.
        dwritten, dz: the gradients of the outputs.

    Returns:
        The gradient of each input of the forward.
    """
    inputs = (written, W, ctx.eps, ctx.centred)
    dH, dW, _, _ = definition_gradients(_norm_and_project, inputs, dz)
    # `depth_connection` is linear in H: its gradients do not depend on H.
    dH, dY, dbeta = definition_gradients(depth_connection, (written, Y, beta), dH + dwritten)
    if Y is None:
        dY = unweighted_gradient(dH, ctx.unweighted)
    return dH, dY, dbeta, dW, None, None
