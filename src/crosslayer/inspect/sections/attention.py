"""Heads and their patterns."""

from functools import partial

from ..figures import draw_lines
from ..figures_connections import draw_pattern_gallery
from .section import FigurePanels, InspectedModels, Section


def _attention_panels(models: InspectedModels) -> FigurePanels:
    lines = [(m.name, m["attention"].active.tolist()) for m in models]
    labels = [[str(layer) for layer in range(len(values))] for _, values in lines]
    draw = partial(
        draw_lines, labels=labels, lines=lines, y_title="share of active heads", x_title="layer"
    )
    return [("active heads by layer", draw)]


def _pattern_panels(models: InspectedModels) -> FigurePanels:
    """All heads of the chosen layer, a gallery for each model."""
    return [
        (
            f"{m.name}: heads of layer {m['attention'].pattern_layer}",
            partial(draw_pattern_gallery, patterns=m["attention"].patterns),
        )
        for m in models
    ]


SECTIONS = [
    Section(
        "attention",
        "Heads that attend to content",
        "A head is active at a token where its largest weight is neither on the first two "
        "positions nor on BOS, a full stop or a newline. Attention "
        "runs eagerly here. MUDD, Figure 8.",
        ("attention",),
        _attention_panels,
    ),
    Section(
        "patterns",
        "Attention patterns of one layer",
        "Every head's weights over the first 32 tokens of the first sequence, in the layer that "
        "--layer names: the one at three quarters of the depth if it names none, which is the "
        "paper's 25th of 32. Attention runs eagerly here. MUDD, Figures 10 and 11.",
        ("attention",),
        _pattern_panels,
    ),
]
