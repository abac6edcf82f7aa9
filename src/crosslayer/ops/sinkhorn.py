"""Sinkhorn's normalisation of a matrix to a doubly stochastic one."""

from torch import Tensor

from .dispatch import kernel


@kernel("sinkhorn")
def sinkhorn(logits: Tensor, rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """Alternate normalising rows and columns of exp(logits), columns last: every column sums to 1 but for eps.

    Softmax over the last axis, + eps, then / (sum over rows + eps); each of the other rounds divides by the sums over
    columns, then over rows. Differentiated through every round: a backward that takes the result as converged is wrong.

    logits: [… n n] float32.  ->  the same shape.
    """
    M = logits.softmax(-1) + eps
    M = M / (M.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        M = M / (M.sum(-1, keepdim=True) + eps)
        M = M / (M.sum(-2, keepdim=True) + eps)
    return M
