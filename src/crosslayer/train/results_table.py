"""The table of a comparison: a row an arm, its mean over seeds, and the difference to pre-norm."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..intervals import Interval, MeanStd, mean_and_std, mean_interval
from .compare import Comparison
from .identity import PLACES_OF_DATA, distance_to_baseline
from .recipe import Arm, Recipe
from .run_state import RunResult


@dataclass
class TableRow:
    """One arm of the result table.

    Args:
        arm: its name.
        seeds: number of finished runs.
        parameters: number of parameters.
        extra: the connections' parameters, as a share of all others.
        loss: validation loss.
        metrics: bits per byte, accuracy, losses on other validation sets, … that all runs have
        difference: loss minus that of the PreNorm baseline, seed by seed; None without a baseline
            and of the baseline itself.
        speed: tokens (or images) per second.
        relative_speed: to the baseline's, 1 of the baseline itself; None without a baseline that
            was executed alike.
        relative_activations: stored activation memory, to the baseline's; None as above.
        paper: what the paper states.
        loss_at_same_rate: of seed 0 at the recipe's learning rate, where rates are searched.
    """

    arm: str
    seeds: int
    parameters: int
    extra: float
    loss: MeanStd
    metrics: dict[str, MeanStd]
    difference: Interval | None
    speed: float
    relative_speed: float | None
    relative_activations: float | None
    paper: dict[str, float]
    loss_at_same_rate: float | None = None


def result_table(comparison: Comparison) -> list[TableRow]:
    """A row for each arm with a finished run, in the recipe's order."""
    rows = []
    arms = comparison.arms
    baselines = find_baseline_arms(comparison.recipe, arms)
    for original, arm in zip(comparison.recipe.arms, arms, strict=True):
        runs = comparison.finished_runs(arm)
        if not runs:
            continue
        baseline = baselines[arm.name]
        baseline_runs = comparison.finished_runs(baseline) if baseline else {}
        pairs = [(runs[s], baseline_runs[s]) for s in sorted(runs.keys() & baseline_runs.keys())]
        first = next(iter(runs.values()))
        shared = [key for key in first.metrics if all(key in run.metrics for run in runs.values())]
        difference = relative_speed = relative_activations = None
        if pairs and not differing_execution(comparison, arm, baseline):
            relative_speed = statistics.mean(
                run.tokens_per_second / base.tokens_per_second for run, base in pairs
            )
            if baseline and _has_same_batch(comparison.recipe, arm, baseline):
                relative_activations = statistics.mean(
                    run.activation_bytes / base.activation_bytes for run, base in pairs
                )
        if pairs and arm is not baseline:
            difference = mean_interval([run.valid_loss - base.valid_loss for run, base in pairs])
        rows.append(
            TableRow(
                arm=arm.name,
                seeds=len(runs),
                parameters=first.parameters,
                extra=first.extra_parameters / (first.parameters - first.extra_parameters),
                loss=mean_and_std([run.valid_loss for run in runs.values()]),
                metrics={
                    key: mean_and_std([run.metrics[key] for run in runs.values()]) for key in shared
                },
                difference=difference,
                speed=statistics.mean(run.tokens_per_second for run in runs.values()),
                relative_speed=relative_speed,
                relative_activations=relative_activations,
                paper=arm.paper,
                loss_at_same_rate=comparison.rate_trials(original).get(1.0),
            )
        )
    return rows


def differences_by_step(comparison: Comparison) -> dict[str, dict[int, Interval]]:
    """Each arm's validation loss minus its baseline's, by the arm's name and by the step.

    At the steps that all runs of both arms have evaluated, seed by seed. An arm without such a
    step, like the baseline itself, is left out.
    """
    arms = comparison.arms
    baselines = find_baseline_arms(comparison.recipe, arms)
    found = {}
    for arm in arms:
        baseline = baselines[arm.name]
        if baseline is not None and arm is not baseline:
            found[arm.name] = _paired_differences(comparison, arm, baseline)
    return {name: differences for name, differences in found.items() if differences}


def _paired_differences(comparison: Comparison, arm: Arm, baseline: Arm) -> dict[int, Interval]:
    runs, references = comparison.finished_runs(arm), comparison.finished_runs(baseline)
    seeds = sorted(runs.keys() & references.keys())
    pairs = [(_loss_by_step(runs[seed]), _loss_by_step(references[seed])) for seed in seeds]
    steps = pairs[0][0] if pairs else {}
    return {
        step: mean_interval([losses[step] - reference[step] for losses, reference in pairs])
        for step in steps
        if all(step in losses and step in reference for losses, reference in pairs)
    }


def _loss_by_step(run: RunResult) -> dict[int, float]:
    return {int(step): loss for step, loss in run.curve}


def _has_same_batch(recipe: Recipe, arm: Arm, baseline: Arm) -> bool:
    """Whether a step of both arms has as many examples of one length, so that their activations can
    be compared.

    An arm may divide its batch by `accumulate`, to save memory.
    """
    own = recipe.settings(arm).data
    other = recipe.settings(baseline).data
    return (own.batch, own.context) == (other.batch, other.context)


def differing_execution(comparison: Comparison, arm: Arm, baseline: Arm | None) -> list[str]:
    """The execution options, like recompute, whose values differ among the runs of an arm and of
    its baseline. Options that the recipe sets for either are left out.

    They may change where a comparison is continued, and so can speeds and activations.
    """
    if baseline is None:
        return []
    given = arm.options.keys() | baseline.options.keys()
    runs = [*comparison.finished_runs(arm).values(), *comparison.finished_runs(baseline).values()]
    values: dict[str, set[Any]] = {}
    for run in runs:
        for name, value in run.execution.items():
            values.setdefault(name, set()).add(value)
    return [name for name, seen in values.items() if name not in given and len(seen) > 1]


def find_baseline_arms(recipe: Recipe, arms: Sequence[Arm]) -> dict[str, Arm | None]:
    """The PreNorm arm to compare each arm with, by the arm's name.

    It has the same data. Of those with the same backbone and length, or else of all, it is the
    first that differs in the fewest options. None where no PreNorm arm has the same data.

    A PreNorm arm is compared with itself if it is the first one of its data, or if another
    connection is compared with it. Any other, like a deeper model, is compared with one of these.

    Args:
        recipe: of the arms.
        arms: of a comparison.
    """
    options = {arm.name: recipe.settings(arm).to_options() for arm in arms}

    def nearest(arm: Arm, plain: list[Arm]) -> Arm | None:
        own = options[arm.name]
        same_data = [
            other
            for other in plain
            if all(options[other.name].get(key) == own.get(key) for key in PLACES_OF_DATA)
        ]
        distances = [distance_to_baseline(own, options[other.name]) for other in same_data]
        return same_data[distances.index(min(distances))] if distances else None

    plain = [arm for arm in arms if arm.connection == "prenorm"]
    compared = {arm.name: nearest(arm, plain) for arm in arms if arm not in plain}
    baselines = [
        arm
        for number, arm in enumerate(plain)
        if arm in compared.values() or nearest(arm, plain[:number]) is None
    ]
    compared |= {arm.name: nearest(arm, baselines) for arm in plain}
    return {arm.name: compared[arm.name] for arm in arms}
