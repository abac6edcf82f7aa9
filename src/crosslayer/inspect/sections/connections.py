"""How outputs reach later inputs, and what a connection itself mixes with."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..figures import draw_matrix, draw_unfolded_map
from ..inspection import ModelInspection
from .section import MOST_STREAMS, Models, Panels, Section


def _unfolded_panels(models: Models) -> Panels:
    # One scale for all. The readout may be a sum of streams, so it does not set the scale.
    limit = max(model["unfolded"].mean[:-1].abs().max().item() for model in models)
    return [
        (m.name, partial(draw_unfolded_map, unfolded=m["unfolded"], limit=limit)) for m in models
    ]


def _one_token_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        if m.connection == "prenorm":
            continue
        u = m["unfolded"]
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
        means = m["unfolded"].stream_means
        if not m["scales"][-1].has_streams:
            continue
        sites = [site.label for site in m["mixing"][: len(means)]]
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
                columns=m["unfolded"].sources,
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
            for site in m["mixing"]:
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
    for site in model["mixing"]:
        names |= dict.fromkeys(map(_way_of, site.inputs))
    return list(names)


SECTIONS = [
    Section(
        "unfolded",
        "How each sub-layer's output reaches later inputs",
        "The weight of each output (columns) in each input (rows), mean over tokens. Pre-norm is a "
        "full triangle of ones. Marks at the bottom are attentions. Hyper-Connections, Figures 7, "
        "13 and 14.",
        ("unfolded",),
        _unfolded_panels,
    ),
    Section(
        "one_token",
        "The same for one token, and how much it differs between tokens",
        "A static method has no deviation. Hyper-Connections, Figure 13.",
        ("unfolded",),
        _one_token_panels,
    ),
    Section(
        "streams",
        "How each output reaches each stream",
        "The weight of each output in a stream after each site. Hyper-Connections, Eq. 27-29.",
        ("unfolded", "mixing", "scales"),
        _stream_map_panels,
    ),
    Section(
        "mixing",
        "What the method itself mixes with",
        "The method's own weights over the parts of its state: blocks' outputs for DenseFormer, "
        "MUDD and attention residuals, streams for the others. Right of each: times the mean norm "
        "of the part. DenseFormer, Figures 5, 8, 15; MUDD, Figures 12 and 13.",
        ("mixing",),
        _read_panels,
    ),
]
