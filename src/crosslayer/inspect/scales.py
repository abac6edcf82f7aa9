"""How large, how different and how changeable streams and gates are.

Papers: Multi-Gate Residuals (arXiv 2605.23259, Figures 2, 5-7, 10-13), mHC (arXiv 2512.24880:
the composite gain of residual matrices).
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .gates import GateRecorder, GateStatistics
from .mixing_summary import per_token_weights
from .moments import RunningMoments
from .observation import SiteVisit, site_label


@dataclass
class SiteScales:
    """Sizes at one site, over tokens. Parts of the state are as the site finds them.

    Attributes:
        label: of the site.
        writer: label of the sub-layer before the site, "embedding" at the first.
        opens_layer: the site opens a layer, or is the readout.
        has_streams: the parts of the state are streams that persist over depth.
        output_rms: RMS of the raw output of the sub-layer before the site; of the embedding at the
            first.
        output_largest: the three largest magnitudes in that output.
        hidden_rms: mean over tokens of the RMS of the hidden state after that output: what the site
            reads, before its norm. Where q, k and v are mixed separately, the stream r.
        hidden_largest: the three largest magnitudes in the hidden state.
        written_largest: the largest magnitude of each part once that output is written, [parts].
        stream_rms: RMS of each part of the state, [parts].
        stream_cosine: mean cosine of each two parts, [parts parts].
        stream_change: mean ‖part − part at the site before‖ / ‖part‖, [parts]; None where the site
            before had another number of parts.
        forward_gain: the largest row sum of |P|, where P is the mean over tokens of the product of
            all carry matrices so far; None where they are not square.
        backward_gain: the largest column sum of |P|; None likewise.
        gate: of the pending write, where the method has gates.
    """

    label: str
    writer: str
    opens_layer: bool
    has_streams: bool
    output_rms: float
    output_largest: list[float]
    hidden_rms: float
    hidden_largest: list[float]
    written_largest: Tensor
    stream_rms: Tensor
    stream_cosine: Tensor
    stream_change: Tensor | None
    forward_gain: float | None
    backward_gain: float | None
    gate: GateStatistics | None = None


@dataclass
class _SiteRecord:
    """What has been seen at one site.

    Attributes:
        writer, opens_layer: as in `SiteScales`.
        moments: of the values of each name.
        three_largest: magnitudes of each name.
        largest_written: magnitude in each part once the output is written, [parts].
    """

    writer: str
    opens_layer: bool
    moments: defaultdict[str, RunningMoments] = field(
        default_factory=lambda: defaultdict(RunningMoments)
    )
    three_largest: dict[str, Tensor] = field(default_factory=dict)
    largest_written: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add_magnitudes(self, name: str, values: Tensor) -> None:
        """Keep the three largest of what was seen so far and of these values."""
        found = values.abs().flatten().topk(3).values.cpu()
        before = self.three_largest.get(name, torch.zeros_like(found))
        self.three_largest[name] = torch.cat([before, found]).topk(3).values

    def add_written(self, parts: Tensor) -> None:
        """Keep the largest of each part, of [N parts D] values."""
        found = parts.abs().amax((0, -1)).cpu()
        self.largest_written = torch.maximum(self.largest_written, found)


class ScaleAnalysis:
    """Sizes of outputs, streams and gates. `result` gives a `SiteScales` a site."""

    def __init__(self) -> None:
        self._records: dict[str, _SiteRecord] = {}
        self._gates = GateRecorder()
        self._writer = "embedding"
        self._before = torch.zeros(0)
        self._product: Tensor | None = None
        self._has_streams = False

    def visit_site(self, visit: SiteVisit) -> None:
        connection = visit.connection
        state = visit.state
        label = site_label(connection)
        self._has_streams = connection.parts_are_streams
        parts = visit.parts[:, : len(connection.state_parts(state))]
        if state.y is None:
            y = visit.parts[:, : connection.fractions].flatten(-2)
            self._before = torch.zeros(0)
            self._writer = "embedding"
        else:
            y = state.y.flatten(0, -2).float()
        hidden = visit.hidden
        directions = F.normalize(parts, dim=-1)
        values = {
            "output": y.square().mean(-1),
            "hidden": hidden.square().mean(-1).sqrt(),
            "stream": parts.square().mean(-1),
            "cosine": directions @ directions.mT,
            "change": _relative_change(parts, self._before),
            "product": self._carry_product(visit),
        }
        new_record = _SiteRecord(self._writer, connection.opens_layer)
        record = self._records.setdefault(label, new_record)
        for name, value in values.items():
            if value is not None:
                record.moments[name].add(value)
        record.add_magnitudes("output", y)
        record.add_magnitudes("hidden", hidden)
        record.add_written(visit.written)
        self._before = parts
        self._gates.add_gates(visit, label, self._writer)
        self._writer = label

    def _carry_product(self, visit: SiteVisit) -> Tensor | None:
        """The product of all carry matrices so far, [1 | N parts parts]; None where not square."""
        carry = per_token_weights(visit.weights.carry)
        parts = carry.shape[-1]
        if visit.connection.site.index == 0:
            self._product = torch.eye(parts, device=carry.device)
        if self._product is None or self._product.shape[-1] != parts or carry.shape[-2] != parts:
            self._product = None
        else:
            self._product = carry @ self._product
        return self._product

    def result(self) -> list[SiteScales]:
        """One `SiteScales` a site, in the order of depth."""
        sites = []
        gates = self._gates.result()
        for label, record in self._records.items():
            moments = record.moments
            product = moments["product"].mean.abs()
            has_product = moments["product"].count > 0
            sites.append(
                SiteScales(
                    label=label,
                    writer=record.writer,
                    opens_layer=record.opens_layer,
                    has_streams=self._has_streams,
                    output_rms=moments["output"].mean.sqrt().item(),
                    output_largest=record.three_largest["output"].tolist(),
                    hidden_rms=moments["hidden"].mean.item(),
                    hidden_largest=record.three_largest["hidden"].tolist(),
                    written_largest=record.largest_written,
                    stream_rms=moments["stream"].mean.sqrt(),
                    stream_cosine=moments["cosine"].mean,
                    stream_change=moments["change"].mean if moments["change"].count else None,
                    forward_gain=product.sum(-1).max().item() if has_product else None,
                    backward_gain=product.sum(-2).max().item() if has_product else None,
                    gate=gates.get(label),
                )
            )
        return sites


def _relative_change(parts: Tensor, before: Tensor) -> Tensor | None:
    if before.shape != parts.shape:
        return None
    return (parts - before).norm(dim=-1) / parts.norm(dim=-1).clamp_min(1e-30)
