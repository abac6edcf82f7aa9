"""Figures of the analyses. Each draws on given axes; `render_figure` makes a file of them."""

import io
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .ablation import SublayerAblation
from .scales import SiteScales
from .similarity import CosineSimilarity, DepthDistances
from .unfolding import UnfoldedMap

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SIGNED_MAP = "RdBu_r"
POSITIVE_MAP = "viridis"
MAX_TICKS = 13
TITLE_WIDTH = 46  # characters in a line of a panel's title

Draw = Callable[[Any], None]  # draws on the axes of one panel


def render_figure(panels: Sequence[tuple[str, Draw]], width: float = 5.2) -> dict[str, bytes]:
    """A figure of panels side by side, as SVG and PNG.

    Args:
        panels: a title and a function that draws, each.
        width: of a panel, in inches.

    Returns:
        File contents by suffix.
    """
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would have global state

    style = {
        "svg.hashsalt": "crosslayer",  # the same numbers give the same file
        "text.parse_math": False,  # labels are no formulas
        "font.size": 11,
        "axes.titlesize": 12,
    }
    files = {}
    with matplotlib.rc_context(style):
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(width * columns, 4.4 * rows), layout="constrained")
        all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (title, draw) in zip(all_axes, panels, strict=False):
            axes.set_title(fill(title, TITLE_WIDTH))
            draw(axes)
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out now, once for both files
        for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
            file = io.BytesIO()
            figure.savefig(file, format=suffix, metadata=metadata, dpi=110)
            files[suffix] = file.getvalue()
    return files


def draw_matrix(
    axes: Any,
    values: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    limit: float | None = None,
    signed: bool = True,
    names: tuple[str, str] = ("input of", "output of"),
) -> None:
    """A matrix of weights. What is exactly zero stays blank.

    Args:
        axes: of matplotlib.
        values: [rows columns].
        rows: labels, from top to bottom.
        columns: labels.
        limit: of the colour scale; None for the largest magnitude. Larger values take its ends.
        signed: colours on both sides of zero; else from zero upwards.
        names: of the two axes.
    """
    shown = values.double().clone()
    shown[shown == 0] = float("nan")
    largest = values.abs().max().item() if values.numel() else 1.0
    limit = limit or largest or 1.0
    low = -limit if signed else 0.0
    colours = SIGNED_MAP if signed else POSITIVE_MAP
    image = axes.imshow(
        shown.numpy(), cmap=colours, vmin=low, vmax=limit, aspect="auto", interpolation="nearest"
    )
    axes.set_facecolor("#eeeeee")
    _label_ticks(axes.yaxis, rows)
    _label_ticks(axes.xaxis, columns, rotation=90)
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    axes.figure.colorbar(image, ax=axes, shrink=0.85)


def draw_unfolded_map(axes: Any, unfolded: UnfoldedMap, limit: float | None = None) -> None:
    """c_kj, with a green mark at each attention, as in HC Figure 7."""
    draw_matrix(axes, unfolded.mean, unfolded.inputs, unfolded.sources, limit)
    for number, label in enumerate(unfolded.sources):
        if label.endswith(".attn"):
            axes.plot(number, len(unfolded.inputs) - 0.45, "^", color="#009E73", clip_on=False)


def draw_cosines(axes: Any, models: Sequence[tuple[str, CosineSimilarity]], kind: str) -> None:
    """Median with the band from 5 to 95 % over tokens, a line a model. kind: a field's name."""
    for (name, cosines), colour in zip(models, COLOURS, strict=False):
        values = getattr(cosines, kind)
        depth = torch.arange(len(values))
        axes.plot(depth, values[:, 1], color=colour, label=name, marker="o", markersize=3)
        axes.fill_between(depth, values[:, 0], values[:, 2], color=colour, alpha=0.15)
    _label_ticks(axes.xaxis, models[0][1].labels, rotation=90)
    axes.set_ylabel("cosine")
    axes.set_ylim(top=1.02)
    _finish_lines(axes, len(models))


