"""What all figures share: colours, looks of lines, and files of panels."""

import io
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

BLACK = "#000000"
# Okabe and Ito's palette, which colour-blind readers can tell apart
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS = [*HUES, BLACK]
STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_TITLE_WIDTH = 46  # characters in a line of a panel's title
_AXIS_WIDTH = 36  # in a line of an axis's name
_METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None}, "png": {}}  # the same file each day

DrawPanel = Callable[[Any], None]  # draws on the axes of one panel


def line_look(number: int) -> dict[str, str]:
    """Colour, dashes and marker of a line, by its number: with each repeated colour the others
    change.
    """
    repeats = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[repeats % len(STYLES)],
        "marker": _MARKERS[repeats % len(_MARKERS)],
    }


def mark_level(draw_line: Callable[..., Any], level: float) -> None:
    """A dashed line across the axes. draw_line: their `axhline` or `axvline`."""
    draw_line(level, color="#666666", linestyle="--", linewidth=1, zorder=0)


def render_figure(
    panels: Sequence[tuple[str, DrawPanel]],
    width: float = 5.2,
    height: float = 4.4,
    suffixes: Sequence[str] = ("svg",),
) -> dict[str, bytes]:
    """A figure of panels in rows of three, or of two where they are four.

    Args:
        panels: a title and a function that draws, each.
        width: of a panel, in inches.
        height: of a panel, in inches.
        suffixes: of the wanted files, "svg" or "png".

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
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "grid.alpha": 0.25,
    }
    files = {}
    with matplotlib.rc_context(style):
        columns = 2 if len(panels) == 4 else min(len(panels), 3)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (title, draw) in zip(all_axes, panels, strict=False):
            axes.set_title(fill(title, _TITLE_WIDTH))
            draw(axes)
            axes.set_xlabel(fill(axes.get_xlabel(), _AXIS_WIDTH))
            axes.set_ylabel(fill(axes.get_ylabel(), _AXIS_WIDTH))
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out now, once for all files
        for suffix in suffixes:
            file = io.BytesIO()
            figure.savefig(file, format=suffix, metadata=_METADATA[suffix], dpi=110)
            files[suffix] = file.getvalue()
    if "svg" in files:  # without its prologue, it can be a part of a page too
        files["svg"] = b"".join(files["svg"].partition(b"<svg")[1:])
    return files
