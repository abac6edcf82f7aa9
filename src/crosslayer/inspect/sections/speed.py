"""Views of finished runs: loss against speed, and against an option of the connection."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...spec import default_options, make
from ..figures_training import LineSeries, draw_series, mark_level
from ..run_groups import RunGroup, describe_depth, find_baseline, split_by_backbone
from ..training_summary import TrainingRuns
from .section import Panels
from .view import TrainingView, finished_groups, loss_measure, series_lines

SPEEDS = (
    ("tokens_per_second", "training speed"),
    ("inference_speed", "inference speed"),
)


def _speed_panels(runs: TrainingRuns) -> Panels:
    groups = finished_groups(runs)
    if len(groups) < 2:
        return []
    key, y_name = loss_measure(groups)
    baseline = next((g for g in groups if g.first.connection == "prenorm"), groups[0])
    depths = {describe_depth(group) for group in groups}
    panels: Panels = []
    for speed, name in SPEEDS:
        unit = baseline.mean(speed)
        known = [group for group in groups if math.isfinite(group.mean(speed))]
        if len(known) < 2 or not unit > 0:
            continue
        lines = series_lines(
            known,
            lambda group, speed=speed, unit=unit: group.mean(speed) / unit,  # type: ignore[misc]
            key,
            lambda group: describe_depth(group) if len(depths) > 1 else "",
        )
        draw = partial(draw_series, series=lines, names=(f"{name}, {baseline.label} = 1", y_name))
        panels.append((name, draw))
    return panels


def _numeric_options(group: RunGroup) -> dict[str, float]:
    """The connection's options that are numbers, defaults included; none of an unknown one."""
    try:
        spec = make(group.first.connection)
    except ValueError:
        return {}
    options = default_options(spec.method) | spec.options
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _option_panels(runs: TrainingRuns) -> Panels:
    """Loss and speeds against each option of a method in which groups of one backbone differ."""
    panels: Panels = []
    for title, part in split_by_backbone(finished_groups(runs)):
        methods = dict.fromkeys(group.first.connection.partition("(")[0] for group in part)
        for method in methods:
            members = [g for g in part if g.first.connection.partition("(")[0] == method]
            options = {group.label: _numeric_options(group) for group in members}
            for name in options[members[0].label]:
                if len({of_group.get(name) for of_group in options.values()}) > 1:
                    panels += _panels_of_option(part, members, options, name, title)
    return panels


def _panels_of_option(
    part: Sequence[RunGroup],
    members: Sequence[RunGroup],
    options: dict[str, dict[str, float]],
    name: str,
    title: str,
) -> Panels:
    """A line for each choice of the other options that comes with several values of this one."""
    key, y_name = loss_measure(part)
    gathered: dict[str, list[RunGroup]] = {}
    for group in members:
        others = {key: value for key, value in options[group.label].items() if key != name}
        gathered.setdefault(repr(others), []).append(group)
    rows = [groups for groups in gathered.values() if len(groups) > 1]
    baseline = find_baseline(part, members[0])
    panels: Panels = []
    for measure, measure_name in ((key, y_name), *SPEEDS):
        lines: list[LineSeries] = []
        for number, groups in enumerate(rows):
            known = [group for group in groups if group.values(measure)]
            known.sort(key=lambda group: options[group.label][name])
            lines.append(
                LineSeries(
                    label=_shared_label(known),
                    colour=number,
                    x=[options[group.label][name] for group in known],
                    y=[group.mean(measure) for group in known],
                    low=[min(group.values(measure)) for group in known],
                    high=[max(group.values(measure)) for group in known],
                    points=True,
                )
            )
        if any(line.x for line in lines):
            unit = {"inference_speed": " (examples/s)", "tokens_per_second": " (per second)"}
            draw = partial(
                _draw_with_baseline,
                lines=lines,
                names=(name, measure_name + unit.get(measure, "")),
                level=baseline.mean(measure) if baseline else math.nan,
            )
            panels.append((f"{title}; {measure_name}" if title else measure_name, draw))
    return panels


def _shared_label(groups: Sequence[RunGroup]) -> str:
    return " / ".join(group.label for group in groups[:3]) + (" / …" if len(groups) > 3 else "")


def _draw_with_baseline(
    axes: Any, lines: Sequence[LineSeries], names: tuple[str, str], level: float
) -> None:
    draw_series(axes, lines, names)
    if math.isfinite(level):
        mark_level(axes, level)
        axes.annotate("pre-norm", (1, level), xycoords=("axes fraction", "data"), ha="right")


VIEWS = [
    TrainingView(
        "speeds",
        "Loss against speed",
        "Left: training; right: inference, the fastest evaluation. Both relative to pre-norm; "
        "right and below is better. Lines join groups of one method. DenseFormer, Figures 3, 4a, "
        "4b and 14; MUDD, Figure 9.",
        "two finished runs",
        _speed_panels,
    ),
    TrainingView(
        "options",
        "Loss and speed against an option",
        "For each option of a method in which runs of one backbone differ, like dilation and "
        "period. The dashed line is pre-norm. DenseFormer, Figures 11 and 12.",
        "finished runs of one method that differ in one numeric option",
        _option_panels,
    ),
]
