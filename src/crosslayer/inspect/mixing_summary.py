"""What a method mixes with: its own weights over what it mixes, site by site.

α of DenseFormer (Figures 5, 8, 15) and A of MUDD (Figures 12, 13) over blocks' outputs, p of
attention residuals and of MGR's pool over their sources, A_m, A_r and B of hyper-connections over
streams. These are the matrices of `Connection.mixing_weights`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .moments import RunningMoments
from .observation import SiteVisit, input_labels, site_label


@dataclass
class SiteMixing:
    """The weights of one site over tokens. A weight a channel is averaged over channels.

    Attributes:
        label: of the site.
        inputs: labels of the inputs.
        read_mean: of what each input reads, [inputs parts].
        read_std: over tokens, [inputs parts].
        carry_mean: of what each part of the next state keeps, [next parts parts].
        carry_std: over tokens.
        write_mean: of the pending write in each part, [parts]; empty at the first site.
        write_std: over tokens.
        part_norms: mean over tokens of ‖part‖ after the pending write, [parts].
    """

    label: str
    inputs: list[str]
    read_mean: Tensor
    read_std: Tensor
    carry_mean: Tensor
    carry_std: Tensor
    write_mean: Tensor
    write_std: Tensor
    part_norms: Tensor


class MixingAnalysis:
    """Mean and standard deviation of every site's weights. `result` gives a `SiteMixing` each."""

    def __init__(self) -> None:
        self._moments: dict[str, dict[str, RunningMoments]] = {}
        self._inputs: dict[str, list[str]] = {}

    def visit_site(self, visit: SiteVisit) -> None:
        weights = visit.connection.mixing_weights(visit.state)
        label = site_label(visit.connection)
        read, carry = (per_token_weights(matrix) for matrix in (weights.read, weights.carry))
        write = per_token_weights(weights.write)
        written = torch.einsum("...oi,nid->nod", write, visit.parts)
        parts = len(visit.connection.state_parts(visit.state))
        values = {
            "read": read,
            "carry": carry,
            "write": write[..., parts:].sum(-1),
            "norm": written.norm(dim=-1),
        }
        if label not in self._moments:
            self._moments[label] = {name: RunningMoments() for name in values}
            self._inputs[label] = input_labels(visit.connection, read.shape[-2])
        for name, value in values.items():
            self._moments[label][name].add(value)

    def result(self) -> list[SiteMixing]:
        """One `SiteMixing` a site, in the order of depth."""
        sites = []
        for label, moments in self._moments.items():
            read, carry, write = moments["read"], moments["carry"], moments["write"]
            sites.append(
                SiteMixing(
                    label=label,
                    inputs=self._inputs[label],
                    read_mean=read.mean,
                    read_std=read.std,
                    carry_mean=carry.mean,
                    carry_std=carry.std,
                    write_mean=write.mean,
                    write_std=write.std,
                    part_norms=moments["norm"].mean,
                )
            )
        return sites


def per_token_weights(weights: Tensor) -> Tensor:
    """[out in K] or [1 N out in K] -> [1 | N out in], averaged over channels."""
    if weights.dim() == 3:
        weights = weights[None]
    return weights.flatten(0, -4).float().mean(-1)
