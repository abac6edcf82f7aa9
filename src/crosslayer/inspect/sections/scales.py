"""Sizes of outputs and streams, and gates."""

from functools import partial

import torch
from torch import Tensor

from ..figures import draw_lines, positive_limits
from ..figures_scales import draw_gate_boxes, draw_gate_histogram
from ..inspection import ModelInspection
from ..scales import SiteScales
from .section import MOST_STREAMS, FigurePanels, InspectedModels, Section

# The ends of a writer's label, and the words for them. A parallel block is both.
_SUBLAYER_KINDS = {".attn": "attention", ".mixer": "mixer", ".mlp": "MLP", ".attn+mlp": "blocks"}
Lines = list[tuple[str, list[float]]]


def _scale_panels(models: InspectedModels) -> FigurePanels:
    labels = [_site_labels(m) for m in models]
    outputs = [(m.name, [site.output_rms for site in m["scales"]]) for m in models]
    largest = [(m.name, [site.output_largest[0] for site in m["scales"]]) for m in models]
    draw = partial(draw_lines, labels=labels, x_title="output before")
    return [
        ("raw outputs of sub-layers", partial(draw, lines=outputs, y_title="RMS")),
        ("their largest magnitude", partial(draw, lines=largest, y_title="magnitude")),
    ]


def _block_scale_panels(models: InspectedModels) -> FigurePanels:
    outputs = []
    for m in models:
        after_blocks = [site.hidden_rms for site in m["scales"] if site.opens_layer][1:]
        outputs.append((m.name, after_blocks))
    gradients = [(m.name, m["gradients"].rms) for m in models]
    layers = [[str(layer) for layer in range(len(values))] for _, values in gradients]
    draw = partial(draw_lines, labels=layers, x_title="block")
    return [
        ("output of each block", partial(draw, lines=outputs, y_title="RMS of the hidden state")),
        ("gradient of each block", partial(draw, lines=gradients, y_title="√mean(g²)")),
    ]


def _activation_panels(models: InspectedModels) -> FigurePanels:
    """A panel for each model and kind of sub-layer: the three largest magnitudes after each."""
    found = []
    for kind, words in _SUBLAYER_KINDS.items():
        for m in models:
            sites = [site for site in m["scales"] if site.writer.endswith(kind)]
            if sites:
                largest = torch.tensor([site.hidden_largest for site in sites]).T.tolist()
                lines = list(zip(("largest", "second", "third"), largest, strict=True))
                found.append((f"{m.name}: after {words}", _layers(sites), lines))
    return _panels_of_one_scale(found)


def _stream_scale_panels(models: InspectedModels) -> FigurePanels:
    """A panel for each model and kind of sub-layer: the largest magnitude of each stream."""
    found = []
    for kind, words in _SUBLAYER_KINDS.items():
        for m in models:
            sites = [site for site in m["scales"] if site.writer.endswith(kind)]
            if not sites or not sites[0].has_streams:
                continue
            streams = max(len(site.written_largest) for site in sites)
            lines = []
            for stream in range(min(streams, MOST_STREAMS)):
                values = [_at(site.written_largest, stream) for site in sites]
                lines.append((f"stream {stream}", values))
            found.append((f"{m.name}: after {words}", _layers(sites), lines))
    return _panels_of_one_scale(found)


def _layers(sites: list[SiteScales]) -> list[str]:
    return [site.writer.partition(".")[0] for site in sites]


def _panels_of_one_scale(found: list[tuple[str, list[str], Lines]]) -> FigurePanels:
    """Panels of titles, depths and lines, all with the same limits."""
    values = [value for _, _, lines in found for _, of_line in lines for value in of_line]
    limits = positive_limits(values)
    panels: FigurePanels = []
    for title, labels, lines in found:
        of_lines = [labels] * len(lines)
        draw = partial(
            draw_lines, labels=of_lines, lines=lines, y_title="magnitude", x_title="layer"
        )
        panels.append((title, partial(draw, limits=limits)))
    return panels


def _site_labels(model: ModelInspection) -> list[str]:
    return [site.label for site in model["scales"]]


def _at(values: Tensor, place: int) -> float:
    return values[place].item() if place < len(values) else float("nan")


def _gain_panels(models: InspectedModels) -> FigurePanels:
    lines = []
    labels = []
    for m in models:
        if m["scales"][-1].has_streams:
            for name in ("forward_gain", "backward_gain"):
                values = [getattr(site, name) for site in m["scales"]]
                known = [float("nan") if value is None else value for value in values]
                lines.append((f"{m.name}: {name.partition('_')[0]}", known))
                labels.append(_site_labels(m))
    if not lines:
        return []
    return [
        ("of the streams' mixing", partial(draw_lines, labels=labels, lines=lines, y_title="gain"))
    ]


def _gate_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for m in models:
        gates = [site.gate for site in m["scales"] if site.gate is not None]
        if gates:
            panels.append((f"{m.name}: all", partial(draw_gate_histogram, gates=gates)))
            panels.append((f"{m.name}: by layer", partial(draw_gate_boxes, gates=gates)))
    return panels


SECTIONS = [
    Section(
        "block_scales",
        "Size and gradient of each block",
        "Left: the hidden state after each block, as the next block reads it before its norm. The "
        "last one is the readout's, in hyper-connections the sum of the streams. "
        "Right: the size of the gradient of its parameters, √mean(g²), from one backward pass over "
        "the sequences. Multi-Gate Residuals, Figure 2.",
        ("scales", "gradients"),
        _block_scale_panels,
    ),
    Section(
        "activations",
        "Massive activations",
        "The three largest magnitudes in the hidden state after each attention and after each MLP, "
        "as the next sub-layer reads it before its norm. The last is the readout's, in "
        "hyper-connections the sum of the streams. Multi-Gate Residuals, Figures 5, 10 and "
        "11: over 512 sequences.",
        ("scales",),
        _activation_panels,
    ),
    Section(
        "stream_scales",
        "Largest magnitude of each stream",
        "In each stream once the output of each attention, or of each MLP, is written. Multi-Gate "
        "Residuals, Figures 6 and 12.",
        ("scales",),
        _stream_scale_panels,
    ),
    Section(
        "scales",
        "Sizes of raw outputs",
        "What each sub-layer adds, before the connection weighs it; first the embedding.",
        ("scales",),
        _scale_panels,
    ),
    Section(
        "gains",
        "Composite gain of the streams' mixing",
        "Largest row sum (forward) and column sum (backward) of the product of all mixing matrices "
        "so far. mHC keeps both at 1.",
        ("scales",),
        _gain_panels,
    ),
    Section(
        "gates",
        "Gates of writes",
        "The gates of each layer over tokens and streams. A box is the middle half, whiskers reach "
        "1.5 times as far, and a red circle is the largest outlier. Multi-Gate Residuals, Figures "
        "7 and 13.",
        ("scales",),
        _gate_panels,
    ),
]
