"""The report of a comparison: a table, report.md, and report.html with figures."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..files import write_text_atomic
from ..html_pages import render_notes, render_page, render_table
from ..intervals import Interval, MeanCurve, average_curves
from ..number_texts import NOT_KNOWN, format_interval, format_loss, format_mean_std, markdown_table
from ..plotting import COLOURS, HUES, line_look, mark_level, render_figure
from .compare import Comparison
from .report_notes import SAME_RATE, loss_unit_of, report_notes
from .results_table import TableRow, differences_by_step, result_table


def write_comparison_report(comparison: Comparison) -> None:
    """Write report.md and report.html to the comparison's folder."""
    write_text_atomic(comparison.folder / "report.md", markdown_report(comparison))
    write_text_atomic(comparison.folder / "report.html", _html_report(comparison))


def comparison_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The names of the table's columns, and its rows as text in the order of the columns."""
    rows = result_table(comparison)
    columns = _table_columns(comparison, rows)
    table = []
    for row in rows:
        cells = {
            "arm": row.arm,
            "parameters": f"{row.parameters:,}",
            "extra parameters": f"{row.extra:.2%}",
            "val loss": format_mean_std(row.loss, ".4f"),
            SAME_RATE: format_loss(row.loss_at_same_rate),
            "vs prenorm": format_interval(row.difference),
            _speed_unit(comparison): _format_ratio(row.relative_speed),
            "activations": _format_ratio(row.relative_activations),
            "paper": ", ".join(f"{name} {value:g}" for name, value in row.paper.items()),
        }
        for name, value in row.metrics.items():
            form = ".2f" if name.endswith("perplexity") else ".4f"
            cells[_metric_column(name)] = format_mean_std(value, form)
        table.append([cells.get(column) or NOT_KNOWN for column in columns])
    return columns, table


def _table_columns(comparison: Comparison, rows: list[TableRow]) -> list[str]:
    groups = comparison.recipe.settings().data.valid_groups
    grouped_sets = {name for names in groups.values() for name in names}
    metrics: dict[str, None] = {}  # ordered
    for row in rows:
        metrics |= dict.fromkeys(row.metrics)
    columns = ["arm", "parameters", "extra parameters", "val loss", "vs prenorm"]
    if comparison.search_rates:
        columns.append(SAME_RATE)
    columns += [_speed_unit(comparison), "activations"]
    for metric in metrics:
        # a set's own metrics, like "c4 loss", are in results.json; the table has its group's
        if metric.rpartition(" ")[0] not in grouped_sets:
            columns.append(_metric_column(metric))
    # at another scale than the paper's its results say nothing
    if comparison.results.scale == "full" and any(row.paper for row in rows):
        columns.append("paper")
    return columns


def _metric_column(metric: str) -> str:
    """The column of a metric. The table's own "val loss" is that of the first validation set."""
    return "val loss (set val)" if metric == "val loss" else metric


def _format_ratio(ratio: float | None) -> str:
    return NOT_KNOWN if ratio is None else f"{ratio:.2f}×"


def markdown_report(comparison: Comparison) -> str:
    """report.md: the table and its notes."""
    columns, table = comparison_table(comparison)
    rows = [dict(zip(columns, [f"`{arm}`", *cells], strict=True)) for arm, *cells in table]
    notes = "".join(f"- {note}\n" for note in report_notes(comparison))
    return f"# crosslayer compare\n\n{markdown_table(columns, rows)}\n\n{notes}"


def _html_report(comparison: Comparison) -> str:
    """report.html: the table, figures and the notes, in one file."""
    figures = [
        ("Validation loss during training", plot_curves),
        ("Loss against throughput", plot_tradeoff),
    ]
    if differences_by_step(comparison):
        figures.insert(1, ("Difference to pre-norm during training", plot_differences))
    if comparison.search_rates:
        figures.append(("Loss of seed 0 at each learning rate; × other seeds", plot_rates))
    charts = "".join(
        f"<div><h2>{title}</h2><figure>{render_svg(comparison, draw)}</figure></div>\n"
        for title, draw in figures
    )
    setup, *notes = report_notes(comparison)
    table = render_table(*comparison_table(comparison), "numbers")
    body = f'{table}<div class="charts">\n{charts}</div>\n{render_notes(notes)}'
    return render_page("crosslayer compare", setup, body)


def render_svg(comparison: Comparison, *plots: Callable[[Any, Comparison], None]) -> str:
    """An SVG of some of the plots below, side by side."""

    def draw(plot: Callable[[Any, Comparison], None], axes: Any) -> None:
        plot(axes, comparison)
        axes.grid(True)

    panels = [("", partial(draw, plot)) for plot in plots]
    return render_figure(panels, 6.0, 4.2)["svg"].decode()


def plot_curves(axes: Any, comparison: Comparison) -> None:
    """Validation loss against step: the mean over seeds, with their range shaded."""
    axes.set_xlabel("step")
    axes.set_ylabel(f"validation loss ({loss_unit_of(comparison)})")
    for number, arm in enumerate(comparison.arms):
        runs = comparison.finished_runs(arm).values()
        if runs:
            curve = average_curves([run.curve for run in runs])
            _draw_curve(axes, number, arm.name, curve)
    _add_legend(axes, comparison)


