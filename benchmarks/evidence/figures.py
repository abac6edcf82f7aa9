"""The figures of the evidence pages. What each shows is data; a digest of it is in its file."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.evidence.claims import add_losses
from benchmarks.evidence.studies import BASELINE, Study
from benchmarks.evidence.tables import difference_to_baseline, judge_difference
from crosslayer.files import short_digest
from crosslayer.inspect.figures_training import (
    LineSeries,
    draw_line_series,
    focus_on_end,
)
from crosslayer.inspect.training import loss_at_cost
from crosslayer.intervals import Interval, average_curves
from crosslayer.plotting import HUES, DrawPanel, mark_level, render_figure
from crosslayer.train.run_state import RunResult

# one for each colour of the palette; pre-norm is black; the last one has the first colour, dashed
MAIN_ARMS = ("denseformer", "mudd", "hyper", "attnres", "mgr", "resi_dual", BASELINE, "mhc")
LOSS = "validation loss (nats a token)"
DIFFERENCE = "loss minus pre-norm's (nats a token)"
TOKENS = "training tokens (millions)"
TIME_AXES = {
    "eager": "training time (pre-norm's run = 1)",
    "compiled": "training time, compiled (pre-norm's run = 1)",
}
MOST_SHOWN = 1.0  # nats a token, of a difference on the way
VERDICT_MARKS = {
    "better": (HUES[0], "o"),
    "worse": (HUES[1], "s"),
    "equal": ("#000000", "v"),
    "cannot tell": ("#7F7F7F", "D"),
}
Curve = list[tuple[float, float]]
# a run's cost at a step, by the arm's name
CostAtStep = Callable[[str, int, float], float | None]
# what follows the lines of a panel
FinishPanel = Callable[[Any, Sequence[LineSeries]], None]


@dataclass
class Figure:
    """One figure.

    Attributes:
        data: all that it shows.
        panels: titles and functions that draw.
        width: of a panel, in inches.
        height: of a panel, in inches.
    """

    data: Any
    panels: list[tuple[str, DrawPanel]]
    width: float = 5.2
    height: float = 4.4

    @property
    def digest(self) -> str:
        """Identifies what is shown, whatever the version of the library that draws it."""
        text = json.dumps(self.data, default=asdict)
        return f"<!-- data {short_digest(text)} -->"

    def render(self) -> bytes:
        """The content of its SVG file, with its digest."""
        svg = render_figure(self.panels, self.width, self.height)["svg"]
        return svg + f"{self.digest}\n".encode()


def study_figures(study: Study) -> dict[str, Figure]:
    """The figures of one study by name, as far as its results go."""
    run = next(iter(study.comparison.results.runs))
    _, data, _, _ = study.comparison.recipe.settings()
    last_step = run.curve[-1][0]

    def tokens(name: str, seed: int, step: float) -> float:
        return step * data.batch * data.context / 1e6

    variant = "compiled" if "compiled" in study.speeds else "eager"

    def time(name: str, seed: int, step: float) -> float | None:
        of_step = study.seed_step_time(name, seed, variant)
        return None if of_step is None else step * of_step / last_step

    costs: list[tuple[str, CostAtStep]] = [(TOKENS, tokens), (TIME_AXES[variant], time)]
    figures = {}
    for file, unit, make_lines, finish in (
        ("curves", LOSS, _loss_lines, focus_on_end),
        ("differences", DIFFERENCE, _difference_lines, _mark_zero),
    ):
        panels = []
        shown = [(name, make_lines(study, cost)) for name, cost in costs]
        shown = [(name, lines) for name, lines in shown if lines]
        for name, lines in shown:
            is_last = name == shown[-1][0]
            panels.append(("", _draw_panel(lines, (name, unit), finish, is_last)))
        if panels:
            figures[file] = Figure(shown, panels)
    intervals = _all_differences(study)
    if intervals:
        height = 1.2 + 0.2 * len(intervals)
        figures["intervals"] = Figure(intervals, [("", _draw_intervals(intervals))], 8.0, height)
    return figures


def _curve(run: RunResult, name: str, cost: CostAtStep) -> Curve:
    points = [(cost(name, run.seed, step), loss) for step, loss in run.curve]
    return [(place, loss) for place, loss in points if place is not None]


def _loss_lines(study: Study, cost: CostAtStep) -> list[LineSeries]:
    lines = []
    for colour, name in enumerate(MAIN_ARMS):
        curves = [_curve(run, name, cost) for run in study.runs(name).values()]
        if any(curves):
            mean = average_curves(curves)
            lines.append(LineSeries(name, colour, mean.x, mean.mean))
    return lines


def _difference_lines(study: Study, cost: CostAtStep) -> list[LineSeries]:
    """Differences at the places of pre-norm's curve, with 95 % intervals."""
    lines = []
    curves = {
        name: {seed: _curve(run, name, cost) for seed, run in study.compared_runs(name).items()}
        for name in MAIN_ARMS
    }
    baseline = {seed: curve for seed, curve in curves[BASELINE].items() if curve}
    places = len(next(iter(baseline.values()))) if baseline else 0
    for colour, name in enumerate(MAIN_ARMS):
        if name == BASELINE:
            continue
        x = []
        intervals = []
        for place in range(places):
            at = {seed: curve[place][0] for seed, curve in baseline.items()}
            references = {seed: -curve[place][1] for seed, curve in baseline.items()}
            losses = _losses_at(curves[name], at)
            if study.plan.paired:
                estimate = add_losses([losses, references], [])
            else:
                estimate = add_losses([losses], [references])
            if estimate is not None:
                x.append(at[max(at)])
                intervals.append(estimate.interval)
        if x:
            lines.append(_interval_line(name, colour, x, intervals))
    return lines


