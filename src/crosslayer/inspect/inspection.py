"""All analyses of one model, as `crosslayer inspect` runs them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..connection import find_connections, format_spec
from .ablation import SublayerAblation, ablate_sublayers, ablate_ways
from .attention import HeadActivations, measure_head_activations
from .findings import MapFindings, find_patterns
from .lens import BlockGradients, SiteLosses, measure_block_gradients, measure_site_losses
from .mixing_summary import MixingAnalysis, SiteMixing
from .observation import Batch, observe_model
from .scales import ScaleAnalysis, SiteScales, find_alarms
from .similarity import CosineAnalysis, CosineSimilarity, DepthDistances, DistanceAnalysis
from .unfolding import UnfoldedMap, UnfoldingAnalysis

Progress = Callable[[str], None]  # called with the name of each step before it starts


@dataclass
class ModelInspection:
    """All analyses of one model. None where an analysis does not apply.

    Attributes:
        name: of the model, for the reader.
        connection: its name and options.
        not_done: a line for each analysis that does not apply, with the reason.
    """

    name: str
    connection: str
    mixing: list[SiteMixing]
    unfolded: UnfoldedMap
    findings: MapFindings
    cosines: CosineSimilarity
    distances: DepthDistances
    scales: list[SiteScales]
    alarms: list[str]
    lens: SiteLosses
    gradients: BlockGradients
    attention: HeadActivations | None
    ablation: SublayerAblation | None
    ways: SublayerAblation | None
    not_done: list[str]


def inspect_model(
    name: str,
    model: nn.Module,
    batches: Sequence[Batch],
    sink_ids: set[int] | None = None,
    ablate: bool = True,
    progress: Progress = lambda step: None,
) -> ModelInspection:
    """Every analysis of one language model.

    Args:
        name: for the reader.
        model: of a family that `connect` knows, connected or not.
        batches: with `input_ids` and `attention_mask`.
        sink_ids: see `measure_head_activations`.
        ablate: remove each sub-layer in turn, which takes one pass over the batches a sub-layer.
        progress: called with the name of each step before it starts.
    """
    connections = find_connections(model)
    spec = "prenorm"
    if connections:
        spec = format_spec(connections[0].name, connections[0].options)
    mixing, unfolding, cosines, distances, scales = (
        MixingAnalysis(),
        UnfoldingAnalysis(),
        CosineAnalysis(),
        DistanceAnalysis(),
        ScaleAnalysis(),
    )
    progress("connections")
    observe_model(model, batches, [mixing, unfolding, cosines, distances, scales])
    not_done = []
    attention = ablation = ways = None
    progress("lens")
    lens = measure_site_losses(model, batches)
    progress("gradients")
    gradients = measure_block_gradients(model, batches)
    progress("attention")
    try:
        attention = measure_head_activations(model, batches, sink_ids or set())
    except ValueError as error:
        not_done.append(f"attention: {error}")
    if ablate:
        progress("ablation")
        ablation = ablate_sublayers(model, batches)
        if connections and connections[0].name == "mudd":
            ways = ablate_ways(model, batches)
    else:
        not_done.append("ablation: switched off")
    unfolded, sites = unfolding.result(), scales.result()
    return ModelInspection(
        name=name,
        connection=spec,
        mixing=mixing.result(),
        unfolded=unfolded,
        findings=find_patterns(unfolded),
        cosines=cosines.result(),
        distances=distances.result(),
        scales=sites,
        alarms=find_alarms(sites, mixing.result()),
        lens=lens,
        gradients=gradients,
        attention=attention,
        ablation=ablation,
        ways=ways,
        not_done=not_done,
    )


def to_json_value(value: Any) -> Any:
    """Dataclasses as objects, tensors as lists, numbers that are not finite as null."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields}
    if isinstance(value, Tensor):
        return to_json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
