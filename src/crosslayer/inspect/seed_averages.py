"""Several seeds of one arm as one inspection: the mean of every number, and its deviation.

DenseFormer (arXiv 2402.02622), Figures 5, 8 and 15, are means over three seeds.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .alarms import Alarm
from .gates import GateStatistics, share_bins
from .group_weights import GroupWeights
from .inspection import ModelInspection

# Keys of a config that say where a model comes from, not what it is.
_ORIGIN_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")

Combine = Callable[[Tensor], Tensor]  # [models …] -> […]


def seed_mean(values: Tensor) -> Tensor:
    """[seeds …] -> […]."""
    return values.mean(0)


def seed_deviation(values: Tensor) -> Tensor:
    """The standard deviation of a sample, divided by the number of seeds − 1: [seeds …] -> […].

    NaN for a single seed.
    """
    if len(values) == 1:
        return torch.full_like(values[0], math.nan)
    return values.std(0) if values.numel() else values[0]


def describe_configuration(model: Any) -> str:
    """The configuration of a backbone and its connection. Seeds of one arm have the same."""
    config = {
        key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN_KEYS
    }
    return json.dumps(config, sort_keys=True, default=str)


def average_seeds(models: Sequence[ModelInspection], name: str) -> ModelInspection:
    """The mean over the inspections of several seeds, with their deviation and themselves.

    Of lists of texts and of alarms it has those of all seeds. One that not all seeds have says how
    many do. The number of an alarm is that of the seeds that have it.

    Args:
        models: at least two, of one configuration, which saw the same.
        name: of the mean.

    Raises:
        ValueError: the models are of different configurations.
    """
    first = models[0]
    if len(models) < 2 or any(model.connection != first.connection for model in models):
        given = ", ".join(f"{model.name} ({model.connection})" for model in models)
        raise ValueError(f"expected at least two seeds of one connection to average, got {given}")
    mean = _combine_inspections(models, name, seed_mean)
    deviation = _combine_inspections(models, name, seed_deviation)
    return dataclasses.replace(mean, deviation=deviation, seeds=list(models))


def average_groups(
    models: Sequence[ModelInspection], configurations: Sequence[str]
) -> list[ModelInspection]:
    """The models, those of one configuration and step averaged.

    Of an arm's models at several steps, only the runs that have all of these steps are averaged,
    so that every step is a mean over the same runs.

    Args:
        models: an inspection each.
        configurations: of `describe_configuration`, a model each.
    """
    arms: dict[tuple[str, str], dict[int | None, list[ModelInspection]]] = {}
    for model, configuration in zip(models, configurations, strict=True):
        steps = arms.setdefault((configuration, model.connection), {})
        steps.setdefault(model.step, []).append(model)
    connections = Counter(connection for _, connection in arms)
    averaged: list[ModelInspection] = []
    for (_, connection), steps in arms.items():
        first = next(iter(steps.values()))[0]
        label = connection
        if connections[connection] > 1:
            label += f" ({first.run or first.name}, …)"
        incomplete = _runs_without_some_steps(steps)
        for step, models_at_step in steps.items():
            seeds = [model for model in models_at_step if model.run not in incomplete]
            if len(seeds) < 2:
                averaged += models_at_step
                continue
            averaged += [model for model in models_at_step if model.run in incomplete]
            seeds.sort(key=attrgetter("run"))
            at_step = "" if step is None else f", step {step}"
            mean = average_seeds(seeds, f"{label}, mean of {len(seeds)}{at_step}")
            averaged.append(dataclasses.replace(mean, run=f"{label}, mean"))
    return averaged


def _runs_without_some_steps(steps: Mapping[int | None, Sequence[ModelInspection]]) -> set[str]:
    """The runs of an arm that lack a model at one of the arm's steps."""
    runs_of_steps = [
        {model.run for model in models} for step, models in steps.items() if step is not None
    ]
    if not runs_of_steps:
        return set()
    first = runs_of_steps[0]
    return first.union(*runs_of_steps) - first.intersection(*runs_of_steps)


def _combine_inspections(
    models: Sequence[ModelInspection], name: str, combine: Combine
) -> ModelInspection:
    first = models[0]
    shared = [key for key in first.results if all(key in model.results for model in models)]
    results = {}
    failed = dict.fromkeys(key for model in models for key in model.not_done)
    not_done = {key: _merge_reasons(models, key) for key in failed}
    for key in shared:
        try:
            results[key] = combine_values([model[key] for model in models], combine)
        except ValueError as error:
            not_done[key] = f"not averaged, {error}"
    return dataclasses.replace(first, name=name, results=results, not_done=not_done)


