"""Heads and their patterns."""

from functools import partial

from ..figures import draw_lines, draw_matrix
from .section import Models, Panels, Section


def _attention_panels(models: Models) -> Panels:
    lines = [(m.name, m["attention"].active.tolist()) for m in models]
    labels = [str(layer) for layer in range(max(len(values) for _, values in lines))]
    draw = partial(draw_lines, labels=labels, lines=lines, name="share of active heads")
    return [("active heads by layer", draw)]


def _pattern_panels(models: Models) -> Panels:
    """All heads of the middle layer."""
    panels: Panels = []
    for m in models:
        layer = len(m["attention"].patterns) // 2
        for head, pattern in enumerate(m["attention"].patterns[layer][:12]):
            places = [str(place) for place in range(len(pattern))]
            draw = partial(
                draw_matrix,
                values=pattern,
                rows=places,
                columns=places,
                limit=1.0,
                signed=False,
                names=("token", "attends to"),
            )
            panels.append((f"{m.name}: layer {layer}, head {head}", draw))
    return panels


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
        "Attention patterns of the middle layer",
        "Every head's weights over the first 32 tokens of the first sequence. MUDD, Figures 10 and "
        "11.",
        ("attention",),
        _pattern_panels,
    ),
]
