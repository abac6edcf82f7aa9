"""Sinkhorn's normalisation of a matrix to a doubly stochastic one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .dispatch import kernel_op
from .manual_backward import definition_gradients, run_function, separate_outputs


@kernel_op
def sinkhorn(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """Normalise rows and columns of exp(logits) alternately; each column sums to 1 up to eps.

    The first round is a softmax over the last axis, + eps, then / (sum over rows + eps). Each of
    the other rounds divides by the sums over columns + eps, then by the sums over rows + eps. The
    backward differentiates every round; one that assumes convergence would be wrong.

    Args:
        logits: [… n n] float32.
        rounds: at least 1.
        eps: added to every sum. Without it (0, or less than the smallest normal number) sums can
            underflow to 0, so the rounds are computed with logarithms.

    Returns:
        [… n n].
    """
    if not sums_stay_positive(logits, rounds, eps):
        return _sinkhorn_of_logarithms(logits, rounds)
    return run_function(_Sinkhorn, logits, rounds, eps)


def sums_stay_positive(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> bool:
    """Whether eps keeps every sum of `sinkhorn` above 0, whatever the logits are."""
    return eps >= torch.finfo(logits.dtype).tiny


def _sinkhorn_of_logarithms(logits: Tensor, rounds: int) -> Tensor:
    """`sinkhorn` without eps: a division by a sum subtracts the sum's logarithm."""
    log_M = logits.log_softmax(-1)
    for axis in _summed_axes(rounds, row=-2, column=-1):
        log_M = log_M - log_M.logsumexp(axis, keepdim=True)
    return log_M.exp()


class _Sinkhorn(Function):
    """M' = M/s, s = Σ M + eps:   dM = (dM' − Σ dM' M')/s for each division, last to first."""

    @staticmethod
    def definition(logits: Tensor, rounds: int, eps: float) -> Tensor:
        M = logits.softmax(-1) + eps
        for axis in _summed_axes(rounds, row=-2, column=-1):
            M = M / (M.sum(axis, keepdim=True) + eps)
        return M

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        M = _row_softmax(logits) + eps
        divisions = []
        for axis in _summed_axes(rounds, row=0, column=1):
            s = M.sum(axis, keepdim=True).add_(eps)
            M = M / s
            divisions += [s, M]
        ctx.rounds = rounds
        ctx.eps = eps
        ctx.save_for_backward(logits, *divisions)
        return separate_outputs(M.movedim((0, 1), (-2, -1)).contiguous())[0]

    @staticmethod
    def backward(ctx: Any, dM: Tensor) -> tuple[Tensor, None, None]:
        logits, *divisions = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            return definition_gradients(_Sinkhorn.definition, (logits, ctx.rounds, ctx.eps), dM)
        d = dM.movedim((-2, -1), (0, 1)).contiguous()
        axes = _summed_axes(ctx.rounds, row=0, column=1)
        steps = list(zip(axes, divisions[::2], divisions[1::2], strict=True))
        for axis, s, M in reversed(steps):
            d = (d - (d * M).sum(axis, keepdim=True)).div_(s)
        P = _row_softmax(logits)
        d = P * (d - (P * d).sum(1, keepdim=True))
        return d.movedim((0, 1), (-2, -1)), None, None


def _summed_axes(rounds: int, row: int, column: int) -> list[int]:
    """The axis that each division sums over; the softmax was the first sum over columns."""
    return [row] + [column, row] * (rounds - 1)


def _row_softmax(logits: Tensor) -> Tensor:
    """The softmax of each row, with the matrix axes in front: [… n n] -> [n n …].

    torch sums planes of a tensor many times as fast as rows of n numbers.
    """
    return logits.movedim((-2, -1), (0, 1)).contiguous().softmax(1)
