"""n streams: write one output to all of them, and read mixtures of them.

A site of n streams is `write_norm_project`, coefficients computed from its result, then
`width_connection`: (4n + 2)·D elements a token forward and (6n + 3)·D backward, as the coefficients
need every stream in full before any is mixed. Where a token's streams fit on chip until then, the
op is `hyper_connection`. Where the coefficients are known before, it is `single_pass_connection`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm, upcast_to_float32
from .dispatch import kernel_op
from .manual_backward import run_function, separate_outputs
from .products import mix_streams, row_dots, stream_gram


def expand_to_streams(x: Tensor, n: int) -> Tensor:
    """n equal streams, a view: [B T D] -> [B T n D]."""
    return x[..., None, :].expand(*x.shape[:-1], n, x.shape[-1])


def depth_connection(H: Tensor, Y: Tensor | None, beta: Tensor | None) -> Tensor:
    """H_s + beta_s · Y_s, H_s + Y_s without a beta, or H where no write is pending.

    Args:
        H: [B T n D].
        Y: [B T n D], or [B T 1 D] where all streams share it.
        beta: [n] static, or [B T n]; float32; None for 1.

    Returns:
        [B T n D] in H's dtype.
    """
    if Y is None:
        return H
    if beta is None:
        return (H + Y).to(H.dtype)
    # Y is not converted: autograd saves what it is given.
    return torch.addcmul(upcast_to_float32(H), upcast_to_float32(beta)[..., None], Y).to(H.dtype)


def collapse_streams(
    H: Tensor, weights: Tensor | None = None, norm: NormSpec | None = None
) -> Tensor:
    """norm(Σ_s w_s H_s), or the norm of the streams' sum.

    Args:
        H: [B T n D].
        weights: [n] static, or [B T n]; float32; None for the plain sum.
        norm: None for no norm. Where there is one, a sum of float16 streams stays in float32 until
            it is normed, because it may exceed float16's range.

    Returns:
        [B T D] in H's dtype.
    """
    is_wider = norm is not None and H.dtype == torch.float16
    streams = upcast_to_float32(H) if is_wider else H
    if weights is None:
        x = streams.sum(-2)
    else:
        x = mix_streams(streams, weights[..., None]).squeeze(-2)
    return apply_norm(x, norm).to(H.dtype)


@kernel_op
def width_connection(
    H: Tensor, pre: Tensor, res: Tensor, norm: NormSpec | None = None
) -> tuple[Tensor, Tensor]:
    """The input read from n streams, and the mixed streams.

    x = norm(Σ_s pre_s H_s),   H'_c = Σ_s res[s, c] H_s

    Moves (2n + 1)·D elements a token.

    Args:
        H: [B T n D].
        pre: [n] static, or [B T n]; float32.
        res: [n n] static, or [B T n n], rows the source; float32.
        norm: the norm of x; None for no norm.

    Returns:
        x [B T D] and H' [B T n D] in H's dtype.
    """
    if norm is not None and H.dtype == torch.float16:
        return collapse_streams(H, pre, norm), mix_streams(H, res)
    lead = H.shape[:-2]
    n = H.shape[-2]
    x, H = run_function(_WidthConnection, H, pre.expand(*lead, n), res.expand(*lead, n, n))
    return apply_norm(x, norm), H


class _WidthConnection(Function):
    """dpre_s = ⟨dx, H_s⟩,   dres[s, c] = ⟨dH'_c, H_s⟩,   dH_s = pre_s dx + Σ_c res[s, c] dH'_c"""

    @staticmethod
    def definition(H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
        return mix_streams(H, pre[..., None]).squeeze(-2), mix_streams(H, res)

    @staticmethod
    def forward(ctx: Any, H: Tensor, pre: Tensor, res: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(H, pre, res)
        return separate_outputs(*_WidthConnection.definition(H, pre, res))

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, pre, res = ctx.saved_tensors
        # contiguous: the gradient of a sum over streams has stride 0
        dout = upcast_to_float32(dout).contiguous()
        dH = mix_streams(dout, res.mT).addcmul_(pre[..., None], upcast_to_float32(dx)[..., None, :])
        return dH.to(H.dtype), row_dots(dx[..., None, :], H), stream_gram(H, dout)
