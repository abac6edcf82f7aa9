"""Sinkhorn's normalisation of a matrix to a doubly stochastic one."""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .dispatch import kernel_op


@kernel_op
def sinkhorn(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """Alternate normalising rows and columns of exp(logits), columns last: every column sums to 1 but for eps.

    Softmax over the last axis, + eps, then / (sum over rows + eps); each of the other rounds divides by the sums over
    columns, then over rows. Differentiated through every round: a backward that takes the result as converged is wrong.

    logits: [… n n] float32.  ->  the same shape.
    """
    return Sinkhorn.apply(logits, rounds, eps)


class Sinkhorn(Function):
    """M' = M/s, s = Σ M + eps:   dM = (dM' − Σ dM' M')/s, for every division, last to first; then the softmax's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        # the matrices' axes first: torch adds up the planes of a tensor many times as fast as rows of n numbers
        P = logits.movedim((-2, -1), (0, 1)).contiguous().softmax(1)
        M, divisions = P + eps, []
        for axis in (0, *(1, 0) * (rounds - 1)):
            s = M.sum(axis, keepdim=True).add_(eps)
            M = M / s
            divisions += [s, M]
        ctx.save_for_backward(P, *divisions)
        return M.movedim((0, 1), (-2, -1)).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dM: Tensor) -> tuple[Tensor, None, None]:
        P, *divisions = ctx.saved_tensors
        d = dM.movedim((-2, -1), (0, 1)).contiguous()
        axes = (0, *(1, 0) * (len(divisions) // 4))
        for axis, s, M in reversed(list(zip(axes, divisions[::2], divisions[1::2], strict=True))):
            d = (d - (d * M).sum(axis, keepdim=True)).div_(s)
        d = P * (d - (P * d).sum(1, keepdim=True))
        return d.movedim((0, 1), (-2, -1)), None, None
