"""A run's checkpoints as a time axis."""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ..figures import draw_lines, draw_matrix
from ..inspection import ModelInspection
from ..mixing_summary import way_of_input
from ..over_steps import distance_to_last, scalars_over_steps, split_runs, weights_over_steps
from .section import FigurePanels, InspectedModels, Section

# Inputs whose weights are drawn: of each way, this many, evenly spaced over depth.
_INPUTS_OF_WAY = 3
# Weights whose deviation over the steps is smaller do not change.
_SMALLEST_CHANGE = 1e-6
# Numbers that are drawn, and their names.
_SCALARS = {
    "findings.lambda_score": "Λ score",
    "findings.embedding_in_readout": "weight of the embedding in the readout",
    "findings.attention_share": "share of weights on attentions",
    "ablation.loss": "loss (nats)",
}


def _weight_panels(models: InspectedModels) -> FigurePanels:
    """A panel for each chosen input of each run, and one line for each run of all weights."""
    runs = split_runs(models)
    panels: FigurePanels = []
    lines = []
    labels = []
    for run, of_run in runs.items():
        distances = distance_to_last(of_run)
        if not any(distances):  # no weight changes, as in pre-norm
            continue
        for label in _choose_inputs(of_run):
            weights = weights_over_steps(of_run, label)
            draw = partial(
                draw_matrix,
                values=weights,
                rows=_part_labels(of_run[-1], label),
                columns=_step_labels(of_run),
                limit=_second_largest(weights),
                row_title="part",
                column_title="step",
            )
            panels.append((f"{run}: into {label}", draw))
        lines.append((run, distances))
        labels.append(_step_labels(of_run))
    if not lines:
        return []
    name = "‖w − w at the end‖ / ‖w at the end‖"
    draw = partial(draw_lines, labels=labels, lines=lines, y_title=name, x_title="step")
    return [*panels, ("all weights: distance to the last step", draw)]


def _scalar_panels(models: InspectedModels) -> FigurePanels:
    """A panel for each number, with a line for each run."""
    runs = split_runs(models)
    scalars = {run: scalars_over_steps(of_run) for run, of_run in runs.items()}
    panels: FigurePanels = []
    for path, name in _SCALARS.items():
        lines = []
        labels = []
        for run, of_run in runs.items():
            values = scalars[run].get(path, [])
            if any(map(math.isfinite, values)):
                lines.append((run, values))
                labels.append(_step_labels(of_run))
        if lines:
            draw = partial(draw_lines, labels=labels, lines=lines, y_title=name, x_title="step")
            panels.append((name, draw))
    return panels


def _step_labels(models: Sequence[ModelInspection]) -> list[str]:
    return [str(model.step or 0) for model in models]


def _part_labels(model: ModelInspection, input_label: str) -> list[str]:
    return next(site.parts for site in model["mixing"] if input_label in site.inputs)


def _second_largest(weights: Tensor) -> float:
    """The largest weight but those of one part, which may be far larger than all others."""
    of_parts = weights.abs().amax(1).sort(descending=True).values
    return of_parts[1].item() if len(of_parts) > 1 else of_parts[0].item()


def _choose_inputs(models: Sequence[ModelInspection]) -> list[str]:
    """Inputs of each way whose weights change over the steps, evenly spaced over depth."""
    inputs: dict[str, list[str]] = {}
    for site in models[-1]["mixing"]:
        for label in site.inputs:
            if weights_over_steps(models, label).std(1).max() > _SMALLEST_CHANGE:
                inputs.setdefault(way_of_input(label, inputs), []).append(label)
    chosen = []
    for labels in inputs.values():
        last = len(labels) - 1
        shown = min(len(labels), _INPUTS_OF_WAY)
        places = {round(last * (number + 1) / shown) for number in range(shown)}
        chosen += [labels[place] for place in sorted(places)]
    return chosen


SECTIONS = [
    Section(
        "steps",
        "Weights over the steps of training",
        "The weights that inputs at several depths mix with, at each kept step of the run, and how "
        "far all weights are from those at the end. The colour scale leaves out the part with the "
        "largest weight. DenseFormer, Figure 10.",
        ("mixing",),
        _weight_panels,
    ),
    Section(
        "step_numbers",
        "Numbers over the steps of training",
        "The findings of the table above at each kept step of the run, and the loss where the "
        "section ablation is drawn.",
        ("unfolded",),
        _scalar_panels,
    ),
]
