"""How outputs reach later inputs, and what a connection itself mixes with."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..figures import draw_matrix
from ..figures_connections import draw_mix_pattern
from ..inspection import ModelInspection
from ..mixing_summary import SiteMixing, way_of_input
from .section import MOST_STREAMS, FigurePanels, InspectedModels, Section

_VARIES = 1e-6  # a deviation over tokens that is more than rounding


def _unfolded_panels(models: InspectedModels) -> FigurePanels:
    # One scale for all. The readout may be a sum of streams, so it does not set the scale.
    limit = max(_colour_limit([model["unfolded"].mean[:-1]]) for model in models)
    panels: FigurePanels = []
    for m in models:
        u = m["unfolded"]
        attentions = [place for place, label in enumerate(u.sources) if label.endswith(".attn")]
        draw = partial(draw_matrix, values=u.mean, rows=u.inputs, columns=u.sources, limit=limit)
        panels.append((m.name, partial(draw, marks=attentions)))  # as in HC Figure 7
    return panels


def _colour_limit(matrices: Sequence[Tensor]) -> float:
    """The magnitude below which 95 % of the weights are, but those that are exactly zero.

    The embedding's column may be ten times the others, which would then all look alike.
    """
    magnitudes = torch.cat([values.abs().flatten().double() for values in matrices])
    magnitudes = magnitudes[magnitudes > 0]
    return magnitudes.quantile(0.95).item() if len(magnitudes) else 1.0


def _one_token_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for m in models:
        u = m["unfolded"]
        if u.std.max() <= _VARIES:  # the mean shows it all
            continue
        draw = partial(draw_matrix, values=u.one_token, rows=u.inputs, columns=u.sources)
        draw = partial(draw, limit=_colour_limit([u.one_token]))
        panels.append((f"{m.name}: inputs", draw))
        draw = partial(draw_matrix, values=u.std, rows=u.inputs, columns=u.sources, signed=False)
        panels.append((f"{m.name}: deviation over tokens", draw))
        panels += _stream_panels(m, u.one_token_streams)
    return panels


def _stream_map_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for m in models:
        panels += _stream_panels(m, m["unfolded"].stream_means)
    return panels


def _stream_panels(m: ModelInspection, maps: Sequence[Tensor]) -> FigurePanels:
    """A panel for each stream, from the map to the parts of the state after each site."""
    panels: FigurePanels = []
    unfolded = m["unfolded"]
    if not unfolded.has_streams:
        return panels
    limit = _colour_limit(maps)
    for stream in range(min(maps[-1].shape[0], MOST_STREAMS)):
        rows = [
            (label, values[stream])
            for label, values in zip(unfolded.sources[1:], maps, strict=True)
            if stream < len(values)
        ]
        draw = partial(
            draw_matrix,
            values=_stack_rows([values for _, values in rows]),
            rows=[label for label, _ in rows],
            columns=unfolded.sources,
            limit=limit,
            row_title="after the read of",
            column_title="output of",
        )
        panels.append((f"{m.name}: stream {stream}", draw))
    return panels


def _pattern_panels(models: InspectedModels) -> FigurePanels:
    return [(m.name, partial(draw_mix_pattern, pattern=m["pattern"])) for m in models]


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as a matrix, zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _mean_panels(models: InspectedModels) -> FigurePanels:
    return _read_panels(models, lambda site: site.read_mean, signed=True)


def _deviation_panels(models: InspectedModels) -> FigurePanels:
    dynamic = [m for m in models if any(site.read_std.max() > _VARIES for site in m["mixing"])]
    return _read_panels(dynamic, lambda site: site.read_std, signed=False)


def _read_panels(
    models: InspectedModels, weights_of: Callable[[SiteMixing], Tensor], signed: bool
) -> FigurePanels:
    """A panel for each way: the weights of each mix. Then the same times the parts' mean norm."""
    panels: FigurePanels = []
    for m in models:
        mixes = [site for site in m["mixing"] if site.is_mix]
        columns: list[str] = max((site.parts for site in mixes), key=len, default=[])
        raw: dict[str, list[tuple[str, Tensor]]] = {}
        scaled: dict[str, list[tuple[str, Tensor]]] = {}
        for site in mixes:
            for label, weights in zip(site.inputs, weights_of(site), strict=True):
                way = way_of_input(label, raw)
                raw.setdefault(way, []).append((label, weights))
                scaled.setdefault(way, []).append((label, weights * site.part_norms))
        for rows_of_way, title, unit in (
            (raw, "", "weight"),
            (scaled, ", × mean norm", "weight × mean norm"),
        ):
            for way, rows in rows_of_way.items():
                values = _stack_rows([weights for _, weights in rows])
                draw = partial(
                    draw_matrix,
                    values=values,
                    rows=[label for label, _ in rows],
                    columns=columns[: values.shape[1]],
                    signed=signed,
                    column_title="weight of",
                    unit=unit,
                )
                panels.append((f"{m.name}: {way}{title}", draw))
    return panels


