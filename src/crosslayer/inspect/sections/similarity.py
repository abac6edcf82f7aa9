"""How alike the inputs at different depths are."""

from functools import partial

from ..figures import draw_lines, draw_matrix
from ..figures_connections import distance_panel, draw_cosines
from ..similarity import STATIC_DISTANCE
from .section import MOST_STREAMS, FigurePanels, InspectedModels, Section


def _cosine_panels(models: InspectedModels) -> FigurePanels:
    cosines = [(model.name, model["cosines"]) for model in models]
    return [
        ("with the input before", partial(draw_cosines, models=cosines, kind="adjacent")),
        ("with the embedding", partial(draw_cosines, models=cosines, kind="embedding")),
    ]


def _block_cosine_panels(models: InspectedModels) -> FigurePanels:
    lines = []
    labels = []
    for m in models:
        for way, values in m["cosines"].blocks.items():
            name = m.name if way == "input" else f"{m.name}: {way}"
            lines.append((name, values[:, 1].tolist()))
            labels.append(m["cosines"].block_labels)
    if not lines:
        return []
    draw = partial(
        draw_lines, labels=labels, lines=lines, y_title="cosine, median", x_title="layer"
    )
    return [("with the layer before", draw)]


def _embedding_panels(models: InspectedModels) -> FigurePanels:
    lines = [(m.name, m["cosines"].depths.tolist()) for m in models]
    labels = [m["cosines"].depth_labels for m in models]
    title = "cosine with the embedding, mean"
    draw = partial(draw_lines, labels=labels, lines=lines, y_title=title, x_title="after block")
    return [("what follows each block", draw)]


def _distance_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for m in models:
        distances = m["distances"]
        panels.append((m.name, distance_panel(distances)))
        for stream in range(min(len(distances.streams), MOST_STREAMS)):
            panels.append((f"{m.name}: stream {stream}", distance_panel(distances, stream)))
    return panels


def _cka_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    for m in models:
        d = m["distances"]
        draw = partial(
            draw_matrix,
            values=d.cka,
            rows=d.labels,
            columns=d.labels,
            limit=1.0,
            signed=False,
            column_title="input of",
            unit="CKA",
        )
        panels.append((m.name, draw))
    return panels


SECTIONS = [
    Section(
        "cosines",
        "How alike the inputs of neighbouring sub-layers are",
        "Median and the band from 5 to 95 % over tokens. Lower means that a sub-layer sees "
        "something new. Hyper-Connections, Figure 3.",
        ("cosines",),
        _cosine_panels,
    ),
    Section(
        "block_cosines",
        "How alike the inputs of neighbouring layers are",
        "One line for each of q, k, v and r where these are mixed separately. A line near 1 is a "
        "collapse. MUDD, Figure 6.",
        ("cosines",),
        _block_cosine_panels,
    ),
    Section(
        "embedding",
        "How much of the embedding each depth keeps",
        "The cosine of a token's vector after each block, or after its average, with its "
        "embedding. DenseFormer, Figures 6 and 9.",
        ("cosines",),
        _embedding_panels,
    ),
    Section(
        "distances",
        "Angular distance between depths, of the last token",
        "Between the inputs of two blocks (the stream r where q, k and v are mixed separately), "
        "and between each stream at two depths, once the output before is written. 0.5 is "
        "orthogonal. A stream whose mean distance is below "
        f"{STATIC_DISTANCE} is called static. "
        "Multi-Gate Residuals, Eq. 15, Figures 3, 8 and 9.",
        ("distances",),
        _distance_panels,
    ),
    Section(
        "cka",
        "Linear CKA between the inputs of sub-layers",
        "1 means that two depths represent the tokens alike, up to a rotation and a scale.",
        ("distances",),
        _cka_panels,
    ),
]
