"""Figures of the analyses. Each draws on given axes."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from textwrap import fill
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..plotting import COLOURS, line_look

_SIGNED_MAP = "RdBu_r"
POSITIVE_MAP = "viridis"
_MAX_TICKS = 20
_MOST_INSIDE = 6  # labels of a legend within the axes
_LONGEST_INSIDE = 28  # characters of one of them
_MOST_LABELS = 24  # of a legend; more leave no room for the figure
_LABEL_WIDTH = 28  # characters in a line of a label beside the axes
_LABEL_SPACING = 0.3  # lines between two labels
_MOST_LINES = 24  # of labels in the full font, one above another in a panel
LOG_RATIO = 30  # values that differ by more are drawn on a logarithmic axis


def draw_matrix(
    axes: Any,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float | None = None,
    signed: bool = True,
    row_title: str = "input of",
    column_title: str = "output of",
    unit: str = "weight",
    marks: Sequence[int] = (),
) -> None:
    """A matrix of weights. What is exactly zero, or NaN, stays blank.

    Args:
        axes: of matplotlib.
        values: [rows columns].
        rows: labels, from top to bottom.
        columns: labels.
        limit: of the colour scale; None for the largest magnitude. Larger values take its ends.
        signed: colours on both sides of zero; else from zero upwards.
        row_title, column_title: beside the labels.
        unit: of the values, beside the colours.
        marks: columns with a green triangle below them.
    """
    shown = values.double().clone()
    shown[shown == 0] = float("nan")
    if limit is None and values.numel():
        limit = values.abs().nan_to_num().max().item()
    if not limit:  # nothing to colour
        limit = 1.0
    low = -limit if signed else 0.0
    colours = _SIGNED_MAP if signed else POSITIVE_MAP
    image = axes.imshow(
        shown.numpy(), cmap=colours, vmin=low, vmax=limit, aspect="auto", interpolation="nearest"
    )
    axes.set_facecolor("#eeeeee")
    axes.spines[:].set_visible(True)
    for column in marks:
        axes.plot(column, len(rows) - 0.45, "^", color="#009E73", clip_on=False)
    label_ticks(axes.yaxis, rows)
    label_ticks(axes.xaxis, columns, rotation=90)
    axes.set_ylabel(row_title)
    axes.set_xlabel(column_title)
    above = (values > limit).any()
    below = (values < low).any()
    clipped = {(True, True): "both", (True, False): "max", (False, True): "min"}
    extend = clipped.get((bool(above), bool(below)), "neither")  # arrows: values beyond the colours
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.85, label=unit, extend=extend)
    if not (values < 0).any():
        bar.ax.set_ylim(0.0, limit)  # without the colours that no value has


def draw_lines(
    axes: Any,
    labels: Sequence[Sequence[str]],
    lines: Sequence[tuple[str, Sequence[float]]],
    y_title: str,
    x_title: str = "site",
    limits: tuple[float, float] | None = None,
    deviations: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """A line of values over depth for each name, on a logarithmic axis where they differ much.

    Args:
        axes: of matplotlib.
        labels: of the depths of each line.
        lines: a name and values, each; NaN where there is none.
        y_title: what the values are, with their unit.
        x_title: what the depths are.
        limits: of the values, where panels share a scale; None for those of the lines.
        deviations: of the values of a line, by its name: a band on both sides.
    """
    joined = join_labels(labels)
    for number, (own, (label, values)) in enumerate(zip(labels, lines, strict=True)):
        places = [joined.index(depth_label) for depth_label in own]
        axes.plot(places, values, label=label, markersize=3, **line_look(number))
        if label in deviations:
            middle = torch.tensor(values)
            deviation = torch.tensor(deviations[label])
            ends = (middle - deviation, middle + deviation)
            colour = line_look(number)["color"]
            axes.fill_between(places, *ends, color=colour, alpha=0.2, linewidth=0)
    drawn = list(chain.from_iterable(values for _, values in lines))
    if limits is not None:
        low, high = limits
        axes.set_ylim(low / 1.15, high * 1.15)
    use_log_scale_if_wide(axes, drawn, limits)
    label_ticks(axes.xaxis, joined, rotation=90)
    axes.set_ylabel(y_title)
    axes.set_xlabel(x_title)
    finish_lines(axes, len(lines))


def join_labels(labels: Iterable[Sequence[str]]) -> list[str]:
    """All labels of several models by the layer or step that they begin with; others come last.

    Args:
        labels: of the depths or steps of each model, like "3.mlp", "readout" or "1000".
    """
    longest_first = sorted(labels, key=len, reverse=True)
    return sorted(dict.fromkeys(chain.from_iterable(longest_first)), key=_leading_number)


def _leading_number(label: str) -> float:
    digits = re.match(r"\d+", label)
    return int(digits[0]) if digits else math.inf


def use_log_scale_if_wide(
    axes: Any, values: Sequence[float], limits: tuple[float, float] | None = None
) -> None:
    """A logarithmic vertical axis where no value is zero or negative, and the limits differ much.

    Args:
        axes: of matplotlib.
        values: those drawn.
        limits: where panels share a scale; None for those of the values.
    """
    low, high = limits or positive_limits(values)
    if high > LOG_RATIO * low and not any(value <= 0 for value in values):
        use_log_scale(axes)


def use_log_scale(axes: Any) -> None:
    """A logarithmic vertical axis whose labels are plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low) if low > 0 else 3
    steps = (1, 2, 5) if decades < 2 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_boxes(
    axes: Any, labels: Sequence[str], groups: Sequence[tuple[str, Tensor]], y_title: str
) -> None:
    """Boxes of several groups side by side at each label.

    Args:
        axes: of matplotlib.
        labels: of the horizontal axis.
        groups: a name and minimum, 25, 50, 75 % and maximum at each label, [labels 5].
        y_title: of the vertical axis.
    """
    width = 0.8 / len(groups)
    for number, ((group, quartiles), colour) in enumerate(zip(groups, COLOURS, strict=False)):
        keys = ("whislo", "q1", "med", "q3", "whishi")
        boxes = [dict(zip(keys, row, strict=True), fliers=[]) for row in quartiles.tolist()]
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(labels))]
        drawn = axes.bxp(
            boxes,
            places,
            widths=0.8 * width,
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": colour, "edgecolor": colour, "alpha": 0.45},
            medianprops={"color": colour, "linewidth": 2},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        drawn["boxes"][0].set_label(group)
    label_ticks(axes.xaxis, labels, rotation=90)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylabel(y_title)
    axes.grid(True, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)


def positive_limits(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest positive value; 1 and 1 where there is none."""
    positive = [value for value in values if value > 0]
    return (min(positive), max(positive)) if positive else (1.0, 1.0)


def finish_lines(axes: Any, lines: int) -> None:
    """A grid, and a legend where it helps."""
    axes.grid(True)
    if lines > 1:
        place_legend(axes)


def place_legend(axes: Any) -> None:
    """A legend: within the axes where it is small, else beside them; none of very many labels."""
    handles, labels = axes.get_legend_handles_labels()
    if not 0 < len(labels) <= _MOST_LABELS:
        return
    if len(labels) <= _MOST_INSIDE and len(max(labels, key=len)) <= _LONGEST_INSIDE:
        axes.legend(fontsize=9)
        return
    labels, font = wrap_labels(labels, 8)
    style = {"fontsize": font, "labelspacing": _LABEL_SPACING}
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1, 1), **style)


def wrap_labels(labels: Sequence[str], font: float) -> tuple[list[str], float]:
    """Labels in short lines, and the font, smaller where a panel is too low for all of them."""
    wrapped = []
    for label in labels:
        wrapped.append("\n".join(fill(line, _LABEL_WIDTH) for line in label.split("\n")))
    lines = sum(label.count("\n") + 1 + _LABEL_SPACING for label in wrapped)
    return wrapped, font * min(1, _MOST_LINES / max(lines, 1))


def label_ticks(axis: Any, labels: Sequence[str], rotation: float = 0, first: float = 0) -> None:
    """Labels of the places `first`, `first` + 1, …: all of them, or evenly spaced ones."""
    step = max(1, -(-len(labels) // _MAX_TICKS))
    places = range(0, len(labels), step)
    axis.set_ticks([place + first for place in places])
    axis.set_ticklabels([labels[place] for place in places], rotation=rotation, fontsize=9)
