"""Views of finished runs of several sizes: power laws, depth, mixtures of experts, tasks."""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy

from ...number_texts import format_size
from ...plotting import STYLES, mark_level
from ..figures_training import LineSeries, ValueBar, draw_bars, draw_line_series
from ..run_groups import RunGroup, describe_depth, find_baseline_group, has_experts, split_by_series
from ..training_summary import (
    GroupedRuns,
    ScalingSeries,
    mean_accuracy,
    measure_scaling,
    shared_tasks,
)
from .section import FigurePanels
from .view import (
    TrainingView,
    finished_groups,
    has_different_sizes,
    mean_line,
    series_lines,
    split_data,
)

_OTHER_DEPTHS = "other depths"
_SIMILAR_SIZE = 0.15  # the largest relative difference of sizes that are compared as equal


@split_data
def _size_panels(runs: GroupedRuns) -> FigurePanels:
    scaling = measure_scaling(runs.groups)
    if not any(series.power_law for series in scaling):
        return []
    lines = []
    for number, series in enumerate(scaling):
        lines += _law_lines(series, number)
    axis_titles = ("parameters", "validation loss (nats)")
    panels: FigurePanels = [
        ("loss and power laws", partial(_draw_sizes, lines=lines, axis_titles=axis_titles)),
        *_gap_panels(scaling),
    ]
    bars = [
        ValueBar(one.label, number, one.multiplier.value, one.multiplier.low, one.multiplier.high)
        for number, one in enumerate(scaling)
        if one.multiplier is not None
    ]
    if bars:
        draw = partial(draw_bars, bars=bars, x_title="times as much compute at equal loss")
        panels.append(("compute multiplier", partial(draw, form=".2f")))
    return panels


def _law_lines(series: ScalingSeries, number: int) -> list[LineSeries]:
    """The losses of a series, and its power law through them."""
    (points,) = series_lines(series.groups, attrgetter("size"), "valid_loss", lambda group: "")
    points.look_number = number
    points.is_joined = False
    if series.power_law is None:
        return [points]
    law = series.power_law
    points.label += f": exponent {law.b:.3g}"
    x = numpy.geomspace(points.x[0] / 1.1, points.x[-1] * 1.1, 60).tolist()
    return [points, LineSeries("", number, x, [law.predict(size) for size in x], style="-")]


def _draw_sizes(
    axes: Any, lines: Sequence[LineSeries], axis_titles: tuple[str, str], level: float = math.nan
) -> None:
    draw_line_series(axes, lines, axis_titles, log_x=True)
    marked = [line for line in lines if line.is_marked]
    sizes = sorted({x for line in marked for x in line.x})
    ticks: list[float] = []
    for size in sizes:  # none beside another
        if not ticks or math.log(size / ticks[-1]) > 0.12 * math.log(sizes[-1] / sizes[0]):
            ticks.append(size)
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.set_xticks([], minor=True)
    if math.isfinite(level):
        mark_level(axes.axhline, level)


def _gap_panels(scaling: Sequence[ScalingSeries]) -> FigurePanels:
    """Loss minus that of the main series at the same size: ΔL of MUDD, Figure 3."""
    main = next(series for series in scaling if series.is_main)
    lines = []
    for number, series in enumerate(scaling):
        x = []
        gaps = []
        low = []
        high = []
        for group in series.groups:
            reference = _of_similar_size(main.groups, group.size)
            if series is main or reference is None:
                continue
            gap = _loss_gaps(group, reference)
            x.append(group.size)
            gaps.append(statistics.fmean(gap))
            low.append(min(gap))
            high.append(max(gap))
        if x:
            lines.append(LineSeries(series.label, number, x, gaps, low, high, is_marked=True))
    if not lines:
        return []
    axis_titles = ("parameters", f"ΔL: loss minus that of {main.label} (nats)")
    return [("gaps", partial(_draw_sizes, lines=lines, axis_titles=axis_titles, level=0.0))]


def _of_similar_size(groups: Sequence[RunGroup], size: float) -> RunGroup | None:
    nearest = min(groups, key=lambda group: abs(math.log(group.size / size)))
    similar = abs(nearest.size / size - 1) <= _SIMILAR_SIZE
    return nearest if similar else None


def _loss_gaps(group: RunGroup, reference: RunGroup) -> list[float]:
    """Differences seed by seed, or that of the means where no seed is shared."""
    losses = {run.seed: run.number("valid_loss") for run in reference.runs}
    gaps = [run.number("valid_loss") - losses[run.seed] for run in group.runs if run.seed in losses]
    return gaps or [group.mean("valid_loss") - reference.mean("valid_loss")]


