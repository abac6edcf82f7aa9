"""Weighted sums over depth.

Each source has one reader: an op over dense sources returns them beside its result, and the next
reader takes those. So each backward receives the gradient of all later readers, and adds its own to
it. If all readers took the same tensor, autograd would sum their gradients in separate passes over
whole tensors.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm
from .dispatch import kernel_op
from .manual_backward import run_function, separate_outputs
from .products import row_dot

# The index of a mixture and its norm, or None for the mixture itself.
MixOutputs = tuple[tuple[int, NormSpec | None], ...]


@kernel_op
def depth_mix(
    X: tuple[Tensor, ...], w: Tensor, outputs: MixOutputs | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """C mixtures of L sources, m_c = Σ_l w[…, c, l] · X_l, or their norms.

    Moves (L + O)·D elements a token for O outputs, and the weights; (3L + O)·D backward.

    Args:
        X: the L sources, [B T D] each.
        w: [C L] static, or [B T C L] for each token; float32. The sums are computed in its dtype.
        outputs: what to return: pairs of c and the norm of m_c, or None for m_c itself. All
            mixtures by default.

    Returns:
        The outputs, [B T D] each in X's dtype; and the sources for their next reader.

    Raises:
        ValueError: the weights are for another number of sources.
    """
    if len(X) != w.shape[-1]:
        raise ValueError(f"depth_mix: {len(X)} sources but weights for {w.shape[-1]}")
    C = w.shape[-2]
    results = run_function(_DepthMix, w, *X)
    mixed = results[:C]
    passed = results[C:]
    if outputs is None:
        return mixed, pass_sources_on(X, passed)
    return tuple(apply_norm(mixed[c], norm) for c, norm in outputs), pass_sources_on(X, passed)


class _DepthMix(Function):
    """dX_l = dX'_l + Σ_c w[…, c, l] · dout_c,   dw[…, c, l] = ⟨dout_c, X_l⟩.

    dw is summed over tokens if w is static. X' are the sources passed on.
    """

    @staticmethod
    def definition(w: Tensor, *X: Tensor) -> tuple[Tensor, ...]:
        return (*(plain_weighted_sum(X, w[..., c, :]) for c in range(w.shape[-2])), *X)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: without gradients dynamo omits ctx if it can match the arguments to named
        # parameters.
        ctx, w, *X = args
        ctx.set_materialize_grads(False)  # a source without a later reader has no gradient
        ctx.save_for_backward(w, *X)
        mixed = [weighted_sum(X, w[..., c, :]) for c in range(w.shape[-2])]
        return *separate_outputs(*mixed), *X

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        w, *X = ctx.saved_tensors
        C = w.shape[-2]
        later = gradients[C:]
        if all(d is None for d in gradients[:C]):
            return None, *later
        dout = [X[0].new_zeros(X[0].shape) if d is None else d for d in gradients[:C]]
        needs_dw, *needs_dX = ctx.needs_input_grad
        dw = None
        if needs_dw:
            rows = [torch.stack([row_dot(d, x) for x in X], -1) for d in dout]
            dw = torch.stack(rows, -2).sum_to_size(w.shape)
        dX: list[Tensor | None] = []
        for l, x in enumerate(X):
            dx = add_weighted_sum(later[l], dout, w[..., l]).to(x.dtype) if needs_dX[l] else None
            dX.append(dx)
        return dw, *dX


def pass_sources_on(X: Sequence[Tensor], passed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the next reader takes: each source as a Function passed it on.

    A source without gradient stays itself. Passed on, it would have one, as all outputs of a
    Function do.
    """
    return tuple(p if x.requires_grad else x for x, p in zip(X, passed, strict=True))


def plain_weighted_sum(X: Sequence[Tensor], w: Tensor) -> Tensor:
    """Σ_l w[…, l] · X_l, the definition of `weighted_sum`."""
    products = [w[..., l, None] * x for l, x in enumerate(X)]
    return reduce(torch.add, products).to(X[0].dtype)


def weighted_sum(X: Sequence[Tensor], w: Tensor) -> Tensor:
    """Σ_l w[…, l] · X_l, summed in w's dtype. X: L x [B T D].  w: [L] or [B T L].  ->  [B T D]."""
    return add_weighted_sum(None, X, w).to(X[0].dtype)


def add_weighted_sum(start: Tensor | None, X: Sequence[Tensor], w: Tensor) -> Tensor:
    """start + Σ_l w[…, l] · X_l, a new tensor in w's dtype.

    Args:
        start: [B T D]; None for zero.
        X: L tensors [B T D].
        w: [L] or [B T L].
    """
    # `start` is a gradient, much larger than the products. Where the sum has its dtype, each sum
    # with a product would be rounded to it, so it is added last.
    starts_large = start is not None and start.dtype == w.dtype and len(X) > 1
    # w[..., l, None] is never 0-d, so the product is computed in float32 without a float32 copy of
    # a bf16 source.
    if start is None or starts_large:
        out = w[..., 0, None] * X[0]
    else:
        out = torch.addcmul(start, w[..., 0, None], X[0])
    for l in range(1, len(X)):
        out.addcmul_(w[..., l, None], X[l])
    if start is not None and starts_large:
        out.add_(start)
    return out
