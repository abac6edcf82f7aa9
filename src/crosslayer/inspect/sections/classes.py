"""Weights by the class of images or the group of texts."""

from functools import partial
from typing import Any

import torch

from ...plotting import COLOURS
from ..figures import draw_boxes
from ..group_weights import GroupWeights
from .section import FigurePanels, InspectedModels, Section


def _class_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for model in models:
        weights = model["classes"]
        for letter in ("β", "α"):
            names = [name for name in weights.names if name.startswith(letter)]
            if names:
                draw = partial(_draw_weights, weights=weights, names=names)
                panels.append((f"{model.name}: {letter}", draw))
    return panels


def _draw_weights(axes: Any, weights: GroupWeights, names: list[str]) -> None:
    """Each weight less its mean: weights differ more from each other than classes do."""
    places = [weights.names.index(name) for name in names]
    samples = torch.tensor(weights.samples, dtype=torch.float64)[:, None]
    means = ((samples * weights.mean).sum(0) / samples.sum())[places]
    groups = []
    for group, quartiles in zip(weights.groups, weights.quartiles, strict=True):
        groups.append((group, quartiles[places] - means[:, None]))
    labels = [f"{name} ({mean:.3g})" for name, mean in zip(names, means.tolist(), strict=True)]
    draw_boxes(axes, labels, groups[: len(COLOURS)], "weight − its mean (in brackets)")


SECTIONS = [
    Section(
        "classes",
        "Weights of the last connection by class",
        "Boxes over the samples of a class: quartiles, and whiskers to the smallest and the "
        "largest value, less the mean over all samples. A sample counts with the mean over its "
        "tokens. β1 weighs the last "
        "sub-layer's output in stream 1; α2,0 is the weight of stream 2 in that sub-layer's input, "
        "α2,1 in stream 1. Weights that are the same for every sample are left out, and so are "
        f"classes after the first {len(COLOURS)}. Hyper-Connections, Figure 12.",
        ("classes",),
        _class_panels,
    )
]
