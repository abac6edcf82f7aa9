"""Views of finished runs: loss against speed, and against an option of the connection."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...spec import all_options, connection_name, make
from ..figures_training import LineSeries, draw_line_series
from ..run_groups import (
    RunGroup,
    backbone_of,
    describe_depth,
    execution_note,
    find_baseline_group,
)
from ..training import is_number
from ..training_summary import GroupedRuns
from .section import FigurePanels
from .view import TrainingView, finished_groups, loss_measure, mean_line, series_lines, split_data

# a number of the result, a title, and the name of an axis
_SPEEDS = (
    ("tokens_per_second", "training speed", "training, tokens (images) per second"),
    ("inference_speed", "inference speed", "inference, examples per second"),
)


@split_data
def _speed_panels(runs: GroupedRuns) -> FigurePanels:
    finished = finished_groups(runs)
    groups = [group for group in finished if not execution_note(finished, group)]
    if len(groups) < 2:
        return []
    loss_field, y_title = loss_measure(groups)
    baseline = next((g for g in groups if g.first.connection == "prenorm"), groups[0])
    depths = {describe_depth(group) for group in groups}
    panels: FigurePanels = []
    for speed, name, _ in _SPEEDS:
        unit = baseline.mean(speed)
        known = [group for group in groups if math.isfinite(group.mean(speed))]
        if len(known) < 2 or not unit > 0:
            continue
        lines = series_lines(
            known,
            partial(_relative_speed, speed, unit),
            loss_field,
            partial(_depth_note, len(depths) > 1),
        )
        draw = partial(
            draw_line_series, lines=lines, axis_titles=(f"{name}, {baseline.label} = 1", y_title)
        )
        panels.append((name, draw))
    return panels


def _relative_speed(speed: str, unit: float, group: RunGroup) -> float:
    return group.mean(speed) / unit


def _depth_note(are_several: bool, group: RunGroup) -> str:
    """The number of layers, where the groups have several."""
    return str(group.first.settings.get("layers", "?")) if are_several else ""


def _connection_options(group: RunGroup) -> dict[str, Any]:
    """The connection's options, defaults included; none of an unknown one."""
    try:
        spec = make(group.first.connection)
    except ValueError:
        return {}
    return all_options(spec)


@split_data
def _option_panels(runs: GroupedRuns) -> FigurePanels:
    """Loss and speeds against each option of a method in which groups of one backbone differ."""
    groups = finished_groups(runs)
    options = {group.label: _connection_options(group) for group in groups}
    methods: dict[str, list[RunGroup]] = {}
    for group in groups:
        methods.setdefault(connection_name(group.first.connection), []).append(group)
    panels: FigurePanels = []
    for members in methods.values():
        for name in options[members[0].label]:
            rows = _split_by_other_options(members, options, name)
            if rows:
                panels += _panels_of_option(groups, rows, options, name)
    return panels


def _split_by_other_options(
    members: Sequence[RunGroup], options: dict[str, dict[str, Any]], name: str
) -> dict[str, list[RunGroup]]:
    """Groups with several numbers for an option, by what else describes them.

    This is their depth and those other options that differ between any of them.
    """
    members = [group for group in members if is_number(options[group.label].get(name))]
    if not members:
        return {}
    others = {
        key
        for key in options[members[0].label]
        if key != name and len({repr(options[group.label].get(key)) for group in members}) > 1
    }
    gathered: dict[tuple[str, str], list[RunGroup]] = {}
    for group in members:
        words = [f"{key}={options[group.label].get(key)}" for key in sorted(others)]
        width = group.first.settings.get("dim", "?")
        label = ", ".join([f"{describe_depth(group)} of {width}", *words])
        gathered.setdefault((backbone_of(group), label), []).append(group)
    return {
        label: sorted(row, key=lambda group: options[group.label][name])
        for (_, label), row in gathered.items()
        if len({options[group.label][name] for group in row}) > 1
    }


def _panels_of_option(
    groups: Sequence[RunGroup],
    rows: dict[str, list[RunGroup]],
    options: dict[str, dict[str, Any]],
    name: str,
) -> FigurePanels:
    loss_field, y_title = loss_measure(groups)
    panels: FigurePanels = []
    for measure, title, axis in ((loss_field, y_title, y_title), *_SPEEDS):
        lines = []
        for number, (label, row) in enumerate(rows.items()):
            known = [group for group in row if group.values(measure)]
            if measure != loss_field:  # a speed
                known = [group for group in known if not execution_note(groups, group)]
            if not known:
                continue
            x = [options[group.label][name] for group in known]
            lines.append(mean_line(label, known, number, x, measure))
            baseline = find_baseline_group(groups, row[0])
            if baseline is not None and baseline.values(measure):
                level = [baseline.mean(measure)] * 2
                lines.append(LineSeries("", number, [x[0], x[-1]], level, style="--"))
        if lines:
            draw = partial(draw_line_series, lines=lines, axis_titles=(name, axis))
            panels.append((f"{title} and {name}", draw))
    return panels


VIEWS = [
    TrainingView(
        "speeds",
        "Loss against speed",
        "Left: training; right: inference, the fastest evaluation. Both relative to pre-norm; "
        "right and below is better. Lines join different sizes of one method, with their numbers "
        "of layers. Runs that were executed otherwise than pre-norm's are left out. DenseFormer, "
        "Figures 3, 4a, 4b and 14; MUDD, Figure 9.",
        "two finished runs with the same data",
        _speed_panels,
    ),
    TrainingView(
        "options",
        "Loss and speed against an option",
        "For each option of a method in which runs of one backbone differ, like dilation and "
        "period. Dashed lines are pre-norm. Speeds of runs that were executed otherwise than "
        "pre-norm's are left out. DenseFormer, Figures 11 and 12.",
        "finished runs of one method that differ in one numeric option",
        _option_panels,
    ),
]