def _losses_at(curves: dict[int, Curve], at: dict[int, float]) -> dict[int, float]:
    """The loss of each seed's curve at that seed's cost, where the curve reaches as far."""
    losses = {}
    for seed, curve in curves.items():
        if curve and seed in at:
            costs, heights = zip(*curve, strict=True)
            loss = loss_at_cost(costs, heights, at[seed])
            if loss is not None:
                losses[seed] = loss
    return losses


def _interval_line(name: str, colour: int, x: list[float], intervals: list[Interval]) -> LineSeries:
    mean = [interval.mean for interval in intervals]
    if any(math.isnan(interval.low) for interval in intervals):
        return LineSeries(name, colour, x, mean)
    low = [i.low for i in intervals]
    high = [i.high for i in intervals]
    return LineSeries(name, colour, x, mean, low, high)


def _draw_panel(
    lines: Sequence[LineSeries], names: tuple[str, str], finish: FinishPanel, with_legend: bool
) -> DrawPanel:
    def draw(axes: Any) -> None:
        draw_line_series(axes, lines, names)
        axes.get_legend().remove()
        axes.set_xlim(left=0)
        finish(axes, lines)
        if with_legend:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return draw


def _mark_zero(axes: Any, lines: Sequence[LineSeries]) -> None:
    """A line at zero. Larger differences than `MOST_SHOWN`, of few early steps, are cut off."""
    mark_level(axes.axhline, 0.0)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, -MOST_SHOWN), min(top, MOST_SHOWN))


def _all_differences(study: Study) -> list[tuple[str, Interval]]:
    """Every arm's difference to pre-norm, the best last."""
    known = [(name, difference_to_baseline(study, name)) for name in study.arms]
    rows = [(name, found) for name, found in known if found is not None]
    rows = [(name, found) for name, found in rows if not math.isnan(found.low)]
    return sorted(rows, key=lambda row: -row[1].mean)


def _draw_intervals(rows: Sequence[tuple[str, Interval]]) -> DrawPanel:
    verdicts = [judge_difference(found) for _, found in rows]

    def draw(axes: Any) -> None:
        for verdict, (colour, mark) in VERDICT_MARKS.items():
            places = [place for place, found in enumerate(verdicts) if found == verdict]
            means = [rows[place][1].mean for place in places]
            ends = [
                [rows[place][1].mean - rows[place][1].low for place in places],
                [rows[place][1].high - rows[place][1].mean for place in places],
            ]
            if places:
                axes.errorbar(
                    means, places, xerr=ends, fmt=mark, color=colour, capsize=3, label=verdict
                )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=10)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        mark_level(axes.axvline, 0.0)
        axes.set_xlabel(f"{DIFFERENCE}, 95 % interval")
        axes.grid(True, axis="x")
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
        axes.legend(fontsize=10, **above)

    return draw
