"""The sections of the report of `crosslayer inspect`: what each picture shows, and its panels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .figures import (
    Draw,
    draw_ablation,
    draw_cosines,
    draw_distances,
    draw_gates,
    draw_lines,
    draw_matrix,
    draw_unfolded_map,
)
from .inspection import ModelInspection

MOST_STREAMS = 8  # panels of streams in a figure

Models = Sequence[ModelInspection]
Panels = list[tuple[str, Draw]]


@dataclass(frozen=True)
class Section:
    """A picture of the report.

    Attributes:
        name: of its files.
        title: of the section.
        text: what it shows, and the figures of the papers that show the same.
        draw_panels: the panels for some models; empty where there is nothing to draw.
    """

    name: str
    title: str
    text: str
    draw_panels: Callable[[Models], Panels]


def _unfolded_panels(models: Models) -> Panels:
    # One scale for all. The readout may be a sum of streams, so it does not set the scale.
    limit = max(model.unfolded.mean[:-1].abs().max().item() for model in models)
    return [(m.name, partial(draw_unfolded_map, unfolded=m.unfolded, limit=limit)) for m in models]


def _one_token_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        if m.connection == "prenorm":
            continue
        u = m.unfolded
        draw = partial(draw_matrix, values=u.one_token, rows=u.inputs, columns=u.sources)
        panels.append((f"{m.name}: one token", draw))
        if u.std.max() > 1e-6:
            draw = partial(
                draw_matrix, values=u.std, rows=u.inputs, columns=u.sources, signed=False
            )
            panels.append((f"{m.name}: deviation over tokens", draw))
    return panels


def _stream_map_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        means = m.unfolded.stream_means
        if not m.scales[-1].has_streams:
            continue
        sites = [site.label for site in m.mixing[: len(means)]]
        for stream in range(min(means[-1].shape[0], MOST_STREAMS)):
            rows = [
                (label, mean[stream])
                for label, mean in zip(sites, means, strict=True)
                if stream < len(mean)
            ]
            draw = partial(
                draw_matrix,
                values=_stack_rows([mean for _, mean in rows]),
                rows=[label for label, _ in rows],
                columns=m.unfolded.sources,
                names=("after", "output of"),
            )
            panels.append((f"{m.name}: stream {stream}", draw))
    return panels


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as a matrix, zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _read_panels(models: Models) -> Panels:
    """A panel a way: what each input reads, over the parts that its site mixes."""
    panels: Panels = []
    for m in models:
        if m.connection == "prenorm":  # all weights are 1
            continue
        for way in _way_names(m):
            labels, means, scaled = [], [], []
            for site in m.mixing:
                for label, mean in zip(site.inputs, site.read_mean, strict=True):
                    if _way_of(label) == way:
                        labels.append(label)
                        means.append(mean)
                        scaled.append(mean * site.part_norms)
            columns = [str(number) for number in range(max(map(len, means)))]
            names = ("input of", "part")
            for title, values in ((way, means), (f"{way}, × mean norm", scaled)):
                draw = partial(
                    draw_matrix,
                    values=_stack_rows(values),
                    rows=labels,
                    columns=columns,
                    names=names,
                )
                panels.append((f"{m.name}: {title}", draw))
    return panels


def _way_of(label: str) -> str:
    port = label.partition(".")[2]
    return port if port in ("q", "k", "v") else "inputs"


def _way_names(model: ModelInspection) -> list[str]:
    names: dict[str, None] = {}  # ordered
    for site in model.mixing:
        names |= dict.fromkeys(map(_way_of, site.inputs))
    return list(names)


def _cosine_panels(models: Models) -> Panels:
    cosines = [(model.name, model.cosines) for model in models]
    return [
        ("with the input before", partial(draw_cosines, models=cosines, kind="adjacent")),
        ("with the embedding", partial(draw_cosines, models=cosines, kind="embedding")),
    ]


def _distance_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        panels.append((m.name, partial(draw_distances, distances=m.distances)))
        for stream in range(min(len(m.distances.streams), MOST_STREAMS)):
            if len(m.distances.streams) > 1:
                draw = partial(draw_distances, distances=m.distances, stream=stream)
                panels.append((f"{m.name}: stream {stream}", draw))
    return panels


def _cka_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        d = m.distances
        draw = partial(
            draw_matrix,
            values=d.cka,
            rows=d.labels,
            columns=d.labels,
            limit=1.0,
            signed=False,
            names=("at", "at"),
        )
        panels.append((m.name, draw))
    return panels


def _scale_panels(models: Models) -> Panels:
    labels = [site.label for site in models[0].scales]
    outputs = [(m.name, [site.output_rms for site in m.scales]) for m in models]
    largest = [(m.name, [site.output_largest[0] for site in m.scales]) for m in models]
    streams = []
    for m in models:
        for part in range(min(len(m.scales[-1].stream_largest), MOST_STREAMS)):
            if m.scales[-1].has_streams or part == 0:
                values = [_at(site.stream_largest, part) for site in m.scales]
                streams.append((f"{m.name}: {part}", values))
    draw = partial(draw_lines, labels=labels)
    return [
        ("RMS of the output before", partial(draw, lines=outputs, name="RMS")),
        ("its largest magnitude", partial(draw, lines=largest, name="magnitude")),
        ("largest magnitude of streams", partial(draw, lines=streams, name="magnitude")),
    ]


def _at(values: Tensor, place: int) -> float:
    return values[place].item() if place < len(values) else float("nan")


def _gain_panels(models: Models) -> Panels:
    lines = []
    for m in models:
        if m.scales[-1].has_streams:
            for name in ("forward_gain", "backward_gain"):
                values = [getattr(site, name) for site in m.scales]
                known = [float("nan") if value is None else value for value in values]
                lines.append((f"{m.name}: {name.partition('_')[0]}", known))
    labels = [site.label for site in models[0].scales]
    if not lines:
        return []
    return [
        ("of the streams' mixing", partial(draw_lines, labels=labels, lines=lines, name="gain"))
    ]


def _gate_panels(models: Models) -> Panels:
    with_gates = [m for m in models if any(site.gate is not None for site in m.scales)]
    return [(m.name, partial(draw_gates, sites=m.scales)) for m in with_gates]


def _attention_panels(models: Models) -> Panels:
    lines = [(m.name, m.attention.active.tolist()) for m in models if m.attention is not None]
    if not lines:
        return []
    labels = [str(layer) for layer in range(max(len(values) for _, values in lines))]
    draw = partial(draw_lines, labels=labels, lines=lines, name="share of active heads")
    return [("active heads by layer", draw)]


def _pattern_panels(models: Models) -> Panels:
    """All heads of the middle layer."""
    panels: Panels = []
    for m in models:
        if m.attention is None:
            continue
        layer = len(m.attention.patterns) // 2
        for head, pattern in enumerate(m.attention.patterns[layer][:12]):
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


def _lens_panels(models: Models) -> Panels:
    losses = [(m.name, m.lens.losses) for m in models]
    gradients = [(m.name, m.gradients.rms) for m in models]
    layers = [str(layer) for layer in range(max(len(values) for _, values in gradients))]
    return [
        (
            "loss of the read-out at each site",
            partial(draw_lines, labels=models[0].lens.labels, lines=losses, name="nats a token"),
        ),
        (
            "gradient of each layer",
            partial(draw_lines, labels=layers, lines=gradients, name="√mean(g²)"),
        ),
    ]


def _ablation_panels(models: Models) -> Panels:
    panels: Panels = []
    done = [(m.name, m.ablation) for m in models if m.ablation is not None]
    if done:
        panels.append(("without each sub-layer", partial(draw_ablation, models=done)))
    ways = [(m.name, m.ways) for m in models if m.ways is not None]
    if ways:
        panels.append(("without each way", partial(draw_ablation, models=ways)))
    return panels


SECTIONS = [
    Section(
        "unfolded",
        "How each sub-layer's output reaches later inputs",
        "The weight of each output (columns) in each input (rows), mean over tokens. Pre-norm is a "
        "full triangle of ones. Marks at the bottom are attentions. Hyper-Connections, Figures 7, "
        "13 and 14.",
        _unfolded_panels,
    ),
    Section(
        "one_token",
        "The same for one token, and how much it differs between tokens",
        "A static method has no deviation. Hyper-Connections, Figure 13.",
        _one_token_panels,
    ),
    Section(
        "streams",
        "How each output reaches each stream",
        "The weight of each output in a stream after each site. Hyper-Connections, Eq. 27-29.",
        _stream_map_panels,
    ),
    Section(
        "mixing",
        "What the method itself mixes with",
        "The method's own weights over the parts of its state: blocks' outputs for DenseFormer, "
        "MUDD and attention residuals, streams for the others. Right of each: times the mean norm "
        "of the part. DenseFormer, Figures 5, 8, 15; MUDD, Figures 12 and 13.",
        _read_panels,
    ),
    Section(
        "cosines",
        "How alike the inputs of neighbouring sub-layers are",
        "Median and the band from 5 to 95 % over tokens. Lower means that a sub-layer sees "
        "something new. Hyper-Connections, Figure 3; MUDD, Figure 6; DenseFormer, Figures 6 and 9.",
        _cosine_panels,
    ),
    Section(
        "distances",
        "Angular distance between depths, of the last token",
        "Dark blocks are runs of sub-layers that change the input little. Multi-Gate Residuals, "
        "Eq. 15, Figures 3, 8 and 9.",
        _distance_panels,
    ),
    Section(
        "cka",
        "Linear CKA between the inputs of sub-layers",
        "1 means that two depths represent the tokens alike, up to a rotation and a scale.",
        _cka_panels,
    ),
    Section(
        "scales",
        "Sizes of outputs and streams",
        "Multi-Gate Residuals, Figures 2, 5, 6, 10, 11 and 12.",
        _scale_panels,
    ),
    Section(
        "gains",
        "Composite gain of the streams' mixing",
        "Largest row sum (forward) and column sum (backward) of the product of all mixing matrices "
        "so far. mHC keeps both at 1.",
        _gain_panels,
    ),
    Section(
        "gates",
        "Gates of writes",
        "Whiskers reach from the smallest to the largest value; boxes are mean quartiles over "
        "streams. Multi-Gate Residuals, Figures 7 and 13.",
        _gate_panels,
    ),
    Section(
        "attention",
        "Heads that attend to content",
        "A head is active at a token where its largest weight is neither on the first two "
        "positions nor on BOS, a full stop or a newline. MUDD, Figure 8.",
        _attention_panels,
    ),
    Section(
        "patterns",
        "Attention patterns of the middle layer",
        "Every head's weights over the first 32 tokens of the first sequence. MUDD, Figures 10 and "
        "11.",
        _pattern_panels,
    ),
    Section(
        "lens",
        "What each depth predicts, and what it learns from",
        "Left: each site's input through the final norm and the head. Right: the gradient of the "
        "loss. Multi-Gate Residuals, Figure 2.",
        _lens_panels,
    ),
    Section(
        "ablation",
        "What the model loses without its parts",
        "Increase of log perplexity where a sub-layer's output is zero (Multi-Gate Residuals, "
        "Figure 4), or where a stream of MUDD reads the last block alone.",
        _ablation_panels,
    ),
]
