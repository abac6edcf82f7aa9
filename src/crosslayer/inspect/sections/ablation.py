"""What depths predict, and what a model loses without its parts."""

from functools import partial
from typing import Any

from ..figures import draw_lines, draw_matrix
from ..figures_ablation import (
    draw_ablation,
    draw_block_ablation,
    draw_pruning,
    draw_singular_values,
)
from .section import FigurePanels, InspectedModels, Section


def _lens_panels(models: InspectedModels) -> FigurePanels:
    losses = [(m.name, m["lens"].losses) for m in models]
    labels = [m["lens"].labels for m in models]
    draw = partial(draw_lines, labels=labels, lines=losses, y_title="loss, nats")
    return [("loss of the read-out at each site", draw)]


def _ablation_panels(models: InspectedModels) -> FigurePanels:
    done = [(m.name, m["ablation"]) for m in models]
    return [("without each sub-layer", partial(draw_ablation, models=done))]


def _block_panels(models: InspectedModels) -> FigurePanels:
    done = [(m.name, m["blocks"]) for m in models if m["blocks"].labels]
    if not done:  # no block can be removed, such as where MGR appends an output of each
        return []
    return [("without each block", partial(draw_block_ablation, models=done))]


def _way_panels(models: InspectedModels) -> FigurePanels:
    done = [(m.name, m["ways"]) for m in models]
    return [("without each way", partial(draw_ablation, models=done))]


def _source_panels(models: InspectedModels) -> FigurePanels:
    panels: FigurePanels = []
    limit = max(m["sources"].increase.abs().nan_to_num().max().item() for m in models)
    for m in models:
        found = m["sources"]
        draw = partial(
            draw_matrix,
            values=found.increase,
            rows=found.mixes,
            columns=found.sources,
            limit=limit,
            row_title="mix of",
            column_title="without the weight of",
            unit="increase of log perplexity, nats a token",
        )
        panels.append((m.name, draw))
    return panels


def _pruning_panels(models: InspectedModels) -> FigurePanels:
    done = [(m.name, m["pruning"]) for m in models]
    return [("without the smallest weights", partial(draw_pruning, models=done))]


def _singular_panels(models: InspectedModels) -> FigurePanels:
    """A panel for each matrix. Models of another family have other matrices."""
    by_matrix: dict[str, list[Any]] = {}
    for m in models:
        found = m["singular_values"]
        for name, values in zip(found.names, found.values, strict=True):
            by_matrix.setdefault(name, []).append((m.name, values))
    return [
        (name, partial(draw_singular_values, models=lines)) for name, lines in by_matrix.items()
    ]


SECTIONS = [
    Section(
        "lens",
        "What each depth predicts",
        "The loss where the input of each site passes the final norm and the head, as if it were "
        "the last. Where q, k and v are mixed separately, it is the stream r that does.",
        ("lens",),
        _lens_panels,
    ),
    Section(
        "ablation",
        "What the model loses without its sub-layers",
        "Increase of log perplexity where a sub-layer's output is zero, from one pass over the "
        "sequences for each sub-layer.",
        ("ablation",),
        _ablation_panels,
    ),
    Section(
        "blocks",
        "What the model loses without its blocks",
        "Perplexity without a block less that of the whole model, where the outputs of both its "
        "sub-layers are zero; one pass over the sequences for each block. A block without a bar "
        "lowers the perplexity when it is removed. MGR's first blocks have none either: an output "
        "that becomes a stream is not removed. "
        "Multi-Gate Residuals, Figure 4.",
        ("blocks",),
        _block_panels,
    ),
    Section(
        "ways",
        "What MUDD loses without its ways",
        "Increase of log perplexity where the input of one way (q, k, v or r) is the last block's "
        "output alone, as in a plain residual.",
        ("ways",),
        _way_panels,
    ),
    Section(
        "sources",
        "What the model loses without each weight of a mix",
        "Increase of log perplexity on the first batch where one weight is zero for all tokens; "
        "one pass over the batch for each weight. --layer chooses the weights of one layer. The "
        "diagonal is the block or sub-layer just before.",
        ("sources",),
        _source_panels,
        is_standard=False,
    ),
    Section(
        "pruning",
        "Perplexity without the smallest weights over depth",
        "The smallest α of DenseFormer, or of MUDD's static part, are set to zero over the whole "
        "model. DenseFormer, Figure 7.",
        ("pruning",),
        _pruning_panels,
        is_standard=False,
    ),
    Section(
        "singular_values",
        "Ranked singular values",
        "Those of each matrix that all blocks have, as a mean over blocks, and of the embedding. "
        "DenseFormer, Figure 13.",
        ("singular_values",),
        _singular_panels,
    ),
]
