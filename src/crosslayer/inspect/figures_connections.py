"""Figures of what connections do: maps, patterns, cosines and distances."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..plotting import COLOURS, DrawPanel, line_look
from .figures import POSITIVE_MAP, draw_matrix, finish_lines, join_labels, label_ticks
from .mixing_summary import MixPattern
from .similarity import CosineSimilarity, DepthDistances

PLAIN_COLOUR = "#999999"  # of what a plain Transformer has as well


def draw_mix_pattern(axes: Any, pattern: MixPattern) -> None:
    """Learned weights in red, and the plain flow of a block without an average in grey.

    As in DenseFormer Figures 1b and 2.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kinds = pattern.learned.double()
    for number, row in enumerate(pattern.learned):
        if not row.any():
            kinds[number, number + 1] = 2  # Y_i = X_i
    colours = ListedColormap(["#ffffff", COLOURS[1], PLAIN_COLOUR])
    axes.pcolormesh(kinds.numpy(), cmap=colours, vmin=0, vmax=2, edgecolors="#dddddd", linewidth=1)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.spines[:].set_visible(True)
    label_ticks(axes.yaxis, pattern.rows, first=0.5)
    label_ticks(axes.xaxis, pattern.columns, rotation=90, first=0.5)
    axes.set_ylabel("what follows a block")
    axes.set_xlabel("output of a block")
    kinds_shown = [Patch(color=COLOURS[1], label=f"{pattern.weights} learned weights")]
    if (kinds == 2).any():
        kinds_shown.append(Patch(color=PLAIN_COLOUR, label="passed on unchanged"))
    axes.legend(handles=kinds_shown, fontsize=9, loc="upper right")


def draw_cosines(axes: Any, models: Sequence[tuple[str, CosineSimilarity]], kind: str) -> None:
    """Median and band from 5 to 95 % over tokens, a line for each model. kind: a field's name."""
    labels = join_labels(cosines.labels for _, cosines in models)
    for number, (name, cosines) in enumerate(models):
        look = line_look(number)
        values = getattr(cosines, kind)
        places = [labels.index(label) for label in cosines.labels]
        axes.plot(places, values[:, 1], label=name, markersize=3, **look)
        axes.fill_between(places, values[:, 0], values[:, 2], color=look["color"], alpha=0.15)
    label_ticks(axes.xaxis, labels, rotation=90)
    axes.set_ylabel("cosine")
    axes.set_xlabel("input of")
    lowest, _ = axes.get_ylim()
    if lowest < 1:
        axes.set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    finish_lines(axes, len(models))


def distance_panel(distances: DepthDistances, stream: int | None = None) -> DrawPanel:
    """A matrix of the angular distance of the last token between block ℓ and the n-th after it.

    ℓ is on the horizontal axis and n on the vertical one, as in MGR Figures 3, 8 and 9.

    Args:
        distances: of all pairs of sites.
        stream: whose distances; None for the blocks' inputs.
    """
    values = distances_ahead(distances, stream).clamp_min(1e-12)  # zero would be left blank
    blocks = [str(block) for block in range(len(values) + 1)]
    is_static = stream is not None and distances.is_static(stream)
    return partial(
        draw_matrix,
        values=values.flip(0),  # n grows upwards
        rows=blocks[:0:-1],
        columns=blocks[:-1],
        limit=0.5,
        signed=False,
        row_title="its subsequent n-th block",
        column_title="initial block ℓ" + (" of a static stream" if is_static else ""),
        unit="angular distance, of π",
    )


def distances_ahead(distances: DepthDistances, stream: int | None) -> Tensor:
    """The distance between block ℓ and the n-th after it, [n − 1, ℓ]; NaN where there is none."""
    values = distances.angular if stream is None else distances.streams[stream]
    chosen = [place for place, opens in enumerate(distances.opens_layer) if opens]
    values = values[chosen][:, chosen]
    blocks = len(chosen) - 1  # the last is the readout
    ahead = torch.full((blocks, blocks), torch.nan, dtype=torch.float64)
    for n in range(1, blocks + 1):
        ahead[n - 1, : blocks - n + 1] = values.diagonal(n)
    return ahead


def draw_pattern_gallery(axes: Any, patterns: Tensor) -> None:
    """The patterns of all heads of a layer, [heads T T], as tiles numbered from the left."""
    heads, T, _ = patterns.shape
    columns = math.ceil(math.sqrt(heads))
    rows = -(-heads // columns)
    step = T + 2  # a gap between tiles
    canvas = torch.full((rows * step, columns * step), torch.nan, dtype=torch.float64)
    for head, pattern in enumerate(patterns):
        top = head // columns * step
        left = head % columns * step
        canvas[top : top + T, left : left + T] = pattern
        axes.text(left + T - 1, top + 1, str(head), color="white", fontsize=7, ha="right", va="top")
    image = axes.imshow(canvas.numpy(), cmap=POSITIVE_MAP, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(f"attends to token 0 … {T - 1}, from the left")
    axes.set_ylabel(f"token 0 … {T - 1}, from the top")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.85, label="attention weight")
