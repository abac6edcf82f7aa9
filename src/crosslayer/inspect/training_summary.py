"""What runs show, as numbers: spikes, tokens to an equal loss, power laws and multipliers."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ..intervals import MeanCurve, average_curves
from .run_groups import (
    RunGroup,
    find_baseline_group,
    find_main_series,
    has_experts,
    split_by_backbone,
    split_by_data,
    split_by_series,
)
from .runs import TrainingRun
from .training import (
    ComputeMultiplier,
    PowerLaw,
    cost_to_loss,
    estimate_multiplier,
    find_spikes,
    fit_power_law,
    smooth_losses,
)

FLOPS_PER_PARAMETER = 6  # and token: 2 of the forward pass, 4 of the backward pass
_FEWEST_POINTS = 3  # of a validation curve that says where a loss is reached


@dataclass
class GroupedRuns:
    """What the views of training are given.

    Attributes:
        groups: of `group_runs`; at least one.
        decay: of the running mean of the training loss.
    """

    groups: list[RunGroup]
    decay: float = 0.99


@dataclass
class GroupSummary:
    """One group of runs as numbers. None where they are not known.

    Attributes:
        label: of the group.
        connection: its spec.
        data: what its data differ in from those of other groups; "" where all have the same.
        seeds: of its runs.
        parameters: of the model.
        loss: of the first validation set at the end, mean over seeds.
        loss_range: over seeds.
        spikes: of the training loss, over all seeds.
        speedup: the baseline's steps over the steps to its final loss ("1.8 × faster").
        seconds: of training, mean over seeds.
        training_speed: tokens (images) per second.
        inference_speed: examples per second.
        accuracy: mean over tasks, of the last evaluation.
    """

    label: str
    connection: str
    data: str
    seeds: list[int | None]
    parameters: float | None
    loss: float | None
    loss_range: tuple[float, float] | None
    spikes: int
    speedup: float | None
    seconds: float | None
    training_speed: float | None
    inference_speed: float | None
    accuracy: float | None


def summarise_training(runs: GroupedRuns) -> list[GroupSummary]:
    """The numbers of every group."""
    speedups: dict[str, Speedup] = {}
    data: dict[str, str] = {}
    for title, part in split_by_data(runs.groups):
        data |= {group.label: title for group in part}
        for _, of_backbone in split_by_backbone(part):
            speedups |= measure_speedups(of_backbone, runs.decay)
    tasks = shared_tasks(runs.groups)
    summaries = []
    for group in runs.groups:
        losses = group.values("valid_loss")
        summaries.append(
            GroupSummary(
                label=group.label,
                connection=group.first.connection,
                data=data[group.label],
                seeds=[run.seed for run in group.runs],
                parameters=_none_unless_finite(group.size),
                loss=_none_unless_finite(group.mean("valid_loss")),
                loss_range=(min(losses), max(losses)) if losses else None,
                spikes=sum(len(find_spikes(run.curve.losses)) for run in group.runs),
                speedup=speedups[group.label].times if group.label in speedups else None,
                seconds=_none_unless_finite(group.mean("seconds")),
                training_speed=_none_unless_finite(group.mean("tokens_per_second")),
                inference_speed=_none_unless_finite(group.mean("inference_speed")),
                accuracy=_none_unless_finite(mean_accuracy(group, tasks)),
            )
        )
    return summaries


def _none_unless_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def smooth_runs(groups: Sequence[RunGroup], decay: float) -> list[list[list[tuple[float, float]]]]:
    """(step, running mean of the training loss) of each run of each group.

    The weight of a loss falls to `decay` over the longest interval between two logged lines, so
    that runs that log at different intervals are smoothed alike.
    """
    interval = max((_log_interval(run) for group in groups for run in group.runs), default=1)
    curves = []
    for group in groups:
        of_group: list[list[tuple[float, float]]] = []
        for run in group.runs:
            curve = run.curve
            smoothed = smooth_losses(curve.losses, decay, curve.steps, interval)
            points = zip(curve.steps, smoothed, strict=True)
            of_group.append([(step, loss) for step, loss in points if math.isfinite(loss)])
        curves.append(of_group)
    return curves


def _log_interval(run: TrainingRun) -> float:
    steps = run.curve.steps
    if len(steps) < 2:
        return 1
    return statistics.median(after - step for step, after in itertools.pairwise(steps))


def compared_set(groups: Sequence[RunGroup]) -> str | None:
    """The validation set whose losses are compared; None where training losses are.

    It is the first set, if every finished run has been evaluated on it often enough. Other runs
    count where none has finished.
    """
    runs = [run for group in groups for run in group.runs]
    runs = [run for run in runs if not run.status] or runs
    name = next(iter(runs[0].curve.valid), None)
    if name is None:
        return None
    points = min(len(run.curve.valid.get(name, [])) for run in runs)
    return name if points >= _FEWEST_POINTS else None


def loss_name(valid_name: str | None) -> str:
    """What `loss_curves` are of, in words."""
    return "training loss (running mean)" if valid_name is None else f"loss on {valid_name}"


def loss_curves(
    groups: Sequence[RunGroup], decay: float, valid_name: str | None
) -> list[MeanCurve]:
    """Each group's loss over steps, mean over seeds; empty where it has none.

    Args:
        groups: of runs.
        decay: of the running mean of training losses.
        valid_name: of `compared_set`.
    """
    if valid_name is None:
        return [average_curves(of_group) for of_group in smooth_runs(groups, decay)]
    curves = []
    for group in groups:
        points = [run.curve.valid.get(valid_name, []) for run in group.runs]
        curves.append(average_curves([curve for curve in points if curve]))
    return curves


class Speedup(NamedTuple):
    """Where a group reaches its baseline's final loss.

    Args:
        baseline: the label of the baseline.
        times: the baseline's steps over the group's.
        curve: the group's loss over steps, mean over the seeds that its baseline has too.
        step: at which the group reaches the loss.
        loss: the baseline's final one, mean over the same seeds.
    """

    baseline: str
    times: float
    curve: MeanCurve
    step: float
    loss: float


def measure_speedups(groups: Sequence[RunGroup], decay: float) -> dict[str, Speedup]:
    """How many times fewer steps a group needs for its baseline's final loss, by its label.

    Means are over the seeds that both have. Groups that do not reach the loss, or have another
    number of steps and so another schedule, are left out, and so are those whose baseline has not
    reached its last step. Where no group is pre-norm, the first is the baseline.

    Args:
        groups: of one backbone and the same data.
        decay: of the running mean of training losses.
    """
    valid_name = compared_set(groups)
    speedups = {}
    for group in groups:
        baseline = find_baseline_group(groups, group) or groups[0]
        if baseline is group or _steps_of(baseline) != _steps_of(group):
            continue
        if baseline.first.status and _steps_of(baseline) is not None:
            continue
        curve, reference = loss_curves(_share_seeds(group, baseline), decay, valid_name)
        if not curve.x or not reference.x:
            continue
        loss = reference.mean[-1]
        step = cost_to_loss(curve.x, curve.mean, loss)
        if step:  # a pretrained model may have that loss before its first step
            times = reference.x[-1] / step
            speedups[group.label] = Speedup(baseline.label, times, curve, step, loss)
    return speedups


def _steps_of(group: RunGroup) -> Any:
    return group.first.settings.get("steps")


def _share_seeds(*groups: RunGroup) -> list[RunGroup]:
    """The groups with the seeds that all of them have; unchanged where there are none."""
    shared = set.intersection(*({run.seed for run in group.runs} for group in groups))
    if not shared:
        return list(groups)
    return [
        dataclasses.replace(group, runs=[run for run in group.runs if run.seed in shared])
        for group in groups
    ]


def shared_tasks(groups: Sequence[RunGroup]) -> set[str]:
    """The tasks that all runs with any have been evaluated on."""
    runs = [run for group in groups for run in group.runs]
    found = [set(run.tasks) for run in runs if run.tasks]
    return set.intersection(*found) if found else set()


def mean_accuracy(group: RunGroup, tasks: set[str]) -> float:
    """The mean over tasks and seeds of the last evaluation's accuracy, NaN without any."""
    runs = [run for run in group.runs if run.tasks]
    values = [run.tasks[task][-1][1] for run in runs for task in tasks]
    return statistics.fmean(values) if values else math.nan


