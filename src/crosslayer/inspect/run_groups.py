"""Runs of one arm with several seeds, arms of several sizes, and what they are compared with."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from ..number_texts import format_size
from ..train.identity import PLACES_OF_DATA, distance_to_baseline
from ..train.settings import CHANGEABLE_OPTIONS, DEFAULT_OPTIONS, ModelSettings
from .runs import TrainingRun

_SHAPE = ("layers", "dim")  # of a backbone
# MUDD's MLP widths belong to the method
_BACKBONE = tuple(option.name for option in fields(ModelSettings) if option.name != "reallocate")
_BATCH_OPTIONS = ("context", "batch")
# The keys of transformers' configs for the number of experts in a layer.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DATA_OPTIONS = tuple(sorted(PLACES_OF_DATA))


@dataclass
class RunGroup:
    """Runs that differ in their seed alone.

    Attributes:
        label: for the reader, different for each group.
        series: the label of groups that differ in their size alone.
        runs: at least one, of different seeds.
        duplicates: runs that were left out, as `runs` has one of the same seed.
    """

    label: str
    series: str
    runs: list[TrainingRun]
    duplicates: list[TrainingRun] = field(default_factory=list)

    @property
    def first(self) -> TrainingRun:
        return self.runs[0]

    @property
    def size(self) -> float:
        """The number of parameters; NaN where it is not known."""
        return self.mean("parameters")

    def values(self, name: str) -> list[float]:
        """A number of each run's result that has it."""
        known = [run.number(name) for run in self.runs]
        return [value for value in known if math.isfinite(value)]

    def mean(self, name: str) -> float:
        """The mean over seeds of a number of the result; NaN where no run has it."""
        values = self.values(name)
        return statistics.fmean(values) if values else math.nan


def group_runs(runs: Sequence[TrainingRun]) -> list[RunGroup]:
    """Runs with the same name, connection, settings and data as one group, in the given order.

    Settings that do not decide what is learned may differ, except those that decide the speed. A
    group that was executed otherwise than pre-norm's of the same backbone says so in its label. A
    run that has not finished, or has diverged, is a group by itself. Of runs with the same seed the
    first one counts: another is no further sample.
    """
    gathered: dict[str, list[TrainingRun]] = {}
    for run in runs:
        gathered.setdefault(_group_key(run), []).append(run)
    groups = list(gathered.values())
    labels = _distinct_labels(groups)
    series = _series_labels(groups)
    made = [
        _make_group(label, of_series, members)
        for label, of_series, members in zip(labels, series, groups, strict=True)
    ]
    return [replace(group, label=group.label + execution_note(made, group)) for group in made]


def _group_key(run: TrainingRun) -> str:
    """A text that the runs of one group share."""
    own = "" if run.settings and not run.status else str(run.folder)
    ignored = CHANGEABLE_OPTIONS | PLACES_OF_DATA if run.data_digest else CHANGEABLE_OPTIONS
    # The runs of a comparison have no settings of execution, and older ones no newer options.
    settings = {
        name: value
        for name, value in {**DEFAULT_OPTIONS, **run.settings}.items()
        if name not in ignored
    }
    execution = run.result.get("execution", {})
    parts = (run.name, run.connection, _loss_key(run), own, settings, execution)
    return json.dumps(parts, sort_keys=True)


def _loss_key(run: TrainingRun) -> tuple[str, list[str]]:
    """What runs share whose losses are of the same text: that of a run is of its first set."""
    return run.data_digest, list(run.settings.get("valid", {}))


def _make_group(label: str, series: str, members: Sequence[TrainingRun]) -> RunGroup:
    group = RunGroup(label, series, [])
    seeds: set[object] = set()
    for run in members:
        seed = run.folder if run.seed is None else run.seed
        if seed in seeds:
            group.duplicates.append(run)
        else:
            group.runs.append(run)
        seeds.add(seed)
    return group


