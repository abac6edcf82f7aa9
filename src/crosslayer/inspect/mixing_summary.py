"""The weights of a method over what it mixes, site by site.

α of DenseFormer (Figures 5, 8, 15) and A of MUDD (Figures 12, 13) over blocks' outputs, p of
attention residuals and of MGR's pool over their sources, A_m, A_r and B of hyper-connections and
β of MGR over streams. These are the matrices of `Connection.mixing_weights`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..connection import Connection, find_connections
from ..connections._dense import History
from ..connections.denseformer import DenseFormer
from ..connections.mudd import Mudd
from ..sites import SPLIT_PORT_NAMES
from .moments import RunningMoments
from .observation import SiteVisit, input_labels, site_label


@dataclass
class SiteMixing:
    """The weights of one site over tokens. Weights per channel are averaged over channels.

    Attributes:
        label: of the site.
        inputs: labels of the inputs, or of their fractions, like "3.attn [1]". Where q, k and v are
            mixed separately, the last is r: the stream that the attention's output joins.
        parts: labels of what is mixed, once the pending write is applied.
        is_mix: the site has weights over several parts. False where it reads one part unchanged.
        read_mean: of what each input reads, [inputs parts].
        read_std: over tokens, [inputs parts].
        carry_mean: of what each part of the next state keeps, [next parts parts].
        keep_mean: of what each written part takes from the parts before, [parts parts].
        write_mean: of the pending write in each part, [parts]; empty at the first site.
        part_norms: mean over tokens of ‖part‖, [parts].
    """

    label: str
    inputs: list[str]
    parts: list[str]
    is_mix: bool
    read_mean: Tensor
    read_std: Tensor
    carry_mean: Tensor
    keep_mean: Tensor
    write_mean: Tensor
    part_norms: Tensor


class MixingAnalysis:
    """Means of every site's weights, and the deviation of what it reads: a `SiteMixing` each."""

    def __init__(self) -> None:
        self._moments: dict[str, dict[str, RunningMoments]] = {}
        self._names: dict[str, tuple[list[str], list[str], bool]] = {}

    def visit_site(self, visit: SiteVisit) -> None:
        connection = visit.connection
        label = site_label(connection)
        read = per_token_weights(visit.weights.read)
        carry = per_token_weights(visit.weights.carry)
        inputs = _input_labels(connection, read.shape[-2])
        if connection.splits_inputs:
            # r is the next state's stream, its last part. It stands after q, k and v, in the place
            # of the MLP of a parallel block, which reads r too.
            apart = len(visit.split_ports)
            stream = carry[:, -1:]
            tokens = max(len(read), len(stream))  # either may be the same for all
            ways = [rows.expand(tokens, -1, -1) for rows in (read[:, :apart], stream)]
            read = torch.cat(ways, 1)
            inputs = [*inputs[:apart], f"{connection.site.layer}.r"]
        write = per_token_weights(visit.weights.write)
        parts = len(connection.state_parts(visit.state))
        values = {
            "read": read,
            "carry": carry,
            "keep": write[..., :parts],
            "write": write[..., parts:].sum(-1),
            "norm": visit.written.norm(dim=-1),
        }
        if label not in self._moments:
            self._moments[label] = {name: RunningMoments() for name in values}
            names = _part_labels(visit)
            self._names[label] = inputs, names, _is_mix(visit)
        for name, value in values.items():
            self._moments[label][name].add(value)

    def result(self) -> list[SiteMixing]:
        """One `SiteMixing` a site, in the order of depth."""
        sites = []
        for label, moments in self._moments.items():
            inputs, parts, is_mix = self._names[label]
            read = moments["read"]
            sites.append(
                SiteMixing(
                    label=label,
                    inputs=inputs,
                    parts=parts,
                    is_mix=is_mix,
                    read_mean=read.mean,
                    read_std=read.std,
                    carry_mean=moments["carry"].mean,
                    keep_mean=moments["keep"].mean,
                    write_mean=moments["write"].mean,
                    part_norms=moments["norm"].mean,
                )
            )
        return sites


def _input_labels(connection: Connection[Any], rows: int) -> list[str]:
    """A label for each row of a read: an input, or a fraction of one."""
    labels = input_labels(connection, rows // connection.fractions)
    return label_fractions(labels, connection.fractions)


def way_of_input(label: str, earlier_ways: Collection[str]) -> str:
    """The way of an input: "q" of "3.q". The readout is of r where q, k, v and r are mixed
    separately. Inputs of other models have no ways, and are called "inputs".

    Args:
        label: of the input.
        earlier_ways: of the model's inputs before this one.
    """
    port = label.partition(".")[2]
    if port in {*SPLIT_PORT_NAMES, "r"}:
        return port
    return "r" if "r" in earlier_ways else "inputs"


def label_fractions(inputs: list[str], fractions: int) -> list[str]:
    """A label for each fraction of each input, like "2.mlp [0]"; of a whole one its own."""
    if fractions == 1:
        return inputs
    return [f"{label} [{part}]" for label in inputs for part in range(fractions)]


def _part_labels(visit: SiteVisit) -> list[str]:
    """Like "X_3" for the output of block 3, "stream 1", or "v_2" of attention residuals."""
    connection = visit.connection
    label = "stream {}" if connection.parts_are_streams else connection.part_label
    labels = [label.format(number) for number in range(visit.written.shape[1])]
    if isinstance(visit.state, History) and not connection.opens_layer:
        labels[-1] = "stream"  # inside a block
    return labels


def _is_mix(visit: SiteVisit) -> bool:
    if isinstance(visit.state, History):
        return bool(averaged_sources(visit.connection))
    return visit.written.shape[1] > 1


def averaged_sources(connection: Connection[Any]) -> tuple[int, ...]:
    """The blocks j whose outputs X_j this site averages; none where it averages none."""
    return connection.sources if isinstance(connection, DenseFormer | Mudd) else ()


@dataclass
class MixPattern:
    """Which weights over blocks' outputs exist (DenseFormer, Figures 1b and 2; MUDD's SW-n).

    Attributes:
        rows: labels of what follows each block, "Y_1" to "Y_L".
        columns: labels of the blocks' outputs, "X_0" to "X_L".
        learned: X_j has a learned weight in Y_i, [L L+1].
        weights: the number of learned weights, each way counted.
    """

    rows: list[str]
    columns: list[str]
    learned: Tensor
    weights: int


def find_mix_pattern(model: nn.Module) -> MixPattern | None:
    """The pattern of a model with averages over blocks' outputs; None for other methods.

    Args:
        model: connected with denseformer or mudd, trained or not. It is not run.
    """
    readers = [site for site in find_connections(model) if site.opens_layer and site.site.index]
    if not any(averaged_sources(site) for site in readers):
        return None
    blocks = len(readers)
    learned = torch.zeros(blocks, blocks + 1, dtype=torch.bool)
    weights = 0
    for row, site in zip(learned, readers, strict=True):
        sources = averaged_sources(site)
        row[list(sources)] = True
        mixtures = len(site.a) if isinstance(site, Mudd) and site.a is not None else 1
        weights += len(sources) * mixtures
    return MixPattern(
        rows=[f"Y_{number}" for number in range(1, blocks + 1)],
        columns=[f"X_{number}" for number in range(blocks + 1)],
        learned=learned,
        weights=weights,
    )


def per_token_weights(weights: Tensor) -> Tensor:
    """[out in K] or [N out in K] -> [1 | N out in], averaged over channels."""
    if weights.dim() == 3:
        weights = weights[None]
    return weights.float().mean(-1)
