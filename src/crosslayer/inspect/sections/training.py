"""Views of training over time: losses, tasks, and what a loss costs."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...intervals import MeanCurve, average_curves
from ...number_texts import choose_time_unit, format_duration
from ...plotting import mark_level
from ..figures_training import (
    LineSeries,
    ValueBar,
    draw_bars,
    draw_line_series,
    focus_on_end,
)
from ..run_groups import RunGroup, join_titles, split_by_backbone, split_by_shape
from ..runs import TrainingRun
from ..training import CurvePoints, find_spikes, loss_at_cost
from ..training_summary import (
    GroupedRuns,
    compared_set,
    loss_curves,
    loss_name,
    measure_speedups,
    smooth_runs,
)
from .section import FigurePanels
from .view import TrainingView, split_data

_NUMBER_NAMES = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e3, "thousand "))
_MOST_CURVES = 8  # in a panel of all groups
_MOST_MARKED_POINTS = 30  # of a curve


def _count_axis(groups: Sequence[RunGroup]) -> tuple[list[float], str]:
    """What a step of each group counts on the x axis, and the axis's name.

    Tokens or images where all groups know them, else steps.
    """
    counted = [group.first.units_per_step for group in groups]
    units = {unit for _, unit in counted}
    if len(units) > 1:
        return [1.0] * len(groups), "steps"
    longest = max(
        amount * max(run.curve.last_step for run in group.runs)
        for group, (amount, _) in zip(groups, counted, strict=True)
    )
    scale, name = next((pair for pair in _NUMBER_NAMES if longest >= pair[0]), (1, ""))
    return [amount / scale for amount, _ in counted], f"{name}{units.pop()}"


def _mean_curve_line(group: RunGroup, number: int, curve: MeanCurve, per_step: float) -> LineSeries:
    """A group's mean over seeds, with its range where there are several seeds."""
    several = len(group.runs) > 1
    return LineSeries(
        label=group.label,
        look_number=number,
        x=[step * per_step for step in curve.x],
        y=curve.mean,
        low=curve.low if several else (),
        high=curve.high if several else (),
        is_marked=len(curve.x) <= _MOST_MARKED_POINTS,  # one point alone is no line
    )


def _draw_curves(axes: Any, lines: Sequence[LineSeries], axis_titles: tuple[str, str]) -> None:
    draw_line_series(axes, lines, axis_titles)
    focus_on_end(axes, lines)


def _parts_to_draw(groups: Sequence[RunGroup]) -> list[tuple[str, list[RunGroup]]]:
    """All groups in one panel, or those of each shape where they are many."""
    return split_by_shape(groups) if len(groups) > _MOST_CURVES else [("", list(groups))]


@split_data
def _loss_panels(runs: GroupedRuns) -> FigurePanels:
    groups = [group for group in runs.groups if any(run.curve.steps for run in group.runs)]
    if not groups:
        return []
    name = f"training loss, running mean ({runs.decay:g})"
    panels: FigurePanels = []
    for title, part in _parts_to_draw(groups):
        per_step, axis = _count_axis(part)
        lines = [
            _line_with_spikes(group, number, average_curves(curves), per_step[number])
            for number, (group, curves) in enumerate(
                zip(part, smooth_runs(part, runs.decay), strict=True)
            )
        ]
        panel = partial(_draw_curves, lines=lines, axis_titles=(axis, name))
        panels.append((title or "training loss", panel))
    return panels


def _line_with_spikes(
    group: RunGroup, number: int, curve: MeanCurve, per_step: float
) -> LineSeries:
    line = _mean_curve_line(group, number, curve, per_step)
    marks = []
    for run in group.runs:
        for place in find_spikes(run.curve.losses):
            step = run.curve.steps[place] * per_step
            height = loss_at_cost(line.x, line.y, step)
            marks.append((step, height))
    line.marks = [(step, height) for step, height in marks if height is not None]
    if marks:
        line.label += f" ({len(marks)} spike{'s' if len(marks) > 1 else ''})"
    return line


def _curve_panels(
    groups: Sequence[RunGroup],
    points_of: Callable[[TrainingRun], dict[str, CurvePoints]],
    y_title: str,
    draw: Callable[..., None] = draw_line_series,
) -> FigurePanels:
    """A panel for each name of the curves that `points_of` gives."""
    names: dict[str, None] = {}  # ordered
    for group in groups:
        for run in group.runs:
            names |= dict.fromkeys(points_of(run))
    panels: FigurePanels = []
    for title, part in _parts_to_draw(groups):
        per_step, axis = _count_axis(part)
        for name in names:
            lines = []
            for number, group in enumerate(part):
                curve = average_curves([points_of(run).get(name, []) for run in group.runs])
                if curve.x:
                    lines.append(_mean_curve_line(group, number, curve, per_step[number]))
            if lines:
                panel = partial(draw, lines=lines, axis_titles=(axis, y_title))
                panels.append((join_titles(name, title), panel))
    return panels


@split_data
def _valid_panels(runs: GroupedRuns) -> FigurePanels:
    return _curve_panels(
        runs.groups, lambda run: run.curve.valid, "validation loss (nats)", _draw_curves
    )


