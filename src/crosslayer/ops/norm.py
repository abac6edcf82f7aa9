"""The pending write and the norm after it."""

from torch import Tensor

from ..norms import NormSpec, add_write, apply_norm
from .dispatch import kernel_op


@kernel_op
def add_norm(h: Tensor, y: Tensor | None, norm: NormSpec | None = None) -> tuple[Tensor, Tensor]:
    """h' = h + y where a write is pending, and its norm where one follows, else h' again.

    h, y: [B T D].  ->  [B T D] twice, in h's dtype; normed in float32.  Moves 4·D elements a token.
    """
    h = add_write(h, y)
    return h, apply_norm(h, norm)
