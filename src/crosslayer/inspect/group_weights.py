"""How the last connection's weights differ between groups of samples, like the classes of images.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, appendix E.3, Figure 12: the
distributions of β and α of the final layer over images of three classes. The paper does not say
which tokens it takes. Here a sample counts once, with the mean over its tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .mixing_summary import label_fractions, per_token_weights
from .observation import ModelInputs, SiteVisit, observe_model

# Weights whose standard deviation over all samples is smaller are the same for every sample.
_SMALLEST_DEVIATION = 1e-6


@dataclass
class GroupWeights:
    """Weights of the last sub-layer's connection, over the samples of each group.

    Attributes:
        groups: their names.
        samples: the number in each group.
        names: of the weights that differ between samples. As in the paper, parts of the state count
            from 1: "α2,0" is that of part 2 in the sub-layer's input, "α2,1" that of part 2 in part
            1 of the next state, and "β1" that of the sub-layer's output in part 1. The inputs of
            several ports are "α2,q" and so on.
        quartiles: minimum, 25, 50, 75 % and maximum, [groups weights 5].
        mean: [groups weights].
        std: [groups weights].
    """

    groups: list[str]
    samples: list[int]
    names: list[str]
    quartiles: Tensor
    mean: Tensor
    std: Tensor


class _LastWeightsAnalysis:
    """The weights of the last sub-layer's connection, a row for each sample."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def visit_site(self, visit: SiteVisit) -> None:
        connection = visit.connection
        depth = connection.site.depth
        if connection.site.index < depth - 1:
            return
        weights = visit.weights
        if connection.is_readout:
            parts = len(connection.state_parts(visit.state))
            write = per_token_weights(weights.write)[..., parts:].sum(-1)  # [N parts]
            self._add("write", visit, write, [f"β{part + 1}" for part in range(write.shape[-1])])
            return
        read = per_token_weights(weights.read)
        carry = per_token_weights(weights.carry)
        inputs = ["0"]
        if read.shape[-2] > 1:
            inputs = label_fractions(list(connection.ports), connection.fractions)
        self._add("read", visit, read.flatten(1), _alpha_names(inputs, read.shape[-1]))
        streams = [str(part + 1) for part in range(carry.shape[-2])]
        self._add("carry", visit, carry.flatten(1), _alpha_names(streams, carry.shape[-1]))

    def _add(self, kind: str, visit: SiteVisit, weights: Tensor, names: list[str]) -> None:
        """weights: [N | 1 weights]."""
        samples = visit.samples
        weights = weights.double().expand(len(samples), -1)
        sums = weights.new_zeros(int(samples.max()) + 1, weights.shape[-1])
        counts = samples.bincount()
        means = sums.index_add(0, samples, weights)[counts > 0] / counts[counts > 0, None]
        self.names[kind] = names
        self._rows.setdefault(kind, []).append(means.cpu())

    @property
    def rows(self) -> Tensor:
        """[samples weights], in the order of `names`."""
        return torch.cat([torch.cat(rows) for rows in self._rows.values()], -1)


def compare_groups(
    model: nn.Module, groups: Mapping[str, Sequence[ModelInputs]]
) -> GroupWeights | None:
    """The distributions of the last connection's weights in each group of samples.

    Args:
        model: of a family that `connect` knows.
        groups: batches of each group.

    Returns:
        None where there are no two groups, or where no weight differs between samples, as in a
        static method.
    """
    if len(groups) < 2:
        return None
    rows = []
    names: list[str] = []
    for batches in groups.values():
        analysis = _LastWeightsAnalysis()
        observe_model(model, batches, [analysis])
        rows.append(analysis.rows)
        names = [name for of_kind in analysis.names.values() for name in of_kind]
    differs = torch.cat(rows).std(0, correction=0) > _SMALLEST_DEVIATION
    if not differs.any():
        return None
    rows = [row[:, differs] for row in rows]
    quarters = torch.linspace(0, 1, 5, dtype=torch.float64)
    return GroupWeights(
        groups=list(groups),
        samples=[len(row) for row in rows],
        names=[name for name, kept in zip(names, differs.tolist(), strict=True) if kept],
        quartiles=torch.stack([row.quantile(quarters, dim=0).mT for row in rows]),
        mean=torch.stack([row.mean(0) for row in rows]),
        std=torch.stack([row.std(0, correction=0) for row in rows]),
    )


def _alpha_names(targets: list[str], parts: int) -> list[str]:
    return [f"α{part + 1},{target}" for target in targets for part in range(parts)]