def plot_differences(axes: Any, comparison: Comparison) -> None:
    """Validation loss minus pre-norm's at the same step: the mean over seeds, with its 95 %
    interval shaded.

    The vertical axis shows the means after the first quarter of the steps, as earlier ones may be
    far larger, and as much of the intervals as has room in three times their range.
    """
    axes.set_xlabel("step")
    axes.set_ylabel(f"validation loss minus pre-norm's ({loss_unit_of(comparison)})")
    mark_level(axes.axhline, 0.0)
    names = [arm.name for arm in comparison.arms]
    late: list[Interval] = []
    for name, differences in differences_by_step(comparison).items():
        mean, low, high = (list(values) for values in zip(*differences.values(), strict=True))
        _draw_curve(axes, names.index(name), name, MeanCurve(list(differences), mean, low, high))
        start = max(differences) / 4
        late += [interval for step, interval in differences.items() if step > start]
    axes.set_ylim(*_limits_of_intervals(late))
    _add_legend(axes, comparison)


def _limits_of_intervals(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Limits of an axis that shows zero, all means, and what has room of their intervals."""
    means = [0.0, *(interval.mean for interval in intervals)]
    bottom, top = min(means), max(means)
    reach = top - bottom or 0.1
    ends = [end for _, *ends in intervals for end in ends if math.isfinite(end)]
    bottom = max(min([bottom, *ends]), bottom - reach)
    top = min(max([top, *ends]), top + reach)
    return bottom - 0.06 * reach, top + 0.06 * reach


def _draw_curve(axes: Any, number: int, name: str, curve: MeanCurve) -> None:
    """The line of an arm of this number, with a band from `curve.low` to `curve.high`."""
    look = _arm_look(number)
    axes.plot(curve.x, curve.mean, **look, label=name, linewidth=1.6, markersize=3)
    band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
    axes.fill_between(curve.x, curve.low, curve.high, **band)


def plot_tradeoff(axes: Any, comparison: Comparison) -> None:
    """Final loss against speed: better arms are lower and further right."""
    axes.set_xlabel(f"{comparison.recipe.task.unit} per second")
    axes.set_ylabel(f"validation loss ({loss_unit_of(comparison)})")
    names = [arm.name for arm in comparison.arms]
    rows: list[TableRow] = sorted(result_table(comparison), key=lambda row: row.speed)
    for number, row in enumerate(rows):
        point = (row.speed, row.loss.mean)
        look = _arm_look(names.index(row.arm))
        axes.errorbar(
            *point,
            yerr=row.loss.std,
            **look | {"linestyle": "none"},
            label=row.arm,
            markersize=7,
            capsize=3,
        )
        if _has_many_arms(comparison):
            continue  # their labels would overlap
        # Labels of neighbours alternate between below and above, and stand beside an error bar.
        has_bar = bool(row.loss.std)
        axes.annotate(
            row.arm,
            point,
            fontsize=9,
            color=look["color"],
            xytext=(6 if has_bar else 0, -17 if number % 2 else 9),
            textcoords="offset points",
            ha="left" if has_bar else "center",
        )
    axes.margins(x=0.2, y=0.15)
    if _has_many_arms(comparison):
        _add_legend(axes, comparison)


def plot_rates(axes: Any, comparison: Comparison) -> None:
    """Final loss of seed 0 by learning rate, from which the search chose. Other seeds are crosses.

    The axis shows the best rate of each arm and one more at least. Diverged runs are not shown.
    """
    recipe = comparison.recipe
    rates: set[float] = set()
    shown = []  # losses
    for number, arm in enumerate(recipe.arms):
        look = _arm_look(number)
        points = {}
        for factor, of_seeds in comparison.losses_by_rate(arm).items():
            lr = recipe.settings(comparison.arm_at(arm, factor)).optimization.lr
            for seed, loss in of_seeds.items():
                if seed == 0 and math.isfinite(loss):
                    points[lr] = loss
                elif math.isfinite(loss):
                    axes.plot(lr, loss, marker="x", markersize=4, color=look["color"])
                    shown.append(loss)
        if points:
            axes.plot(list(points), list(points.values()), label=arm.name, markersize=5, **look)
            rates |= points.keys()
            shown += sorted(points.values())[: 1 + len(points) // 2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(rates), [f"{lr:.2g}" for lr in sorted(rates)])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"validation loss ({loss_unit_of(comparison)})")
    if shown:
        margin = 0.08 * (max(shown) - min(shown)) or 0.1
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    _add_legend(axes, comparison)


def _arm_look(number: int) -> dict[str, str]:
    """The look of a line; the first arm's, often the baseline's, is black."""
    if number % len(COLOURS) == 0:
        return line_look(number + len(HUES))  # black follows the hues
    return line_look(number - 1)


def _has_many_arms(comparison: Comparison) -> bool:
    """Whether the arms are more than the colours: too many for names among the curves."""
    return len(comparison.arms) > len(COLOURS)


def _add_legend(axes: Any, comparison: Comparison) -> None:
    if _has_many_arms(comparison):
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    else:
        axes.legend(fontsize=9)


def _speed_unit(comparison: Comparison) -> str:
    return f"{comparison.recipe.task.unit}/s"
