"""What a trained connection does: the papers' analyses, for any model that `connect` knows.

    batches = [{"input_ids": ids, "attention_mask": mask}]
    unfolded = crosslayer.inspect.unfold_connections(model, batches)
    unfolded.mean                                # c_kj of every input k and source j
    crosslayer.inspect.find_map_findings(unfolded)   # what the papers saw in it, as numbers

A function is one analysis. Several analyses share one pass through `observe_model`.
"""

from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from .alarms import find_alarms
from .findings import MapFindings, find_map_findings
from .mixing_summary import MixingAnalysis, SiteMixing
from .observation import Analysis, ModelInputs, observe_model
from .scales import ScaleAnalysis, SiteScales
from .similarity import CosineAnalysis, CosineSimilarity, DepthDistances, DistanceAnalysis
from .unfolding import UnfoldedMap, UnfoldingAnalysis

_AnalysisT = TypeVar("_AnalysisT", bound=Analysis)

__all__ = [
    "MapFindings",
    "compare_depths",
    "find_alarms",
    "find_map_findings",
    "measure_cosines",
    "measure_scales",
    "observe_model",
    "summarise_mixing",
    "unfold_connections",
]


def summarise_mixing(model: nn.Module, batches: Iterable[ModelInputs]) -> list[SiteMixing]:
    """The weights that each site mixes with, their mean and deviation over tokens."""
    return _observe(MixingAnalysis(), model, batches).result()


def unfold_connections(model: nn.Module, batches: Iterable[ModelInputs]) -> UnfoldedMap:
    """How much of each sub-layer's output reaches each later input."""
    return _observe(UnfoldingAnalysis(), model, batches).result()


def measure_cosines(model: nn.Module, batches: Iterable[ModelInputs]) -> CosineSimilarity:
    """Cosines of inputs with those before them and with the embedding."""
    return _observe(CosineAnalysis(), model, batches).result()


def compare_depths(model: nn.Module, batches: Iterable[ModelInputs]) -> DepthDistances:
    """Angular distances of the last tokens and linear CKA, of all pairs of sites."""
    return _observe(DistanceAnalysis(), model, batches).result()


def measure_scales(model: nn.Module, batches: Iterable[ModelInputs]) -> list[SiteScales]:
    """Sizes of outputs, streams and gates at each site."""
    return _observe(ScaleAnalysis(), model, batches).result()


def _observe(analysis: _AnalysisT, model: nn.Module, batches: Iterable[ModelInputs]) -> _AnalysisT:
    observe_model(model, batches, [analysis])
    return analysis