def _distinct_labels(groups: Sequence[list[TrainingRun]]) -> list[str]:
    """Names, with their sizes, seeds or folders where several groups have the same name."""
    describe: list[Callable[[TrainingRun], str]] = [
        lambda run: run.name,
        lambda run: f"{run.name} {format_size(run.number('parameters'))}",
        lambda run: run.name if run.seed is None else f"{run.name}, seed {run.seed}",
        lambda run: f"{run.name} in {Path(*run.folder.parts[-2:])}",
        lambda run: f"{run.name} in {Path(*run.folder.parts[-3:])}",
        lambda run: f"{run.name} in {run.folder}",
    ]
    labels = []
    for group in groups:
        run = group[0]
        others = [other[0] for other in groups if other is not group]
        for name in describe:
            label = name(run)
            if (label, run.status) not in [(name(other), other.status) for other in others]:
                break
        labels.append(f"{label} ({run.status})" if run.status else label)
    return labels


def _series_labels(groups: Sequence[list[TrainingRun]]) -> list[str]:
    """The arm's name where it has several sizes; else the connection, of all arms with one size."""
    sizes: dict[str, set[float]] = {group[0].name: set() for group in groups}
    for group in groups:
        size = group[0].number("parameters")
        if math.isfinite(size):  # a run without a result has none
            sizes[group[0].name].add(size)
    families = {group[0].settings.get("family") for group in groups}
    labels = []
    for group in groups:
        run = group[0]
        label = run.connection or run.name
        if len(families) > 1:
            label += f" on {run.settings.get('family', 'an unknown backbone')}"
        labels.append(run.name if len(sizes[run.name]) > 1 else label)
    # an arm with one size, whose connection no other has, keeps its name
    names: dict[str, set[str]] = {}
    for label, group in zip(labels, groups, strict=True):
        names.setdefault(label, set()).add(group[0].name)
    return [next(iter(names[label])) if len(names[label]) == 1 else label for label in labels]


def find_baseline_group(groups: Sequence[RunGroup], group: RunGroup) -> RunGroup | None:
    """The pre-norm group of the same backbone, and of the same length if there is one, that differs
    in the fewest options; of several, as where learning rates were searched, the best. None without
    any.

    The groups have the same data.
    """
    settings = group.first.settings

    def distance(other: RunGroup) -> tuple[bool, bool, int, float]:
        final_loss = min(other.values("valid_loss"), default=math.inf)
        return *distance_to_baseline(settings, other.first.settings), final_loss

    candidates = [
        other
        for other in groups
        if other.first.connection == "prenorm" and backbone_of(other) == backbone_of(group)
    ]
    return min(candidates, key=distance, default=None)


def execution_note(groups: Sequence[RunGroup], group: RunGroup) -> str:
    """Like ", recompute=streams", where a group's speed cannot be compared with pre-norm's of the
    same backbone and data, because its runs were executed otherwise.
    """
    same_data = [other for other in groups if _loss_key(other.first) == _loss_key(group.first)]
    baseline = find_baseline_group(same_data, group)
    if baseline is None:
        return ""
    usual = baseline.first.result.get("execution", {})
    execution = group.first.result.get("execution", {})
    return "".join(
        f", {name}={value}" for name, value in execution.items() if value != usual.get(name, value)
    )


def backbone_of(group: RunGroup) -> str:
    """What groups of the same data share whose losses can be compared at any step: backbone and
    batches.
    """
    return _settings_key(group, (*_BACKBONE, *_BATCH_OPTIONS))


def _settings_key(group: RunGroup, names: Sequence[str]) -> str:
    return repr([_setting(group, name) for name in names])


def _setting(group: RunGroup, name: str) -> Any:
    """Of a run that is older than the option, the default; None where no settings are known."""
    settings = group.first.settings
    return settings.get(name, DEFAULT_OPTIONS.get(name)) if settings else None


