"""The table of a comparison: a row an arm, its mean over seeds, and the difference to pre-norm."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..intervals import Interval, mean_interval
from .compare import Comparison
from .recipe import Arm
from .settings import GROUP_OF_OPTION, Model


class MeanStd(NamedTuple):
    """A mean over seeds and its standard deviation, None for a single seed."""

    mean: float
    std: float | None


def mean_and_std(values: list[float]) -> MeanStd:
    """Mean and standard deviation of at least one value."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return MeanStd(statistics.mean(values), std)


@dataclass
class TableRow:
    """One arm of the result table.

    Args:
        arm: its name.
        seeds: number of finished runs.
        parameters: number of parameters.
        extra: share of the connections' parameters in the backbone's.
        loss: validation loss.
        metrics: bits per byte, accuracy, losses on other validation sets, … that all runs have
        difference: loss minus that of the PreNorm baseline, seed by seed; None without a baseline.
        speed: tokens (or images) per second.
        relative_speed: to the baseline's.
        relative_activations: stored activation memory, to the baseline's.
        paper: what the paper states.
        loss_at_same_rate: of seed 0 at the recipe's learning rate, where rates are searched.
        interval: of the difference's mean; None without a baseline or with a single seed.
    """

    arm: str
    seeds: int
    parameters: int
    extra: float
    loss: MeanStd
    metrics: dict[str, MeanStd]
    difference: MeanStd | None
    speed: float
    relative_speed: float | None
    relative_activations: float | None
    paper: dict[str, float]
    loss_at_same_rate: float | None = None
    interval: Interval | None = None


def result_table(comparison: Comparison) -> list[TableRow]:
    """A row for each arm with a finished run, in the recipe's order."""
    rows = []
    arms = comparison.arms
    for original, arm in zip(comparison.recipe.arms, arms, strict=True):
        runs = comparison.finished_runs(arm)
        if not runs:
            continue
        baseline = find_baseline_arm(arms, arm)
        baseline_runs = comparison.finished_runs(baseline) if baseline else {}
        pairs = [(runs[s], baseline_runs[s]) for s in sorted(runs.keys() & baseline_runs.keys())]
        first = next(iter(runs.values()))
        shared = [key for key in first.metrics if all(key in run.metrics for run in runs.values())]
        difference = interval = relative_speed = relative_activations = None
        if pairs:
            relative_speed = statistics.mean(
                run.tokens_per_second / base.tokens_per_second for run, base in pairs
            )
            relative_activations = statistics.mean(
                run.activation_bytes / base.activation_bytes for run, base in pairs
            )
            if arm is not baseline:
                differences = [run.valid_loss - base.valid_loss for run, base in pairs]
                difference = mean_and_std(differences)
                interval = mean_interval(differences) if len(differences) > 1 else None
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
                interval=interval,
            )
        )
    return rows


def find_baseline_arm(arms: Sequence[Arm], arm: Arm) -> Arm | None:
    """The PreNorm arm to compare with: one with the same backbone, or else the first."""
    candidates = [other for other in arms if other.connection == "prenorm"]
    options = _model_options(arm)
    options.pop("reallocate", None)  # MUDD's MLP widths belong to the method
    for candidate in candidates:
        if _model_options(candidate) == options:
            return candidate
    return candidates[0] if candidates else None


def _model_options(arm: Arm) -> dict[str, Any]:
    return {key: v for key, v in arm.options.items() if GROUP_OF_OPTION[key] is Model}