@split_data
def _depth_panels(runs: GroupedRuns) -> FigurePanels:
    groups = [group for group in finished_groups(runs) if not has_experts(group)]
    if len({describe_depth(group) for group in groups}) < 2:
        return []
    by_size: list[LineSeries] = []
    by_depth: list[LineSeries] = []
    for number, (label, members) in enumerate(split_by_series(groups).items()):
        for lines, parts, x_of in (
            (by_size, _split_by_depth(members), attrgetter("size")),
            (by_depth, _split_by_size(members), _depth_of),
        ):
            for place, (title, part) in enumerate(parts.items()):
                part.sort(key=x_of)
                x = [x_of(group) for group in part]
                line = mean_line(f"{label}, {title}", part, number, x, "valid_loss")
                line.style = STYLES[place % len(STYLES)]
                line.is_joined = has_different_sizes(part)
                if title == _OTHER_DEPTHS:
                    line.notes = [f"{_depth_of(group):g}" for group in part]
                lines.append(line)
    loss = "validation loss (nats)"
    return [
        ("against size", partial(_draw_sizes, lines=by_size, axis_titles=("parameters", loss))),
        ("against depth", partial(draw_line_series, lines=by_depth, axis_titles=("layers", loss))),
    ]


def _depth_of(group: RunGroup) -> float:
    return group.first.settings.get("layers", math.nan)


def _split_by_depth(members: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Groups of each depth that several have, and all others together."""
    parts: dict[str, list[RunGroup]] = {}
    for group in members:
        parts.setdefault(describe_depth(group), []).append(group)
    alone = {title for title, part in parts.items() if len(part) == 1}
    others = [group for group in members if describe_depth(group) in alone]
    common = {title: part for title, part in parts.items() if title not in alone}
    return common | ({_OTHER_DEPTHS: others} if others else {})


def _split_by_size(members: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Groups of similar sizes; all together where no two of them have similar sizes."""
    parts: list[list[RunGroup]] = []
    for group in sorted(members, key=attrgetter("size")):
        if parts and group.size <= (1 + _SIMILAR_SIZE) * parts[-1][0].size:
            parts[-1].append(group)
        else:
            parts.append([group])
    similar = [part for part in parts if len(part) > 1]
    if not similar:
        return {"all sizes": list(members)}
    return {f"about {format_size(part[0].size)}": part for part in similar}


@split_data
def _expert_panels(runs: GroupedRuns) -> FigurePanels:
    groups = finished_groups(runs)
    if len({has_experts(group) for group in groups}) < 2:
        return []
    bars = []
    for group in sorted(groups, key=has_experts):
        with_experts = has_experts(group)
        baseline = find_baseline_group(groups, group)
        label = f"{group.label}\n{'MoE' if with_experts else 'dense'}"
        if baseline is not None and baseline is not group:
            gaps = _loss_gaps(group, baseline)
            label += f", ΔL {statistics.fmean(gaps):+.4f}"
        losses = group.values("valid_loss")
        ends = (min(losses), max(losses)) if len(losses) > 1 else (math.nan, math.nan)
        bars.append(ValueBar(label, int(with_experts), group.mean("valid_loss"), *ends))
    values = [bar.value for bar in bars]
    start = min(values) - 0.5 * (max(values) - min(values))  # the differences are small
    draw = partial(draw_bars, bars=bars, x_title="validation loss (nats)", form=".4f", start=start)
    return [("dense and mixtures of experts", draw)]


def _task_size_panels(runs: GroupedRuns) -> FigurePanels:
    tasks = shared_tasks(runs.groups)
    evaluated = [group for group in runs.groups if math.isfinite(mean_accuracy(group, tasks))]
    groups = [group for group in evaluated if math.isfinite(group.size)]  # of finished runs
    if len(groups) < 2:
        return []
    lines = []
    for number, (label, members) in enumerate(split_by_series(groups).items()):
        members.sort(key=attrgetter("size"))
        x = [group.size for group in members]
        y = [mean_accuracy(group, tasks) for group in members]
        is_joined = has_different_sizes(members)
        lines.append(LineSeries(label, number, x, y, is_marked=True, is_joined=is_joined))
    axis_titles = ("parameters", f"mean accuracy over {len(tasks)} tasks")
    return [("accuracy", partial(_draw_sizes, lines=lines, axis_titles=axis_titles))]


VIEWS = [
    TrainingView(
        "sizes",
        "Loss against size",
        "Power laws L = a · N^(−b), the gaps at equal size, and how many times as much compute "
        "(6 × parameters × tokens) pre-norm needs for the same loss, with its 95 % interval. MUDD, "
        "Figure 3.",
        "finished runs of one arm or connection in two sizes, with the same data",
        _size_panels,
    ),
    TrainingView(
        "depths",
        "Loss against depth",
        "Left: lines of models with the same number of layers; the others, with their numbers of "
        "layers, are joined too. Right: models of about the same size. MUDD, Figure 4.",
        "finished runs with different numbers of layers and the same data",
        _depth_panels,
    ),
    TrainingView(
        "experts",
        "Dense models and mixtures of experts",
        "The final loss, and ΔL to pre-norm with the same backbone. MUDD, Figure 5.",
        "finished runs with and without experts, with the same data",
        _expert_panels,
    ),
    TrainingView(
        "task_sizes",
        "Accuracy against size",
        "Mean over the tasks that all runs were evaluated on, of the last evaluation. MUDD, Figure "
        "1.",
        "two runs with what `crosslayer eval RUN/model --tasks … --out RUN/eval` writes",
        _task_size_panels,
    ),
]
