"""A view of training: a picture of run folders, drawn without a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..figures_training import LineSeries
from ..run_groups import RunGroup, join_titles, split_by_data, split_by_series
from ..training_summary import GroupedRuns
from .section import FigurePanels, ReportPicture


@dataclass(frozen=True)
class TrainingView(ReportPicture):
    """A picture of runs.

    Attributes:
        needs: what runs must have for it.
        draw_panels: the panels; empty where the runs do not have what it needs.
    """

    needs: str
    draw_panels: Callable[[GroupedRuns], FigurePanels]


def split_data(
    draw_panels: Callable[[GroupedRuns], FigurePanels],
) -> Callable[[GroupedRuns], FigurePanels]:
    """The panels of runs with the same data, one after another: losses on others say nothing."""

    def draw_parts(runs: GroupedRuns) -> FigurePanels:
        panels: FigurePanels = []
        for title, part in split_by_data(runs.groups):
            for name, panel in draw_panels(replace(runs, groups=part)):
                panels.append((join_titles(name, title), panel))
        return panels

    return draw_parts


def finished_groups(runs: GroupedRuns) -> list[RunGroup]:
    """The groups with a final loss."""
    return [group for group in runs.groups if group.values("valid_loss")]


def loss_measure(groups: Sequence[RunGroup]) -> tuple[str, str]:
    """The metric that the groups are compared by, and its name: perplexity where all have it."""
    if all(len(group.values("perplexity")) == len(group.runs) for group in groups):
        return "perplexity", "validation perplexity"
    return "valid_loss", "validation loss (nats)"


def has_different_sizes(groups: Sequence[RunGroup]) -> bool:
    """Whether a line may join the groups: no two have the same size."""
    return len({group.size for group in groups}) == len(groups)


def series_lines(
    groups: Sequence[RunGroup],
    x_of: Callable[[RunGroup], float],
    measure: str,
    note_of: Callable[[RunGroup], str],
) -> list[LineSeries]:
    """A line a series, through its groups by x, with the range over seeds.

    Groups of which two have the same size are points.
    """
    lines = []
    for number, (label, of_series) in enumerate(split_by_series(groups).items()):
        members = [group for group in of_series if math.isfinite(x_of(group))]
        members.sort(key=x_of)
        if members:
            x = [x_of(group) for group in members]
            line = mean_line(label, members, number, x, measure)
            line.is_joined = has_different_sizes(members)
            line.notes = [note_of(group) for group in members]
            lines.append(line)
    return lines


def mean_line(
    label: str, groups: Sequence[RunGroup], number: int, x: Sequence[float], measure: str
) -> LineSeries:
    """Marked points of a measure of groups, with the range over seeds where there are several."""
    several = any(len(group.runs) > 1 for group in groups)
    return LineSeries(
        label=label,
        look_number=number,
        x=x,
        y=[group.mean(measure) for group in groups],
        low=[min(group.values(measure)) for group in groups] if several else (),
        high=[max(group.values(measure)) for group in groups] if several else (),
        is_marked=True,
    )
