"""Tables over several studies: of other depths, sizes or embeddings."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

from benchmarks.evidence.studies import BASELINE, Part, Plan, Study
from benchmarks.evidence.tables import (
    NOT_RUN,
    arm_cells,
    corrected_arms,
    describe_commands,
    describe_embeddings,
)
from crosslayer.inspect.training import PowerLaw, estimate_multiplier, fit_power_law
from crosslayer.inspect.training_summary import FLOPS_PER_PARAMETER
from crosslayer.number_texts import NOT_KNOWN, markdown_table

_FEWEST_SEEDS = 3  # of an arm whose losses are fitted


def difference_matrix(part: Part, studies: Mapping[str, Study]) -> str:
    """Each arm's difference to pre-norm in each study of a part that has results."""
    finished = [plan for plan in part.plans if plan.name in studies]
    # a study of all arms has a table of its own
    if not any(plan.arms for plan in finished):
        return f"Not run yet.\n\n{describe_commands(part)}"
    varied = {option for plan in part.plans for option in plan.options}
    rows = []
    for name in part.arms:
        cells = {"arm": name}
        for plan in finished:
            cells[describe_options(plan, varied)] = _difference_cell(studies[plan.name], name)
        rows.append(cells)
    texts = [markdown_table(tuple(rows[0]), rows)]
    corrections = []
    for plan in finished:
        tested, remaining = corrected_arms(studies[plan.name])
        if plan.part == part.title and tested > 1:
            corrections.append(f"- {describe_options(plan, varied)}: of {tested}, {remaining}.")
    if corrections:
        lines = "\n".join(corrections)
        texts.append(f"With Holm's correction for the arms that have an interval:\n\n{lines}")
    missing = [describe_options(plan, varied) for plan in part.plans if plan not in finished]
    if missing:
        texts.append(f"Not run yet: {'; '.join(missing)}.")
    return "\n\n".join([*texts, describe_commands(part)])


def describe_options(plan: Plan, options: Collection[str]) -> str:
    """What some options of a study are, like "8 layers, width 128"."""
    settings = plan.settings()
    words = [
        describe(settings[option]) for option, describe in SIZE_WORDS.items() if option in options
    ]
    return ", ".join(word for word in words if word)


def _describe_deviation(embedding_std: float | None) -> str:
    """Like "standard deviation 1", or nothing for the family's own."""
    return "" if embedding_std is None else f"standard deviation {embedding_std:g}"


def _describe_embedding_rate(scale: float) -> str:
    """Like "their rate × 50", or nothing for that of the model."""
    return "" if scale == 1 else f"their rate × {scale:g}"


SIZE_WORDS: dict[str, Callable[[Any], str]] = {
    "layers": "{} layers".format,
    "dim": "width {}".format,
    "steps": "{} steps".format,
    "warmup": "warm-up {:g}".format,
    "model_config": describe_embeddings,
    "embedding_std": _describe_deviation,
    "embedding_lr_scale": _describe_embedding_rate,
    "valid": " and ".join,
}


def _difference_cell(study: Study, name: str) -> str:
    """The loss and its rate, and below them the difference to pre-norm."""
    if not study.runs(name):
        return NOT_RUN
    cells = arm_cells(study, name)
    text = f"{cells['loss, best rate']} at {cells['rate']}"
    difference = cells["vs prenorm"]
    return text if difference == NOT_KNOWN else f"{text}<br>{difference}"


def multiplier_table(part: Part, studies: Mapping[str, Study]) -> str:
    """How much compute pre-norm would need for each arm's losses at each size.

    Compute is 6 × parameters × tokens. Pre-norm's losses of all sizes are fitted by a power law;
    "" before two sizes have three seeds, or where they do not fall. Its own row shows how well that
    fits.
    """
    varied = {option for plan in part.plans for option in plan.options}
    columns = {
        describe_options(plan, varied): studies[plan.name]
        for plan in part.plans
        if plan.name in studies
    }
    baseline = [_compute_and_losses(study, BASELINE) for study in columns.values()]
    if sum(1 for computes, _ in baseline if computes) < 2:
        return ""
    computes, losses = zip(*baseline, strict=True)
    law = fit_power_law(list(chain(*computes)), list(chain(*losses)))
    if law.b <= 0:
        return ""
    rows = []
    for name in part.arms:
        cells = {size: _multiplier_cell(law, study, name) for size, study in columns.items()}
        rows.append({"compute multiplier": name} | cells)
    return markdown_table(("compute multiplier", *columns), rows)


def _multiplier_cell(law: PowerLaw, study: Study, name: str) -> str:
    computes, losses = _compute_and_losses(study, name)
    if not computes:
        return NOT_KNOWN if study.runs(name) else NOT_RUN
    found = estimate_multiplier(law, computes, losses)
    return f"{found.value:.2f} × ({found.low:.2f} to {found.high:.2f})"


def _compute_and_losses(study: Study, name: str) -> tuple[list[float], list[float]]:
    """The compute of each compared run of an arm, and its loss; none before enough seeds ran."""
    runs = study.compared_runs(name).values()
    if len(runs) < _FEWEST_SEEDS:
        return [], []
    computes = [float(FLOPS_PER_PARAMETER * run.parameters * study.tokens) for run in runs]
    return computes, [run.valid_loss for run in runs]
