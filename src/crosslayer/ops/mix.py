"""Weighted sums over depth."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm
from .dispatch import kernel_op
from .manual_backward import run_function
from .products import row_dot


@kernel_op
def depth_mix(
    X: tuple[Tensor, ...], w: Tensor, norms: tuple[tuple[int, NormSpec], ...] = ()
) -> tuple[Tensor, ...]:
    """C mixtures of L sources, out_c = Σ_l w[…, c, l] · X_l, and the norms of some of them.

    Moves (L + C)·D elements a token, D more a norm, and the weights.

    Args:
        X: the L sources, [B T D] each.
        w: [C L] static, or [B T C L] for each token; float32. The sums are computed in its dtype.
        norms: pairs of the index of a mixture and its norm.

    Returns:
        C mixtures and len(norms) normed mixtures, [B T D] each in X's dtype.
    """
    if len(X) != w.shape[-1]:
        raise ValueError(f"depth_mix: {len(X)} sources but weights for {w.shape[-1]}")
    mixtures = run_function(_DepthMix, w, *X)
    return (*mixtures, *(apply_norm(mixtures[c], norm) for c, norm in norms))


class _DepthMix(Function):
    """dX_l = Σ_c w[…, c, l] · dout_c,   dw[…, c, l] = ⟨dout_c, X_l⟩.

    dw is summed over tokens if w is static.
    """

    @staticmethod
    def definition(w: Tensor, *X: Tensor) -> tuple[Tensor, ...]:
        return tuple(mixture(X, w[..., c, :]) for c in range(w.shape[-2]))

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: without gradients dynamo omits ctx if it can match the arguments to named
        # parameters.
        ctx, w, *X = args
        ctx.save_for_backward(w, *X)
        return tuple(weighted_sum(X, w[..., c, :]) for c in range(w.shape[-2]))

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        w, *X = ctx.saved_tensors
        needs_dw, *needs_dX = ctx.needs_input_grad
        dw = None
        if needs_dw:
            rows = [torch.stack([row_dot(d, x) for x in X], -1) for d in dout]
            dw = torch.stack(rows, -2).sum_to_size(w.shape)
        dX: list[Tensor | None] = []
        for l, x in enumerate(X):
            dX.append(weighted_sum(dout, w[..., l]).to(x.dtype) if needs_dX[l] else None)
        return dw, *dX


def mixture(X: Sequence[Tensor], w: Tensor) -> Tensor:
    """Σ_l w[…, l] · X_l, the definition of `weighted_sum`."""
    products = [w[..., l, None] * x for l, x in enumerate(X)]
    return reduce(torch.add, products).to(X[0].dtype)


def weighted_sum(X: Sequence[Tensor], w: Tensor) -> Tensor:
    """Σ_l w[…, l] · X_l, summed in w's dtype. X: L x [B T D].  w: [L] or [B T L].  ->  [B T D]."""
    # w[..., l, None] is never 0-d, so the product is computed in float32 without a float32 copy of
    # a bf16 source.
    out = w[..., 0, None] * X[0]
    for l in range(1, len(X)):
        out.addcmul_(w[..., l, None], X[l])
    return out.to(X[0].dtype)
