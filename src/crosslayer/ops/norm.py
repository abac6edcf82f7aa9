"""A pending write and the norm after it."""

from torch import Tensor

from ..norms import NormSpec, add_write, apply_norm
from .dispatch import kernel_op


@kernel_op
def add_norm(h: Tensor, y: Tensor | None, norm: NormSpec | None = None) -> tuple[Tensor, Tensor]:
    """h' = h + y, or h where y is None, and norm(h').

    Moves 4·D elements a token.

    Args:
        h: [B T D].
        y: the pending write [B T D]; None where no write is pending.
        norm: computed in float32 or wider; None for no norm.

    Returns:
        h' and norm(h'), [B T D] each in h's dtype, or in y's where that is wider.
    """
    h = add_write(h, y)
    return h, apply_norm(h, norm)