def split_by_data(groups: Sequence[RunGroup]) -> list[tuple[str, list[RunGroup]]]:
    """Groups whose losses can be compared, with a title; it is empty where all have the same data.

    They have the same tokenizer, training and validation data. Digests say so; the names of the
    data do where a run has no digest. Of a run without settings neither is known: it stays with
    the others where these have the same data.
    """
    known = [group for group in groups if group.first.settings]
    has_digests = all(group.first.data_digest for group in known)
    parts: dict[str, list[RunGroup]] = {}
    for group in groups:
        if not group.first.settings:
            key = ""
        elif has_digests:
            key = repr(_loss_key(group.first))
        else:
            key = _settings_key(group, _DATA_OPTIONS)
        parts.setdefault(key, []).append(group)
    if len(parts.keys() - {""}) <= 1:
        return [("", list(groups))]
    firsts = [part[0] for part in parts.values()]
    titles = [_describe_differences(group, firsts, _DATA_OPTIONS) for group in firsts]
    if len(set(titles)) < len(titles):  # the content of a file has changed
        titles = [
            join_titles(title, f"digest {group.first.data_digest}")
            for title, group in zip(titles, firsts, strict=True)
        ]
    return list(zip(titles, parts.values(), strict=True))


def _describe_differences(group: RunGroup, others: Sequence[RunGroup], names: Sequence[str]) -> str:
    """The settings of a group in which it and others differ, like "tokenizer bytes"."""
    if not group.first.settings:
        return "unknown settings"
    words = []
    for name in names:
        if len({_settings_key(other, [name]) for other in others}) > 1:
            words.append(f"{name} {_format_setting(_setting(group, name))}")
    return ", ".join(words)


def _format_setting(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{name}: {own}" for name, own in value.items()) or "not given"
    return str(value)


def join_titles(*titles: str) -> str:
    """Those that are not empty, with a semicolon between."""
    return "; ".join(title for title in titles if title)


def split_by_backbone(groups: Sequence[RunGroup]) -> list[tuple[str, list[RunGroup]]]:
    """Groups with the same backbone, with a title; the title is empty where all have the same."""
    return _split_groups(groups, (*_BACKBONE, *_BATCH_OPTIONS))


def split_by_shape(groups: Sequence[RunGroup]) -> list[tuple[str, list[RunGroup]]]:
    """Groups with the same number of layers and width, with a title."""
    return _split_groups(groups, _SHAPE)


def _split_groups(
    groups: Sequence[RunGroup], names: Sequence[str]
) -> list[tuple[str, list[RunGroup]]]:
    parts: dict[str, list[RunGroup]] = {}
    for group in groups:
        parts.setdefault(_settings_key(group, names), []).append(group)
    if len(parts) == 1:
        return [("", list(groups))]
    firsts = [part[0] for part in parts.values()]
    others = [name for name in names if name not in _SHAPE]
    titles = []
    for members in parts.values():
        group = members[0]
        # a run without a result has no size
        size = next((one.size for one in members if math.isfinite(one.size)), math.nan)
        title = f"{describe_depth(group)}, {format_size(size)}"
        titles.append(join_titles(title, _describe_differences(group, firsts, others)))
    return list(zip(titles, parts.values(), strict=True))


def find_main_series(groups: Sequence[RunGroup]) -> str:
    """The series of the pre-norm groups that most other groups have as their baseline."""
    baselines = [find_baseline_group(groups, group) for group in groups]
    votes = Counter(
        baseline.series
        for group, baseline in zip(groups, baselines, strict=True)
        if baseline is not None and baseline is not group
    )
    if votes:
        return votes.most_common(1)[0][0]
    plain = (group.series for group in groups if group.first.connection == "prenorm")
    return next(plain, groups[0].series)


def split_by_series(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """The groups of each series, by its label."""
    members: dict[str, list[RunGroup]] = {}
    for group in groups:
        members.setdefault(group.series, []).append(group)
    return members


def describe_depth(group: RunGroup) -> str:
    """Like "24 layers"."""
    return f"{group.first.settings.get('layers', '?')} layers"


def has_experts(group: RunGroup) -> bool:
    """Whether the backbone is a mixture of experts, as its config counts them."""
    settings = group.first.settings
    config = dict(settings.get("model_config", {}))
    family = settings.get("family")
    if family in CONFIG_MAPPING:
        config = vars(CONFIG_MAPPING[family]()) | config
    return any(config.get(name) for name in _EXPERT_COUNTS)
