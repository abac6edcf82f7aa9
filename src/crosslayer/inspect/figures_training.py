"""Figures of training: lines with bands, points with names, and bars. Each draws on given axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from .figures import COLOURS

STYLES = ("-", "--", ":", "-.")  # for more lines than colours
MOST_INSIDE = 6  # labels of a legend within the axes
MOST_LABELS = 24  # of one beside them; more leave no room for the figure


@dataclass
class LineSeries:
    """One line of a figure.

    Attributes:
        label: in the legend; "" for none.
        colour: number of its colour.
        x, y: of its points.
        low, high: range over seeds at each point; empty for none.
        notes: a text at each point; empty for none.
        marks: (x, y) of further marks on it, like spikes.
        line: whether the points are joined.
        points: whether the points are marked.
        style: of the line; "" for that of its colour's number.
    """

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    notes: Sequence[str] = ()
    marks: Sequence[tuple[float, float]] = field(default_factory=list)
    line: bool = True
    points: bool = False
    style: str = ""


@dataclass
class ValueBar:
    """One bar of a figure: its value, its colour's number, and the ends of its interval."""

    label: str
    colour: int
    value: float
    low: float = math.nan
    high: float = math.nan


def draw_line_series(
    axes: Any, lines: Sequence[LineSeries], names: tuple[str, str], log_x: bool = False
) -> None:
    """Lines or points, with ranges over seeds as bands or bars.

    Args:
        axes: of matplotlib.
        lines: to draw.
        names: of the two axes, with units.
        log_x: a logarithmic axis.
    """
    if log_x:
        axes.set_xscale("log")
    for line in lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        style = line.style or STYLES[line.colour // len(COLOURS) % len(STYLES)]
        axes.plot(
            line.x,
            line.y,
            color=colour,
            label=line.label or None,
            linestyle=style if line.line else "none",
            linewidth=1.6,
            marker="o" if line.points else None,
            markersize=5,
        )
        if line.low and line.points:
            # a mean's rounding may put it a little outside
            ends = numpy.maximum(
                [numpy.subtract(line.y, line.low), numpy.subtract(line.high, line.y)], 0
            )
            axes.errorbar(line.x, line.y, ends, color=colour, linestyle="none", capsize=3)
        elif line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        for place, height in line.marks:
            axes.plot(place, height, "v", color=colour, markeredgecolor="white", markersize=9)
        _add_notes(axes, line, colour)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    labelled = sum(bool(line.label) for line in lines)
    if MOST_INSIDE < labelled <= MOST_LABELS:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    elif 0 < labelled <= MOST_INSIDE:
        axes.legend(frameon=False, fontsize=9)


def _add_notes(axes: Any, line: LineSeries, colour: str) -> None:
    for number, (x, y, note) in enumerate(zip(line.x, line.y, line.notes, strict=False)):
        # neighbours alternate between above and below
        shift = (0, -15) if number % 2 else (0, 7)
        axes.annotate(
            note,
            (x, y),
            xytext=shift,
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )


def focus_on_end(axes: Any, series: Sequence[LineSeries], share: float = 0.15) -> None:
    """Cut off the steep beginning of falling curves: the y axis ends where they are at a share of
    the x axis.
    """
    known = [line for line in series if len(line.x)]
    if not known:
        return
    place = share * max(line.x[-1] for line in known)
    top = max(float(numpy.interp(place, line.x, line.y)) for line in known)
    bottom = min(min([*line.y, *line.low]) for line in known)
    if top > bottom:
        margin = 0.06 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)


def mark_level(axes: Any, level: float, vertical: bool = False) -> None:
    """A dashed line across the axes."""
    line = axes.axvline if vertical else axes.axhline
    line(level, color="#666666", linestyle="--", linewidth=1, zorder=0)


def draw_bars(
    axes: Any, bars: Sequence[ValueBar], name: str, form: str, start: float = 0.0
) -> None:
    """Bars with their values, and their intervals where they have them.

    Args:
        axes: of matplotlib.
        bars: from left to right.
        name: of the y axis, with its unit.
        form: of the values, like ".2f".
        start: the value where bars start.
    """
    for place, bar in enumerate(bars):
        axes.bar(place, bar.value - start, 0.7, bottom=start, color=COLOURS[bar.colour % 7])
        text = f"{bar.value:{form}}"
        top = bar.value
        if math.isfinite(bar.low):
            ends = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(place, bar.value, ends, color="#333333", capsize=4)
            text += f"\n({bar.low:{form}} to {bar.high:{form}})"
            top = bar.high
        axes.annotate(
            text, (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    if len(bars) > 3:
        axes.tick_params("x", rotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.margins(y=0.18)
    axes.set_ylabel(name)
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
