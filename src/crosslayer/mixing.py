"""One read of a connection as matrices: what each part of the state contributes to what comes next.

The parts of a state are the tensors [B T D] that a read mixes. With its coefficients held at the
values that this state gives them, a read is linear in the parts and in the pending write:

    written = norms(write @ [parts | y])     the pending write applied
    inputs  = read @ written                 what the sub-layer's ports receive, before their norms
    next    = carry @ written                the parts of the state that `read` returns

`crosslayer.inspect` draws these matrices and multiplies them over depth.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .norms import NormSpec


class MixingWeights(NamedTuple):
    """The matrices of one read. Each is [out in K], or [B T out in K] where tokens differ.

    K is 1 where a weight holds for all channels, or the width where each channel has another.
    """

    write: Tensor  # out: the written parts; in: the parts of the state, then the pending write
    read: Tensor  # out: the inputs, one for all ports or one for each port; in: the written parts
    carry: Tensor  # out: the parts of the next state; in: the written parts
    norms: tuple[NormSpec | None, ...] = ()  # of the written parts; empty for none at all


def identity_weights(n: int, like: Tensor) -> Tensor:
    """The identity [n n 1] on the device of `like`: float32, or float64 where `like` is float64."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.eye(n, dtype=dtype, device=like.device)[..., None]


def part_weights(parts: int, index: int, like: Tensor) -> Tensor:
    """A row that takes part `index` alone: [1 parts 1]."""
    return identity_weights(parts, like)[index : index + 1]


def join_rows(*blocks: Tensor) -> Tensor:
    """Weights of the same columns beneath each other: the rows of one, then those of the next.

    Args:
        blocks: [.. rows columns K] each. Leading axes and K are broadcast.

    Returns:
        [.. all rows, columns, K].
    """
    return torch.cat(_broadcast_weights(blocks), -3)


def join_columns(*blocks: Tensor) -> Tensor:
    """Weights of the same rows beside each other.

    Args:
        blocks: [.. rows columns K] each. Leading axes and K are broadcast.

    Returns:
        [.. rows, all columns, K].
    """
    return torch.cat(_broadcast_weights(blocks), -2)


def _broadcast_weights(blocks: tuple[Tensor, ...]) -> list[Tensor]:
    """The blocks with equal leading axes and an equal K, and their own rows and columns."""
    leads = torch.broadcast_shapes(*(block.shape[:-3] for block in blocks))
    K = max(block.shape[-1] for block in blocks)
    expanded = []
    for block in blocks:
        rows, columns = block.shape[-3:-1]
        expanded.append(block.expand(*leads, rows, columns, K))
    return expanded