@split_data
def _accuracy_panels(runs: GroupedRuns) -> FigurePanels:
    return _curve_panels(runs.groups, lambda run: run.curve.accuracies, "accuracy")


def _task_panels(runs: GroupedRuns) -> FigurePanels:
    return [*_accuracy_panels(runs), *_curve_panels(runs.groups, lambda run: run.tasks, "accuracy")]


@split_data
def _speedup_panels(runs: GroupedRuns) -> FigurePanels:
    panels: FigurePanels = []
    bars = []
    for title, part in split_by_backbone(runs.groups):
        speedups = measure_speedups(part, runs.decay)
        if not speedups:
            continue
        valid_name = compared_set(part)
        curves = loss_curves(part, runs.decay, valid_name)
        per_step, axis = _count_axis(part)
        lines = []
        for number, (group, curve) in enumerate(zip(part, curves, strict=True)):
            speedup = speedups.get(group.label)
            if speedup is None:
                lines.append(_mean_curve_line(group, number, curve, per_step[number]))
                continue
            line = _mean_curve_line(group, number, speedup.curve, per_step[number])
            line.label += f": {speedup.times:.2f}\N{NO-BREAK SPACE}×"
            line.marks = [(speedup.step * per_step[number], speedup.loss)]
            lines.append(line)
            bars.append(ValueBar(group.label, number, speedup.times))
        baselines = dict.fromkeys(speedup.baseline for speedup in speedups.values())
        levels = sorted({speedup.loss for speedup in speedups.values()})
        draw = partial(
            _draw_with_levels, lines=lines, axis_titles=(axis, loss_name(valid_name)), losses=levels
        )
        panels.append((title or f"loss of {' and '.join(baselines)} reached", draw))
    if bars:
        draw = partial(draw_bars, bars=bars, x_title="times fewer tokens to the baseline's loss")
        panels.append(("tokens to equal loss", partial(draw, form=".2f")))
    return panels


def _draw_with_levels(
    axes: Any,
    lines: Sequence[LineSeries],
    axis_titles: tuple[str, str],
    losses: Sequence[float] = (),
    times: Sequence[float] = (),
) -> None:
    _draw_curves(axes, lines, axis_titles)
    for loss in losses:
        mark_level(axes.axhline, loss)
    for time in times:
        mark_level(axes.axvline, time)


@split_data
def _time_panels(runs: GroupedRuns) -> FigurePanels:
    panels: FigurePanels = []
    for title, part in split_by_shape(runs.groups):
        valid_name = compared_set(part)
        curves = loss_curves(part, runs.decay, valid_name)
        lines = []
        for number, (group, curve) in enumerate(zip(part, curves, strict=True)):
            runs_of_curve = [
                run for run in group.runs if valid_name is None or run.curve.valid.get(valid_name)
            ]
            seconds = [run.seconds_at([int(step) for step in curve.x]) for run in runs_of_curve]
            means = [statistics.fmean(values) for values in zip(*seconds, strict=True)]
            line = _mean_curve_line(group, number, curve, 1.0)
            line.x = means
            if means and means[-1] > 0:
                lines.append(line)
        if not lines:
            continue
        equal_time = min(line.x[-1] for line in lines)
        scale, unit = choose_time_unit(equal_time)
        for line in lines:
            loss = loss_at_cost(line.x, line.y, equal_time)
            line.x = [value / scale for value in line.x]
            if loss is not None:
                line.label += f": {loss:.3f}"
        draw = partial(
            _draw_with_levels,
            lines=lines,
            axis_titles=(f"{unit} of training", loss_name(valid_name)),
            times=[equal_time / scale],
        )
        at = f"losses at {format_duration(equal_time)}"
        panels.append((join_titles(title, at), draw))
    return panels


VIEWS = [
    TrainingView(
        "losses",
        "Training loss",
        "A running mean, with the range over seeds as a band. Marks are spikes: losses more than "
        "five running deviations above their running mean, or not finite. Hyper-Connections, "
        "Figures 1, 5, 6, 11 and 15-18.",
        "training losses in metrics.jsonl",
        _loss_panels,
    ),
    TrainingView(
        "valid_losses",
        "Loss on each validation set",
        "The loss at every evaluation. Hyper-Connections, Figures 1, 6, 9 and 10.",
        "validation losses in metrics.jsonl or results.json",
        _valid_panels,
    ),
    TrainingView(
        "task_curves",
        "Accuracy of each task",
        "That of each evaluated checkpoint. Hyper-Connections, Figures 1, 6, 9 and 10.",
        "what `crosslayer eval MODEL --tasks … --out RUN/eval/step-1000` writes",
        _task_panels,
    ),
    TrainingView(
        "speedups",
        "Tokens to equal loss",
        "How many times fewer tokens a run needs for the final loss of pre-norm with the same "
        "backbone, data and batches (of the first run, where none is pre-norm). Hyper-Connections, "
        "Figure 1.",
        "two runs of one backbone and the same data, of which one reaches the other's final loss",
        _speedup_panels,
    ),
    TrainingView(
        "times",
        "Loss against time",
        "Time of training without evaluation. The dashed line is the end of the shortest run, "
        "where the losses of the legend are read. DenseFormer, Figure 4c.",
        "seconds in metrics.jsonl, or a finished run",
        _time_panels,
    ),
]
