"""Sizes of outputs and streams, and gates."""

from functools import partial

from torch import Tensor

from ..figures import draw_gates, draw_lines
from .section import MOST_STREAMS, Models, Panels, Section


def _scale_panels(models: Models) -> Panels:
    labels = _site_labels(models)
    outputs = [(m.name, [site.output_rms for site in m["scales"]]) for m in models]
    largest = [(m.name, [site.output_largest[0] for site in m["scales"]]) for m in models]
    streams = []
    for m in models:
        for part in range(min(len(m["scales"][-1].stream_largest), MOST_STREAMS)):
            if m["scales"][-1].has_streams or part == 0:
                values = [_at(site.stream_largest, part) for site in m["scales"]]
                streams.append((f"{m.name}: {part}", values))
    draw = partial(draw_lines, labels=labels)
    return [
        ("RMS of the output before", partial(draw, lines=outputs, name="RMS")),
        ("its largest magnitude", partial(draw, lines=largest, name="magnitude")),
        ("largest magnitude of streams", partial(draw, lines=streams, name="magnitude")),
    ]


def _site_labels(models: Models) -> list[str]:
    """Those of the deepest model."""
    deepest = max((model["scales"] for model in models), key=len)
    return [site.label for site in deepest]


def _at(values: Tensor, place: int) -> float:
    return values[place].item() if place < len(values) else float("nan")


def _gain_panels(models: Models) -> Panels:
    lines = []
    for m in models:
        if m["scales"][-1].has_streams:
            for name in ("forward_gain", "backward_gain"):
                values = [getattr(site, name) for site in m["scales"]]
                known = [float("nan") if value is None else value for value in values]
                lines.append((f"{m.name}: {name.partition('_')[0]}", known))
    labels = _site_labels(models)
    if not lines:
        return []
    return [
        ("of the streams' mixing", partial(draw_lines, labels=labels, lines=lines, name="gain"))
    ]


def _gate_panels(models: Models) -> Panels:
    with_gates = [m for m in models if any(site.gate is not None for site in m["scales"])]
    return [(m.name, partial(draw_gates, sites=m["scales"])) for m in with_gates]


SECTIONS = [
    Section(
        "scales",
        "Sizes of outputs and streams",
        "Multi-Gate Residuals, Figures 2, 5, 6, 10, 11 and 12.",
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
        "Whiskers reach from the smallest to the largest value; boxes are mean quartiles over "
        "streams. Multi-Gate Residuals, Figures 7 and 13.",
        ("scales",),
        _gate_panels,
    ),
]