@dataclass
class ScalingSeries:
    """Groups of one series with different sizes.

    Attributes:
        label: of the series.
        groups: by size; finished ones alone.
        is_main: whether the others are compared with it.
        power_law: of the loss over parameters; None with one size.
        multiplier: of compute over the main series; None for that itself, or where its law says
            nothing.
    """

    label: str
    groups: list[RunGroup]
    is_main: bool = False
    power_law: PowerLaw | None = None
    multiplier: ComputeMultiplier | None = None


def measure_scaling(groups: Sequence[RunGroup]) -> list[ScalingSeries]:
    """Power laws of loss over size, and compute multipliers over the main pre-norm series.

    Compute is 6 × parameters × tokens. Mixtures of experts are left out. The groups have the same
    data.
    """
    finished = [g for g in groups if math.isfinite(g.mean("valid_loss") + g.size)]
    dense = [group for group in finished if not has_experts(group)]
    if not dense:
        return []
    series = [
        ScalingSeries(label, sorted(members, key=attrgetter("size")))
        for label, members in split_by_series(dense).items()
    ]
    for one in series:
        one.power_law = _fit_runs(one, _run_size)
    main = find_main_series([group for one in series for group in one.groups])
    reference = next(one for one in series if one.label == main)
    reference.is_main = True
    law = _fit_runs(reference, _run_compute)
    for one in series:
        if one is not reference and law is not None and law.b > 0:
            one.multiplier = estimate_multiplier(law, *_points(one, _run_compute))
    return series


def _run_size(run: TrainingRun) -> float:
    """Parameters of a run's model."""
    return run.number("parameters")


def _run_compute(run: TrainingRun) -> float:
    """FLOPs of a run: 6 × parameters × tokens (images, or steps where no more is known)."""
    units, _ = run.units_per_step
    return FLOPS_PER_PARAMETER * _run_size(run) * units * run.settings.get("steps", 1)


def _points(
    series: ScalingSeries, size_of: Callable[[TrainingRun], float]
) -> tuple[list[float], list[float]]:
    runs = [run for group in series.groups for run in group.runs]
    return [size_of(run) for run in runs], [run.number("valid_loss") for run in runs]


def _fit_runs(series: ScalingSeries, size_of: Callable[[TrainingRun], float]) -> PowerLaw | None:
    sizes, losses = _points(series, size_of)
    return fit_power_law(sizes, losses) if len(set(sizes)) > 1 else None