def draw_distances(axes: Any, distances: DepthDistances, stream: int | None = None) -> None:
    """Angular distance between the last tokens' inputs, or those of a stream, at two depths."""
    values = distances.angular if stream is None else distances.streams[stream]
    names = ("at", "at")
    draw_matrix(axes, values, distances.labels, distances.labels, 0.5, signed=False, names=names)


def draw_lines(
    axes: Any,
    labels: Sequence[str],
    lines: Sequence[tuple[str, Sequence[float]]],
    name: str,
    deviations: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """A line of values over sites for each name, on a logarithmic axis where they differ much.

    Args:
        axes: of matplotlib.
        labels: of the horizontal axis.
        lines: a name and values at the labels, each.
        name: of the vertical axis.
        deviations: of the values of a line, by its name: a band on both sides.
    """
    for (label, values), colour in zip(lines, COLOURS * 4, strict=False):
        axes.plot(range(len(values)), values, color=colour, label=label, marker="o", markersize=3)
        if label in deviations:
            middle, deviation = torch.tensor(values), torch.tensor(deviations[label])
            low, high = middle - deviation, middle + deviation
            axes.fill_between(range(len(values)), low, high, color=colour, alpha=0.2, linewidth=0)
    positive = [value for _, values in lines for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _label_ticks(axes.xaxis, labels, rotation=90)
    axes.set_ylabel(name)
    _finish_lines(axes, len(lines))


def draw_gates(axes: Any, sites: Sequence[SiteScales]) -> None:
    """Quartiles and range of each site's gate, over tokens and streams, as boxes."""
    boxes: list[dict[str, Any]] = []
    labels = []
    for site in sites:
        if site.gate is None:
            continue
        labels.append(site.label)
        q = site.gate.quartiles
        low, median, high = q[:, 1].mean(), q[:, 2].mean(), q[:, 3].mean()
        boxes.append(
            {
                "whislo": site.gate.minimum,
                "q1": low.item(),
                "med": median.item(),
                "q3": high.item(),
                "whishi": site.gate.maximum,
                "fliers": [],
            }
        )
    axes.bxp(boxes, showfliers=False)
    _label_ticks(axes.xaxis, labels, rotation=90, first=1)
    axes.set_ylabel("gate of the write before")
    axes.grid(alpha=0.25, axis="y")


def draw_boxes(
    axes: Any, labels: Sequence[str], groups: Sequence[tuple[str, Tensor]], name: str
) -> None:
    """Boxes of several groups side by side at each label.

    Args:
        axes: of matplotlib.
        labels: of the horizontal axis.
        groups: a name and minimum, 25, 50, 75 % and maximum at each label, [labels 5].
        name: of the vertical axis.
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
    _label_ticks(axes.xaxis, labels, rotation=90)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylabel(name)
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)


def draw_ablation(
    axes: Any,
    models: Sequence[tuple[str, SublayerAblation]],
    deviations: Mapping[str, SublayerAblation] = MappingProxyType({}),
) -> None:
    """log ΔPPL without each sub-layer, a bar a model, with its deviation where it is known."""
    width = 0.8 / len(models)
    for number, ((name, ablation), colour) in enumerate(zip(models, COLOURS, strict=False)):
        place = torch.arange(len(ablation.labels)) + number * width
        errors = deviations[name].increase if name in deviations else None
        axes.bar(place, ablation.increase, width, color=colour, label=name, yerr=errors, capsize=2)
    _label_ticks(axes.xaxis, models[0][1].labels, rotation=90)
    axes.set_ylabel("increase of log perplexity")
    _finish_lines(axes, len(models))


def _finish_lines(axes: Any, lines: int) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if 1 < lines <= 8:
        axes.legend(frameon=False, fontsize=9)


def _label_ticks(axis: Any, labels: Sequence[str], rotation: float = 0, first: int = 0) -> None:
    step = -(-len(labels) // MAX_TICKS)
    places = range(0, len(labels), step)
    axis.set_ticks([place + first for place in places])
    axis.set_ticklabels([labels[place] for place in places], rotation=rotation, fontsize=9)
