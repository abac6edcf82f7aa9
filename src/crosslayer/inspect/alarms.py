"""What looks wrong in the streams and gates of a model."""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .mixing_summary import SiteMixing
from .scales import SiteScales

# Thresholds of the alarms. No paper states them; they are where a stream or a gate does no more
# than a constant would.
_COLLAPSED_COSINE = 0.999  # mean cosine of two streams
_UNUSED_SHARE = 0.01  # a stream's weight in reads, of the largest stream's
_CONSTANT_CHANGE = 0.01  # mean ‖change‖ / ‖stream‖ over all sites
_SATURATED_GATE = 0.01  # distance of a mean gate from a limit, of the distance between the limits


@dataclass(frozen=True)
class Alarm:
    """Something that looks wrong, and the number that shows it.

    Attributes:
        label: what, and where, like "constant stream: 1".
        measure: what the number is, like "mean change a site".
        value: the number.
    """

    label: str
    measure: str
    value: float

    def __str__(self) -> str:
        return f"{self.label}, {self.measure} {self.value:.4f}"


def find_alarms(sites: list[SiteScales], reads: list[SiteMixing]) -> list[Alarm]:
    """What looks wrong: collapsed, unused and constant streams, saturated gates."""
    alarms = []
    if sites[-1].has_streams:
        streams = len(sites[-1].stream_rms)  # streams of MGR are appended at the first sites
        steady = [s for s in sites if s.stream_change is not None and len(s.stream_rms) == streams]
        if steady:
            alarms += _stream_alarms(steady)
            alarms += _unused_streams(reads, streams)
    for site in sites:
        gate = site.gate
        if gate is None or gate.limits is None:
            continue
        low, high = gate.limits
        if min(gate.mean - low, high - gate.mean) < _SATURATED_GATE * (high - low):
            label = f"saturated gate: {gate.name} of {gate.writer}'s output"
            alarms.append(Alarm(label, "mean", gate.mean))
    return alarms


def _stream_alarms(sites: list[SiteScales]) -> list[Alarm]:
    alarms = []
    cosine = torch.stack([site.stream_cosine for site in sites]).mean(0)
    changes = [site.stream_change for site in sites if site.stream_change is not None]
    assert len(changes) == len(sites)
    change = torch.stack(changes).mean(0)
    for group in _collapsed_groups(cosine):
        smallest = cosine[group][:, group].min().item()
        label = f"collapsed streams: {', '.join(map(str, group))}"
        alarms.append(Alarm(label, "smallest mean cosine", smallest))
    for stream in (change < _CONSTANT_CHANGE).nonzero().flatten().tolist():
        label = f"constant stream: {stream}"
        alarms.append(Alarm(label, "mean change a site", change[stream].item()))
    return alarms


def _collapsed_groups(cosine: Tensor) -> list[list[int]]:
    """Groups of at least two streams, which pairs of collapsed streams join."""
    groups: list[list[int]] = []
    for stream in range(len(cosine)):
        joined = [group for group in groups if cosine[stream, group].max() > _COLLAPSED_COSINE]
        apart = [group for group in groups if group not in joined]
        groups = [*apart, sorted([*chain.from_iterable(joined), stream])]
    return sorted(group for group in groups if len(group) > 1)


def _unused_streams(reads: list[SiteMixing], streams: int) -> list[Alarm]:
    """The streams that no sub-layer reads and no other stream takes from."""
    rows = []
    others = 1 - torch.eye(streams, dtype=torch.float64)
    for site in reads:
        if site.label != "readout" and site.read_mean.shape[-1] == streams:
            rows.append(site.read_mean.abs().amax(0))
            for matrix in (site.carry_mean, site.keep_mean):
                if matrix.shape == others.shape:
                    rows.append((matrix.abs() * others).amax(0))
    largest = torch.stack(rows).amax(0)
    limit = _UNUSED_SHARE * largest.max()
    return [
        Alarm(f"unused stream: {stream}", "largest weight", largest[stream].item())
        for stream in (largest < limit).nonzero().flatten().tolist()
    ]
