"""Figures of what a model loses without its parts, and of its matrices' ranks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..losses import exp_or_inf
from ..plotting import line_look
from .ablation import BlockAblation, PartAblation, PruningCurve
from .figures import (
    finish_lines,
    join_labels,
    label_ticks,
    use_log_scale,
    use_log_scale_if_wide,
)


def draw_ablation(
    axes: Any,
    models: Sequence[tuple[str, PartAblation]],
    deviations: Mapping[str, PartAblation] = MappingProxyType({}),
) -> None:
    """The increase of log PPL without each sub-layer, a bar for each model, with its deviation
    where known.
    """
    _draw_bars(axes, models, deviations)
    axes.set_ylabel("increase of log perplexity, nats a token")


def draw_block_ablation(
    axes: Any,
    models: Sequence[tuple[str, BlockAblation]],
    deviations: Mapping[str, BlockAblation] = MappingProxyType({}),
) -> None:
    """ΔPPL without each block on a logarithmic axis, a bar for each model, as in MGR Figure 4.

    A block without which the perplexity falls has no bar.
    """
    _draw_bars(axes, models, deviations)
    if any(value > 0 for _, found in models for value in found.increase):
        use_log_scale(axes)
    axes.set_xlabel("without block")
    axes.set_ylabel("increase of perplexity")


def _draw_bars(
    axes: Any,
    models: Sequence[tuple[str, PartAblation | BlockAblation]],
    deviations: Mapping[str, PartAblation | BlockAblation],
) -> None:
    """A bar for each model at each label. Models may lack some labels."""
    labels = join_labels(found.labels for _, found in models)
    width = 0.8 / len(models)
    for number, (name, found) in enumerate(models):
        colour = line_look(number)["color"]
        offset = (number - (len(models) - 1) / 2) * width
        places = [labels.index(label) + offset for label in found.labels]
        errors = deviations[name].increase if name in deviations else None
        axes.bar(places, found.increase, width, color=colour, label=name, yerr=errors, capsize=2)
    label_ticks(axes.xaxis, labels, rotation=90)
    axes.margins(y=0.3)  # for the legend, above the bars
    finish_lines(axes, len(models))


def draw_pruning(axes: Any, models: Sequence[tuple[str, PruningCurve]]) -> None:
    """Perplexity against the share of the smallest weights set to zero (DenseFormer Figure 7)."""
    values = []
    for number, (name, curve) in enumerate(models):
        perplexities = [exp_or_inf(loss) for loss in curve.losses]
        shares = [100 * share for share in curve.shares]
        axes.plot(shares, perplexities, label=name, markersize=3, **line_look(number))
        values += perplexities
    use_log_scale_if_wide(axes, values)
    axes.set_xlabel("% of weights set to zero, the smallest first")
    axes.set_ylabel("perplexity")
    finish_lines(axes, len(models))


def draw_singular_values(axes: Any, models: Sequence[tuple[str, Tensor]]) -> None:
    """Singular values against their rank, a line for each model (DenseFormer Figure 13)."""
    for number, (name, values) in enumerate(models):
        look = {**line_look(number), "marker": ""}
        axes.plot(range(1, len(values) + 1), values, label=name, **look)
    use_log_scale(axes)
    axes.set_xlabel("rank")
    axes.set_ylabel("singular value, mean over blocks")
    finish_lines(axes, len(models))