def _stream_weight_panels(models: InspectedModels) -> FigurePanels:
    """What each stream takes of the write before, and what the read carries between streams."""
    panels: FigurePanels = []
    for m in models:
        if not m["scales"][-1].has_streams:
            continue
        # Without those whose write is appended as a stream, as the first of MGR.
        has_gate = [site.gate is not None for site in m["scales"]]
        written = [len(site.write_mean) > 0 for site in m["mixing"]]
        chosen = has_gate if any(has_gate) else written
        sites = [site for site, is_chosen in zip(m["mixing"], chosen, strict=True) if is_chosen]
        streams = max((site.parts for site in sites), key=len)
        draw = partial(
            draw_matrix,
            values=_stack_rows([site.write_mean for site in sites]),
            rows=[site.label for site in sites],
            columns=streams,
            row_title="applied at",
            column_title="weight in",
        )
        panels.append((f"{m.name}: the write", draw))
        n = len(streams)
        square = [
            site
            for site in m["mixing"]
            if site.label != "readout" and tuple(site.carry_mean.shape) == (n, n)
        ]
        if all(torch.equal(site.carry_mean, torch.eye(n).double()) for site in square):
            continue  # streams do not mix
        draw = partial(
            draw_matrix,
            values=torch.stack([site.carry_mean.flatten() for site in square]),
            rows=[site.label for site in square],
            columns=[f"{a} ← {b}" for a in range(n) for b in range(n)],
            row_title="read of",
            column_title="next stream ← stream",
        )
        panels.append((f"{m.name}: between streams", draw))
    return panels


SECTIONS = [
    Section(
        "unfolded",
        "How each sub-layer's output reaches later inputs",
        "The weight of each output (columns) in each input (rows), mean over tokens. Pre-norm is a "
        "full triangle of ones. Marks at the bottom are attentions. 95 % of the weights, without "
        "the readout's and those that are zero, are within the colours' range. Hyper-Connections, "
        "Figures 7, 13 and 14.",
        ("unfolded",),
        _unfolded_panels,
    ),
    Section(
        "one_token",
        "How outputs reach inputs for one token, and how much this differs between tokens",
        "Inputs and streams of one token, chosen at random. A static method has no such picture. "
        "Hyper-Connections, Figures 13 and 14.",
        ("unfolded",),
        _one_token_panels,
    ),
    Section(
        "streams",
        "How each output reaches each stream",
        "The weight of each output in a stream after each read, mean over tokens. "
        "Hyper-Connections, Eq. 27-29 and Figure 13.",
        ("unfolded",),
        _stream_map_panels,
    ),
    Section(
        "pattern",
        "Which weights over blocks' outputs exist",
        "DenseFormer, Figures 1b and 2; SW-n of MUDD. Each way has these weights.",
        ("pattern",),
        _pattern_panels,
    ),
    Section(
        "mixing",
        "The weights that the method mixes with",
        "The weights in the method's equations: over blocks' outputs for DenseFormer and MUDD, "
        "over outputs for attention residuals, over streams for the others. First their mean over "
        "tokens, then the mean times the mean norm of what is mixed. DenseFormer, Figures 5, 8, "
        "15; MUDD, Figure 12.",
        ("mixing",),
        _mean_panels,
    ),
    Section(
        "mixing_deviation",
        "How much the method's weights differ between tokens",
        "Standard deviation over tokens. A static method has none. MUDD, Figure 13.",
        ("mixing",),
        _deviation_panels,
    ),
    Section(
        "stream_weights",
        "What streams take of each output and of each other",
        "B and A_r of hyper-connections, β of multi-gate residuals. Mean over tokens.",
        ("mixing", "scales"),
        _stream_weight_panels,
    ),
]
