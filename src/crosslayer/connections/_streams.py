"""What the methods with n streams share: their state, and the matrices of writes and readouts.

Axes: n streams; B, T and D as in `crosslayer.connection`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..connection import Connection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import NormSpec
from ..ops import collapse_streams, depth_connection
from ..sites import Site
from ..validation import check_positive

# The matrices between n streams have n² numbers, and the papers have at most 8 streams.
_MOST_STREAMS = 256


def check_stream_count(streams: int) -> None:
    """Raise a ValueError for a number of streams that is not from 1 to 256."""
    check_positive(streams=streams)
    if streams > _MOST_STREAMS:
        raise ValueError(f"streams must be at most {_MOST_STREAMS}, got {streams}")


class Streams(NamedTuple):
    """n streams: the state of hyper-connections, frac-connections and mHC-lite."""

    H: Tensor  # [B T n D]
    y: Tensor | None = None  # [B T D]: pending write ...
    beta: Tensor | None = None  # ... and its weight in each stream, [B T n] or [n]


def set_read_logits(logits: Tensor, site: Site) -> None:
    """Set the logits of pre [n] in mHC and mHC-lite: 1 at the stream of a site, −1 elsewhere."""
    logits.fill_(-1)
    logits[site.index % len(logits)] = 1


def shared_write(y: Tensor | None) -> Tensor | None:
    """A pending write as every stream gets it, [B T 1 D], from y [B T D]."""
    return None if y is None else y[..., None, :]


def write_to_streams(H: Tensor, beta: Tensor | None, outputs: int = 1) -> Tensor:
    """[I | beta]: the weights of a pending write to n streams, or I without a write.

    Args:
        H: the streams, [B T n D].
        beta: the weight of the write in each stream, [B T n] or [n]; None without a write.
        outputs: 1, or n where each stream gets another part of the write: [I | diag(beta)].

    Returns:
        [.. n n+1 1], [.. n 2n 1] with n outputs, or [n n 1] without a write.
    """
    kept = identity_weights(H.shape[-2], H)
    if beta is None:
        return kept
    added = beta[..., None, None] if outputs == 1 else beta.diag_embed()[..., None]
    return join_columns(kept, added)


def read_sum(state: Streams, norms: tuple[NormSpec, ...]) -> tuple[tuple[Tensor, ...], Streams]:
    """`fused_read` of a readout that sums n streams, after the pending write."""
    H = depth_connection(state.H, shared_write(state.y), state.beta)
    return (collapse_streams(H, None, *norms),), Streams(H)


def sum_readout_weights(write: Tensor, n: int) -> MixingWeights:
    """`mixing_weights` of a readout that sums n streams, after the pending write.

    Args:
        write: of `write_to_streams`, [.. n n+1 1] or [n n 1].
        n: the number of streams.
    """
    return MixingWeights(write, torch.ones_like(write[..., :1, :n, :]), identity_weights(n, write))


def streams_memory_traffic(connection: Connection[Any], n: int) -> float:
    """The traffic of n streams: the streams and y are read, the streams and inputs are written."""
    read = n + 1 if connection.site.index else 1  # n equal copies of the embedding are read once
    written = 0 if connection.is_readout else n
    return read + written + len(connection.ports)
