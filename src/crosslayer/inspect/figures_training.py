"""Figures of training: lines with bands, points with names, and bars. Each draws on given axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..plotting import line_look
from .figures import place_legend, wrap_labels

_FEWEST_BARS = 4  # of which each has its share of a panel's height
_NOTE_SHIFTS = (11, -11, 22, -22, 33, -33)  # of a note from its point, in points of the font
_NOTE_SIZE = (10, 9)  # width and height that a note needs
_STEEP_SHARE = 0.15  # of a falling curve, at its beginning


@dataclass
class LineSeries:
    """One line of a figure.

    Attributes:
        label: in the legend; "" for none.
        look_number: of its colour, line and mark, as `line_look` takes it.
        x, y: of its points.
        low, high: range over seeds at each point; empty for none.
        notes: a text at each point; empty for none.
        marks: (x, y) of further marks on it, like spikes.
        is_joined: whether a line joins the points.
        is_marked: whether each point has a mark.
        style: of the line; "" for that of `look_number`.
    """

    label: str
    look_number: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    notes: Sequence[str] = ()
    marks: Sequence[tuple[float, float]] = ()
    is_joined: bool = True
    is_marked: bool = False
    style: str = ""


@dataclass
class ValueBar:
    """One bar of a figure: its value, the number of its look, and the ends of its interval."""

    label: str
    look_number: int
    value: float
    low: float = math.nan
    high: float = math.nan


def draw_line_series(
    axes: Any, lines: Sequence[LineSeries], axis_titles: tuple[str, str], log_x: bool = False
) -> None:
    """Lines or points, with ranges over seeds as bands or bars.

    Args:
        axes: of matplotlib.
        lines: to draw.
        axis_titles: of x and y, with units.
        log_x: a logarithmic axis.
    """
    if log_x:
        axes.set_xscale("log")
    for line in lines:
        look = line_look(line.look_number)
        colour = look["color"]
        axes.plot(
            line.x,
            line.y,
            color=colour,
            label=line.label or None,
            linestyle=(line.style or look["linestyle"]) if line.is_joined else "none",
            linewidth=1.6,
            marker=look["marker"] if line.is_marked else None,
            markersize=5,
        )
        if line.low and line.is_marked:
            # a mean's rounding may put it a little outside
            ends = numpy.maximum(
                [numpy.subtract(line.y, line.low), numpy.subtract(line.high, line.y)], 0
            )
            axes.errorbar(line.x, line.y, ends, color=colour, linestyle="none", capsize=3)
        elif line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        for place, height in line.marks:
            axes.plot(place, height, "v", color=colour, markeredgecolor="white", markersize=9)
    axes.set_xlabel(axis_titles[0])
    axes.set_ylabel(axis_titles[1])
    axes.grid(True)
    _add_notes(axes, [line for line in lines if line.notes])
    place_legend(axes)


def _add_notes(axes: Any, lines: Sequence[LineSeries]) -> None:
    """Notes above or below their points, where no other note or point is."""
    axes.autoscale_view()
    scale = 72 / axes.figure.dpi
    points = [axes.transData.transform(numpy.transpose([line.x, line.y])) * scale for line in lines]
    taken = [place for of_line in points for place in of_line]
    for line, of_line in zip(lines, points, strict=True):
        for x, y, point, note in zip(line.x, line.y, of_line, line.notes, strict=True):
            if not note:
                continue
            places = [numpy.add(point, (0, shift)) for shift in _NOTE_SHIFTS]
            free = (place for place in places if _is_free(place, taken))
            place = next(free, places[0])
            taken.append(place)
            axes.annotate(
                note,
                (x, y),
                xytext=place - point,
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=8,
                color=line_look(line.look_number)["color"],
            )


def _is_free(place: Any, taken: Sequence[Any]) -> bool:
    return all((abs(place - other) >= _NOTE_SIZE).any() for other in taken)


def focus_on_end(axes: Any, series: Sequence[LineSeries]) -> None:
    """Cut off the steep beginning of falling curves: the y axis ends where they are after
    `_STEEP_SHARE` of the x axis.
    """
    known = [line for line in series if len(line.x)]
    if not known:
        return
    place = _STEEP_SHARE * max(line.x[-1] for line in known)
    tops = [line.high if len(line.high) else line.y for line in known]
    of_lines = zip(known, tops, strict=True)
    top = max(float(numpy.interp(place, line.x, heights)) for line, heights in of_lines)
    bottom = min(min([*line.y, *line.low]) for line in known)
    if top > bottom:
        margin = 0.06 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)


def draw_bars(
    axes: Any, bars: Sequence[ValueBar], x_title: str, form: str, start: float = 0.0
) -> None:
    """Bars with their values, and their intervals where they have them.

    Args:
        axes: of matplotlib.
        bars: from top to bottom; names of any length stand beside them.
        x_title: of the x axis, with its unit.
        form: of the values, like ".2f".
        start: the value where bars start.
    """
    for place, bar in enumerate(bars):
        colour = line_look(bar.look_number)["color"]
        axes.barh(place, bar.value - start, 0.7, left=start, color=colour)
        text = f"{bar.value:{form}}"
        end = bar.value
        if math.isfinite(bar.low):
            ends = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(bar.value, place, xerr=ends, color="#333333", capsize=4)
            text += f"\n({bar.low:{form}} to {bar.high:{form}})"
            end = bar.high
        axes.annotate(
            text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    labels, font = wrap_labels([bar.label for bar in bars], 9)
    axes.set_yticks(range(len(bars)), labels, fontsize=font)
    axes.set_ylim(max(len(bars), _FEWEST_BARS) - 0.5, -0.5)
    axes.margins(x=0.3)  # for the values
    axes.set_xlabel(x_title)
    axes.grid(True, axis="x")
