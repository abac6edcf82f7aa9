"""How alike the inputs at different depths are."""

from functools import partial

from ..figures import draw_cosines, draw_distances, draw_matrix
from .section import MOST_STREAMS, Models, Panels, Section


def _cosine_panels(models: Models) -> Panels:
    cosines = [(model.name, model["cosines"]) for model in models]
    return [
        ("with the input before", partial(draw_cosines, models=cosines, kind="adjacent")),
        ("with the embedding", partial(draw_cosines, models=cosines, kind="embedding")),
    ]


def _distance_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        panels.append((m.name, partial(draw_distances, distances=m["distances"])))
        for stream in range(min(len(m["distances"].streams), MOST_STREAMS)):
            if len(m["distances"].streams) > 1:
                draw = partial(draw_distances, distances=m["distances"], stream=stream)
                panels.append((f"{m.name}: stream {stream}", draw))
    return panels


def _cka_panels(models: Models) -> Panels:
    panels: Panels = []
    for m in models:
        d = m["distances"]
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


SECTIONS = [
    Section(
        "cosines",
        "How alike the inputs of neighbouring sub-layers are",
        "Median and the band from 5 to 95 % over tokens. Lower means that a sub-layer sees "
        "something new. Hyper-Connections, Figure 3; MUDD, Figure 6; DenseFormer, Figures 6 and 9.",
        ("cosines",),
        _cosine_panels,
    ),
    Section(
        "distances",
        "Angular distance between depths, of the last token",
        "Dark blocks are runs of sub-layers that change the input little. Multi-Gate Residuals, "
        "Eq. 15, Figures 3, 8 and 9.",
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
