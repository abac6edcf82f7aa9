"""The gates of writes: β of multi-gate residuals, and the weights of writes of other methods.

Paper: Multi-Gate Residuals (arXiv 2605.23259, Figures 7 and 13). Its inversion (Eq. 16) divides by
1 − β and rests on small gates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .moments import RunningMoments, TokenSample
from .observation import SiteVisit

GATE_BINS = 100
# Quantiles and histograms are of at most this many tokens and values, all other numbers of all.
SAMPLED_TOKENS = 16_384
SAMPLED_VALUES = 2**20
SMALL_GATE = 0.1  # the paper's "majority falling below 0.1"
GateLimits = tuple[float, float] | None


@dataclass
class GateStatistics:
    """The values of a write's gate over tokens and streams.

    Attributes:
        name: the field of the state, like "beta".
        writer: label of the sub-layer whose output is gated.
        limits: the connection's `gate_limits`.
        mean: of all values.
        below_tenth: the share of values below 0.1.
        quartiles: minimum, 25, 50, 75 % and maximum, [5].
        whiskers: the smallest and the largest value within 1.5 interquartile ranges of the box, as
            in Tukey's box plots. Values beyond are outliers.
        edges: of the bins, the same for all gates of a model: from the smallest value or limit to
            the largest. [`GATE_BINS` + 1]
        counts: of sampled values in each bin.
    """

    name: str
    writer: str
    limits: GateLimits
    mean: float
    below_tenth: float
    quartiles: Tensor
    whiskers: tuple[float, float]
    edges: Tensor
    counts: Tensor


def share_bins(gates: Sequence[GateStatistics]) -> list[GateStatistics]:
    """The same statistics with histograms over the same bins.

    Where the bins differ, the values of a bin are taken as evenly spread over it.
    """
    low = min(gate.edges[0].item() for gate in gates)
    high = max(gate.edges[-1].item() for gate in gates)
    edges = torch.linspace(low, high, GATE_BINS + 1, dtype=torch.float64)
    shared = []
    for gate in gates:
        below = np.concatenate([[0.0], gate.counts.double().cumsum(0).numpy()])
        counts = np.diff(np.interp(edges.numpy(), gate.edges.double().numpy(), below))
        shared.append(replace(gate, edges=edges, counts=torch.from_numpy(counts)))
    return shared


class _GateRecord:
    def __init__(self, name: str, writer: str, limits: GateLimits, channels: int):
        self.name = name
        self.writer = writer
        self.limits = limits
        self.moments = RunningMoments()
        self.small = RunningMoments()
        self.minimum = float("inf")
        self.maximum = -float("inf")
        self.sample = TokenSample(min(SAMPLED_TOKENS, max(1, SAMPLED_VALUES // channels)))

    def add(self, values: Tensor) -> None:
        self.moments.add(values)
        self.small.add(values < SMALL_GATE)
        self.minimum = min(self.minimum, values.min().item())
        self.maximum = max(self.maximum, values.max().item())
        self.sample.add(values)

    def statistics(self, edges: Tensor) -> GateStatistics:
        values = self.sample.values.flatten()
        low, median, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        reach = 1.5 * (high - low)
        inside = values[(values >= low - reach) & (values <= high + reach)]
        return GateStatistics(
            name=self.name,
            writer=self.writer,
            limits=self.limits,
            mean=self.moments.mean.mean().item(),
            below_tenth=self.small.mean.mean().item(),
            quartiles=torch.tensor([self.minimum, low, median, high, self.maximum]).double(),
            whiskers=(inside.min().item(), inside.max().item()),
            edges=edges,
            counts=torch.histogram(values, edges).hist,
        )


class GateRecorder:
    """Values of every site's gates. `result` gives a `GateStatistics` for each site with one."""

    def __init__(self) -> None:
        self._records: dict[str, _GateRecord] = {}

    def add_gates(self, visit: SiteVisit, label: str, writer: str) -> None:
        """label: of the site.  writer: of the sub-layer before it."""
        name = visit.connection.gate_field
        gate = getattr(visit.state, name, None)
        if gate is not None:
            channels = gate.shape[-1]
            record = _GateRecord(name, writer, visit.connection.gate_limits, channels)
            record = self._records.setdefault(label, record)
            record.add(gate.float().reshape(-1, channels))

    def result(self) -> dict[str, GateStatistics]:
        """By the label of the site."""
        if not self._records:
            return {}
        records = self._records.values()
        ends = [
            end
            for record in records
            for end in (record.minimum, record.maximum, *(record.limits or ()))
        ]
        low, high = min(ends), max(ends)
        if low == high:  # bins need an interval that is not empty
            low = low - 0.5
            high = high + 0.5
        edges = torch.linspace(low, high, GATE_BINS + 1, dtype=torch.float64)
        return {label: record.statistics(edges) for label, record in self._records.items()}
