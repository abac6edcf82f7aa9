"""Weighted sums over depth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm
from .dispatch import kernel_op
from .products import row_dot


@kernel_op
def depth_mix(
    X: tuple[Tensor, ...], w: Tensor, norms: tuple[tuple[int, NormSpec], ...] = ()
) -> tuple[Tensor, ...]:
    """out_c = Σ_l w[…, c, l] · X_l: C mixtures of L sources; and after them, for each (c, N) of `norms`, N(out_c).

    X: L x [B T D].  w: [C L] static, or [B T C L] a token's own, float32.  ->  [B T D] each, in X's dtype, summed in
    w's.  Moves (L + C)·D elements a token, D more a norm, and the weights.
    """
    if len(X) != w.shape[-1]:
        raise ValueError(f"mix: {len(X)} sources but weights for {w.shape[-1]}")
    S = Mix.apply(w, *X)
    return (*S, *(apply_norm(S[c], norm) for c, norm in norms))


class Mix(Function):
    """dX_l = Σ_c w[…, c, l] · dout_c,   dw[…, c, l] = ⟨dout_c, X_l⟩, summed over tokens where w is static."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        # as one: without gradients dynamo leaves ctx out where arguments are as many as the parameters named here
        ctx, w, *X = given
        ctx.save_for_backward(w, *X)
        return tuple(weighted_sum(X, w[..., c, :]) for c in range(w.shape[-2]))

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        w, *X = ctx.saved_tensors
        wanted, *each = ctx.needs_input_grad
        dw = None
        if wanted:
            dw = torch.stack(
                [torch.stack([row_dot(d, x) for x in X], -1) for d in dout], -2
            ).sum_to_size(w.shape)
        dX = (
            weighted_sum(dout, w[..., l]).to(x.dtype) if each[l] else None for l, x in enumerate(X)
        )
        return dw, *dX


def weighted_sum(X: Sequence[Tensor], w: Tensor) -> Tensor:
    # w[..., l, None] is never 0-d, so it lifts a bf16 source to float32 inside the multiplication, without a copy
    out = w[..., 0, None] * X[0]
    for l in range(1, len(X)):
        out.addcmul_(w[..., l, None], X[l])
    return out.to(X[0].dtype)
