"""All analyses of one model, as `crosslayer inspect` runs them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..connection import find_connections, format_spec
from ..evaluate.language_models import check_logits
from .ablation import (
    ablate_blocks,
    ablate_sublayers,
    ablate_ways,
    block_removals,
    find_depth_weights,
    prune_depth_weights,
    sublayer_removals,
    way_removals,
)
from .alarms import find_alarms
from .attention import HeadActivations, measure_head_activations
from .findings import find_map_findings
from .group_weights import compare_groups
from .lens import measure_block_gradients, measure_site_losses
from .mixing_summary import MixingAnalysis, find_mix_pattern
from .observation import ModelInputs, SiteVisit, observe_model, plain_connection
from .scales import ScaleAnalysis
from .scoring import has_next_tokens
from .similarity import CosineAnalysis, DistanceAnalysis
from .singular_values import measure_singular_values
from .source_ablation import MixWeight, ablate_sources, find_mix_weights
from .unfolding import UnfoldingAnalysis

# called with a step's name, the number of batches that it has taken and of those it will take
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class InspectionSubject:
    """What the analyses are given.

    Attributes:
        model: of a family that `connect` knows, connected or not.
        batches: with `input_ids` and `attention_mask`, or `pixel_values` and `labels`.
        sink_ids: see `measure_head_activations`.
        layer: the layer for `measure_head_activations` and `ablate_sources`; None for their
            defaults, the layer at three quarters of the depth and all layers.
        groups: the batches by the class of their images or the label of their texts; empty where
            these have none.
    """

    model: nn.Module
    batches: Sequence[ModelInputs]
    sink_ids: Collection[int] = ()
    layer: int | None = None
    groups: Mapping[str, Sequence[ModelInputs]] = dataclasses.field(default_factory=dict)


class SingleAnalysis(NamedTuple):
    """An analysis that runs the model itself.

    Attributes:
        run: computes the result, or None where the analysis does not apply to the model. Raises a
            ValueError where it cannot be done.
        passes: the number of passes over the batches.
        most_batches: how many batches it is given at most; None for all.
        scores: whether it scores the model by the next token, or by the class of an image.
    """

    run: Callable[[InspectionSubject], Any]
    passes: Callable[[InspectionSubject], int] = lambda subject: 1
    most_batches: int | None = None
    scores: bool = False


class DerivedAnalysis(NamedTuple):
    """An analysis of the results of other analyses, computed whenever these are.

    Attributes:
        sources: the names of the other analyses.
        run: called with their results, in this order.
    """

    sources: tuple[str, ...]
    run: Callable[..., Any]


def _removal_analysis(
    ablate: Callable[[Any, Any], Any], removals: Callable[[Any], Sized]
) -> SingleAnalysis:
    """An analysis that removes parts of the model, one at a time."""

    def count_passes(subject: InspectionSubject) -> int:
        parts = len(removals(subject.model))
        return 1 + parts if parts else 0

    def run(subject: InspectionSubject) -> Any:
        return ablate(subject.model, subject.batches)

    return SingleAnalysis(run, count_passes, scores=True)


def _measure_attention(subject: InspectionSubject) -> HeadActivations:
    return measure_head_activations(subject.model, subject.batches, subject.sink_ids, subject.layer)


def _chosen_layers(subject: InspectionSubject) -> list[int] | None:
    return None if subject.layer is None else [subject.layer]


def _find_mix_weights(subject: InspectionSubject) -> list[MixWeight]:
    return find_mix_weights(subject.model, subject.batches[:1], _chosen_layers(subject))


# Shares of the smallest weights that are set to zero: as in DenseFormer, closer where it matters.
PRUNED_SHARES = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
# These share one pass over the batches.
_OBSERVED_ANALYSES = {
    "mixing": MixingAnalysis,
    "unfolded": UnfoldingAnalysis,
    "cosines": CosineAnalysis,
    "distances": DistanceAnalysis,
    "scales": ScaleAnalysis,
}
_SINGLE_ANALYSES = {
    "lens": SingleAnalysis(
        lambda subject: measure_site_losses(subject.model, subject.batches), scores=True
    ),
    "gradients": SingleAnalysis(
        lambda subject: measure_block_gradients(subject.model, subject.batches), scores=True
    ),
    "attention": SingleAnalysis(_measure_attention),
    "ablation": _removal_analysis(ablate_sublayers, sublayer_removals),
    "ways": _removal_analysis(ablate_ways, way_removals),
    "blocks": _removal_analysis(ablate_blocks, block_removals),
    "sources": SingleAnalysis(
        lambda subject: ablate_sources(subject.model, subject.batches, _chosen_layers(subject)),
        passes=lambda subject: 2 + len(_find_mix_weights(subject)),
        most_batches=1,
        scores=True,
    ),
    "pruning": SingleAnalysis(
        lambda subject: prune_depth_weights(subject.model, subject.batches, PRUNED_SHARES),
        passes=lambda subject: len(PRUNED_SHARES) if find_depth_weights(subject.model) else 0,
        scores=True,
    ),
    "pattern": SingleAnalysis(
        lambda subject: find_mix_pattern(subject.model), passes=lambda subject: 0
    ),
    "singular_values": SingleAnalysis(
        lambda subject: measure_singular_values(subject.model), passes=lambda subject: 0
    ),
    "classes": SingleAnalysis(
        lambda subject: compare_groups(subject.model, subject.groups),
        passes=lambda subject: 0,  # they are over the groups
    ),
}
_DERIVED_ANALYSES = {
    "findings": DerivedAnalysis(("unfolded",), find_map_findings),
    "alarms": DerivedAnalysis(("scales", "mixing"), find_alarms),
}
ANALYSES = (*_OBSERVED_ANALYSES, *_SINGLE_ANALYSES)


@dataclass
class ModelInspection:
    """The analyses of one model.

    `inspection["cosines"]` is the result of an analysis.

    Attributes:
        name: of the model, for the reader.
        connection: its name and options.
        results: by the name of the analysis. Those that do not apply to the model are not there.
        not_done: the reason for each analysis that failed, by its name.
        run: the run that kept this model at one of its steps, for the reader.
        step: that step; None where it is not known.
        deviation: where this is the mean over seeds, the standard deviation of every number in it.
        seeds: those that this is the mean of.
    """

    name: str
    connection: str
    results: dict[str, Any]
    not_done: dict[str, str]
    run: str = ""
    step: int | None = None
    deviation: "ModelInspection | None" = None
    seeds: list["ModelInspection"] = dataclasses.field(default_factory=list)

    def __getitem__(self, analysis: str) -> Any:
        return self.results[analysis]

    def failures(self) -> list[str]:
        """A line for each reason in `not_done`, with the analyses that failed for it."""
        analyses: dict[str, list[str]] = {}
        for analysis, reason in self.not_done.items():
            analyses.setdefault(reason, []).append(analysis)
        return [f"{', '.join(names)}: {reason}" for reason, names in analyses.items()]


class _SeparateAnalysis:
    """An analysis that ends with its error, so that the others go on: a method without
    mixing_weights has those that need none.
    """

    def __init__(self, analysis: Any):
        self.analysis = analysis
        self.error = ""

    def visit_site(self, visit: SiteVisit) -> None:
        if self.error:
            return
        try:
            self.analysis.visit_site(visit)
        except ValueError as error:
            self.error = str(error)


class _CountedBatches(Sequence[ModelInputs]):
    """Batches that report each one that an analysis takes.

    Args:
        batches: of a subject.
        step: the name of the analysis.
        passes: that it makes over the batches.
        progress: as in `inspect_model`.
    """

    def __init__(self, batches: Sequence[ModelInputs], step: str, passes: int, progress: Progress):
        self.batches = batches
        self.step = step
        self.done = 0
        self.total = passes * len(batches)
        self.progress = progress
        if self.total:
            progress(step, 0, self.total)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: Any) -> Any:
        batch = self.batches[place]
        self.done += 1
        self.progress(self.step, self.done, self.total)
        return batch


def inspect_model(
    name: str,
    subject: InspectionSubject,
    analyses: Collection[str] = ANALYSES,
    progress: Progress = lambda step, done, total: None,
) -> ModelInspection:
    """The analyses of one model.

    Args:
        name: for the reader.
        subject: the model and its batches.
        analyses: names among `ANALYSES`. Those that follow from others are computed with these.
        progress: called where a step begins, and where it takes a batch.
    """
    connections = find_connections(subject.model)
    if connections:
        spec = format_spec(connections[0].name, connections[0].options)
    else:
        spec = plain_connection(subject.model)
    inspection = ModelInspection(name, spec, {}, {})
    _observe_subject(inspection, subject, analyses, progress)
    for key in _SINGLE_ANALYSES:
        if key in analyses:
            _run_single(inspection, key, subject, progress)
    for key, derived in _DERIVED_ANALYSES.items():
        if all(source in inspection.results for source in derived.sources):
            sources = [inspection[source] for source in derived.sources]
            inspection.results[key] = derived.run(*sources)
    return inspection


def _observe_subject(
    inspection: ModelInspection,
    subject: InspectionSubject,
    wanted: Collection[str],
    progress: Progress,
) -> None:
    observed = {
        key: _SeparateAnalysis(start())
        for key, start in _OBSERVED_ANALYSES.items()
        if key in wanted
    }
    if not observed:
        return
    batches = _CountedBatches(subject.batches, "connections", 1, progress)
    try:
        observe_model(subject.model, batches, list(observed.values()))
    except ValueError as error:
        inspection.not_done |= dict.fromkeys(observed, str(error))
        return
    for key, separate in observed.items():
        if separate.error:
            inspection.not_done[key] = separate.error
        else:
            inspection.results[key] = separate.analysis.result()


def _run_single(
    inspection: ModelInspection, key: str, subject: InspectionSubject, progress: Progress
) -> None:
    analysis = _SINGLE_ANALYSES[key]
    batches = subject.batches[: analysis.most_batches]
    try:
        passes = analysis.passes(subject)
        if analysis.scores and passes and batches and has_next_tokens(batches[0]):
            check_logits(subject.model)
        batches = _CountedBatches(batches, key, passes, progress)
        result = analysis.run(dataclasses.replace(subject, batches=batches))
    except ValueError as error:
        inspection.not_done[key] = str(error)
        return
    if result is not None:
        inspection.results[key] = result


def to_json_value(value: Any) -> Any:
    """Dataclasses as objects, tensors as lists, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields}
    if isinstance(value, Tensor):
        return to_json_value(value.tolist())
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
