"""What a trained connection does: the papers' analyses, for any model that `connect` knows.

    batches = [{"input_ids": ids, "attention_mask": mask}]
    unfolded = crosslayer.inspect.unfold_connections(model, batches)
    unfolded.mean                                # c_kj of every input k and source j
    crosslayer.inspect.find_patterns(unfolded)   # what the papers saw in it, as numbers

A function is one analysis. Several analyses share one pass through `observe_model`.
"""

from collections.abc import Iterable

from torch import nn

from .findings import MapFindings, find_patterns
from .mixing_summary import MixingAnalysis, SiteMixing
from .observation import Batch, observe_model
from .scales import ScaleAnalysis, SiteScales, find_alarms
from .similarity import (
    CosineAnalysis,
    CosineSimilarity,
    DepthDistances,
    DistanceAnalysis,
)
from .unfolding import UnfoldedMap, UnfoldingAnalysis

__all__ = [
    "MapFindings",
    "compare_depths",
    "find_alarms",
    "find_patterns",
    "measure_cosines",
    "measure_scales",
    "observe_model",
    "summarise_mixing",
    "unfold_connections",
]


def summarise_mixing(model: nn.Module, batches: Iterable[Batch]) -> list[SiteMixing]:
    """The weights that each site mixes with, their mean and deviation over tokens."""
    analysis = MixingAnalysis()
    observe_model(model, batches, [analysis])
    return analysis.result()


def unfold_connections(model: nn.Module, batches: Iterable[Batch]) -> UnfoldedMap:
    """How much of each sub-layer's output reaches each later input."""
    analysis = UnfoldingAnalysis()
    observe_model(model, batches, [analysis])
    return analysis.result()


def measure_cosines(model: nn.Module, batches: Iterable[Batch]) -> CosineSimilarity:
    """Cosines of inputs with those before them and with the embedding."""
    analysis = CosineAnalysis()
    observe_model(model, batches, [analysis])
    return analysis.result()


def compare_depths(model: nn.Module, batches: Iterable[Batch]) -> DepthDistances:
    """Angular distances of the last tokens and linear CKA, of all pairs of sites."""
    analysis = DistanceAnalysis()
    observe_model(model, batches, [analysis])
    return analysis.result()


def measure_scales(model: nn.Module, batches: Iterable[Batch]) -> list[SiteScales]:
    """Sizes of outputs, streams and gates at each site."""
    analysis = ScaleAnalysis()
    observe_model(model, batches, [analysis])
    return analysis.result()
