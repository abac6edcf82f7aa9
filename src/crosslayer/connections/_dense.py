"""What DenseFormer and MUDD share: each block reads averages of the outputs of blocks before it.

    X_0 the embedding, X_i the output of block i
    h the stream inside the block, which starts as an average and ends as the block's output

A site where a layer opens averages some of X_0 .. X_i, its sources. The methods differ in the
weights, and in how many averages there are.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..connection import Connection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..sites import Site
from ..validation import check_positive


class History(NamedTuple):
    """The outputs of the blocks so far, and the stream inside the block that runs."""

    # X_0 .. X_i, one [B T D] for each finished block; some of MUDD's variants store them normed
    X: tuple[Tensor, ...]
    h: Tensor  # [B T D]: the stream inside the block
    y: Tensor | None = None  # [B T D]: pending write


@dataclass(frozen=True)
class DepthAverages:
    """After which blocks there is an average, and over which blocks' outputs.

    Args:
        dilation: k; after block i only blocks j ≡ i mod k are averaged.
        period: p; there is an average where p divides i, or after the last block alone for "last".
        window: of these, only those among the last `window` blocks up to i, and the embedding;
            None for all of these.

    Raises:
        ValueError: the dilation or the period is not positive, or the dilation leaves only one of
            the last `window` blocks, the embedding apart.
    """

    dilation: int
    period: int | Literal["last"]
    window: int | None

    def __post_init__(self) -> None:
        check_positive(dilation=self.dilation)
        if self.period != "last":
            check_positive(period=self.period)
        if self.dilation > 1 and self.window is not None and self.window <= self.dilation:
            raise ValueError(
                f"dilation={self.dilation} leaves one of the last {self.window} blocks to average; "
                f"average over at least the last {self.dilation + 1}, or leave the dilation out"
            )

    def averaged_blocks(self, site: Site) -> tuple[int, ...]:
        """The blocks j whose outputs X_j are averaged at a site; none at one without an average."""
        if site.layer == 0 or not site.opens_layer:
            return ()
        return self._averaged_after(site.layer, site.layers)

    def blocks_averaged_later(self, site: Site) -> set[int]:
        """The blocks whose outputs are averaged at a site of a later layer."""
        later: set[int] = set()
        for i in range(site.layer + 1, site.layers + 1):
            later |= set(self._averaged_after(i, site.layers))
        return later

    def _averaged_after(self, i: int, layers: int) -> tuple[int, ...]:
        """The blocks that are averaged after block i of `layers`."""
        has_average = i == layers if self.period == "last" else i % self.period == 0
        if not has_average:
            return ()
        blocks = list(range(i % self.dilation, i + 1, self.dilation))
        if self.window is not None:
            blocks = [j for j in blocks if j == 0 or j > i - self.window]
        return tuple(blocks)


def check_block_count(X: tuple[Tensor, ...], site: Site) -> None:
    """Raise a ValueError unless as many blocks are finished as there are layers before a site."""
    if len(X) != site.layer + 1:
        raise ValueError(
            f"a connection of layer {site.layer} runs after {len(X) - 1} layers; connections run "
            "in the order of their plan"
        )


def exits_early(state: History, sources: tuple[int, ...]) -> bool:
    """Whether fewer blocks have run than the readout averages; it then reads the last one alone."""
    return len(state.X) < sources[-1]


def replace_blocks(
    X: tuple[Tensor, ...], block_numbers: tuple[int, ...], blocks: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """X with `blocks` at these numbers: the sources that an op passed on."""
    replaced = list(X)
    for j, x in zip(block_numbers, blocks, strict=True):
        replaced[j] = x
    return tuple(replaced)


def weights_inside_block(state: History) -> MixingWeights:
    """`mixing_weights` of a site inside a block: y joins h, h is read, and all parts are kept."""
    kept = identity_weights(len(state.X) + 1, state.h)
    write = kept if state.y is None else join_columns(kept, kept[:, -1:])
    return MixingWeights(write, read=kept[-1:], carry=kept)


def dense_memory_traffic(
    connection: Connection[History],
    averages: DepthAverages,
    sources: tuple[int, ...],
    averages_stream: bool = True,
) -> float:
    """`memory_traffic` of a site.

    Args:
        connection: of the site.
        averages: of the model.
        sources: the blocks whose outputs the site averages; none where it averages none.
        averages_stream: whether the stream inside the block starts as an average, or as X_i.
    """
    if not sources:
        return Connection.memory_traffic(connection)
    # Reads all sources but X_i, and h and y, whose sum is X_i. Writes the ports' inputs, and X_i
    # and the stream where a later site reads them.
    writes_block = 1 if sources[-1] in averages.blocks_averaged_later(connection.site) else 0
    stream_is_block = writes_block and not averages_stream  # one tensor, written once
    writes_stream = 0 if connection.is_readout or stream_is_block else 1
    return len(sources) + 1 + writes_block + writes_stream + len(connection.ports)


def dense_backward_traffic(
    connection: Connection[History], averages: DepthAverages, sources: tuple[int, ...]
) -> float:
    """`backward_memory_traffic` of a site; arguments as of `dense_memory_traffic`."""
    if not sources:
        return Connection.backward_memory_traffic(connection)
    # Reads the gradients of the ports' inputs and of the stream, all sources, and the gradients of
    # those that a later site averages too. Writes the gradients of all.
    reads_stream = 0 if connection.is_readout else 1
    later_sources = averages.blocks_averaged_later(connection.site) & set(sources)
    return len(connection.ports) + reads_stream + 2 * len(sources) + len(later_sources)