def combine_values(values: Sequence[Any], combine: Combine) -> Any:
    """Numbers and tensors combined, wherever they are in dataclasses, lists and mappings.

    Args:
        values: of the same structure, one for each seed. Anything else is taken from the first.
        combine: called with the numbers of all seeds, [seeds …]. Lists of whole numbers, which all
            seeds share, are taken from the first.

    Raises:
        ValueError: lists or tensors have different sizes.
    """
    first = values[0]
    if any(value is None for value in values):
        return None
    if dataclasses.is_dataclass(first):
        return _combine_fields(values, combine)
    if isinstance(first, dict):
        return {key: combine_values([value[key] for value in values], combine) for key in first}
    if isinstance(first, Tensor):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise ValueError(f"the seeds have values of different shapes, {sorted(shapes)}")
        return combine(torch.stack([value.double() for value in values]))
    if isinstance(first, str | bool):
        return first
    if isinstance(first, int | float):
        return _combine_numbers(values, combine)
    return _combine_lists(values, combine)


def _combine_lists(values: Sequence[list[Any]], combine: Combine) -> list[Any]:
    items = list(chain.from_iterable(values))
    if any(isinstance(item, Alarm) for item in items):
        return _merge_alarms(values, combine)
    if all(isinstance(item, int) for item in items):
        return list(values[0])
    if all(_is_text(item) for item in items):
        is_shared = all(value == values[0] for value in values)
        return values[0] if is_shared else _merge_texts(values)
    return [combine_values(list(of_seeds), combine) for of_seeds in zip(*values, strict=True)]


def _combine_fields(values: Sequence[Any], combine: Combine) -> Any:
    """Dataclasses of one kind."""
    first = values[0]
    if isinstance(first, GateStatistics):
        values = share_bins(values)
    if isinstance(first, GroupWeights) and any(value.names != first.names for value in values):
        raise ValueError("the seeds have other weights that differ between samples")
    combined = {
        field.name: combine_values([getattr(value, field.name) for value in values], combine)
        for field in dataclasses.fields(first)
    }
    if isinstance(first, GateStatistics):
        combined["limits"] = first.limits  # which do not vary
    return dataclasses.replace(first, **combined)


def _combine_numbers(values: Sequence[float], combine: Combine) -> float:
    """Whole where the numbers and the result are, like the number of a layer."""
    combined = float(combine(torch.tensor(values, dtype=torch.float64)))
    is_whole = combined.is_integer() and all(isinstance(value, int) for value in values)
    return int(combined) if is_whole else combined


def _is_text(value: Any) -> bool:
    """A text, or a tuple of texts, like a pair of sub-layers."""
    if isinstance(value, tuple):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str)


def _merge_reasons(models: Sequence[ModelInspection], analysis: str) -> str:
    """Why an analysis failed, and for how many seeds."""
    reasons = [[model.not_done[analysis]] if analysis in model.not_done else [] for model in models]
    return "; ".join(_merge_texts(reasons))


def _merge_alarms(lists: Sequence[list[Alarm]], combine: Combine) -> list[Alarm]:
    """The alarms of all lists, in their order."""
    found: dict[tuple[str, str], list[float]] = {}
    for alarm in chain.from_iterable(lists):
        found.setdefault((alarm.label, alarm.measure), []).append(alarm.value)
    return [
        Alarm(
            label + _count_note(len(values), len(lists)), measure, _combine_numbers(values, combine)
        )
        for (label, measure), values in found.items()
    ]


def _count_note(count: int, seeds: int) -> str:
    """How many seeds have something, where not all do."""
    return "" if count == seeds else f" ({count} of {seeds} seeds)"


def _merge_texts(lists: Sequence[list[Any]]) -> list[Any]:
    """The texts of all lists, in their order; how many lists have one, where not all do."""
    merged: list[Any] = []
    for text in dict.fromkeys(text for texts in lists for text in texts):
        note = _count_note(sum(text in texts for texts in lists), len(lists))
        if isinstance(text, tuple):
            merged.append((*text[:-1], text[-1] + note))
        else:
            merged.append(text + note)
    return merged
