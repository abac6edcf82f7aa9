"""What the papers saw in connection matrices, as numbers.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, section 4.5 and appendix F. The paper
describes what is seen in its figures and gives no thresholds. Those here are ours.
"""

import math
import re
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from .unfolding import UnfoldedMap

# A weight counts as absent below this share of the mean weight of its row or column.
ABSENT_SHARE = 0.1
# A weight is long-term where more layers than this lie from the source to the input.
NEAR_LAYERS = 1
# Rows with fewer sources have no bottom, middle and end.
MIN_SOURCES = 8


@dataclass
class MapFindings:
    """Numbers of one unfolded map, all from |c_kj|, where c_kj is the mean over tokens.

    Attributes:
        lambda_score: the mean weight of the first and the last quarter of sources over that of the
            half between, averaged over the inputs with at least `MIN_SOURCES` sources. 1 for
            pre-norm; above 1, near and bottom layers are preferred (the Λ shape). NaN where the
            model has no such input.
        embedding_in_readout: the weight of the embedding in the readout over the mean weight there.
        parallel_pairs: pairs of sub-layers of which the second hardly reads the first
            (c_{k,k−1} below `ABSENT_SHARE` of its row's mean), so that they could run in parallel.
        attention_share: the part of all weights on sources that is on attentions' outputs.
        attention_reach: the mean long-term weight of attentions' outputs over that of MLPs': 1 for
            pre-norm, below 1 where attentions have fewer long-term connections. NaN without such
            inputs, and in parallel blocks.
        wasted: sub-layers whose output reaches no input (its column's maximum is below
            `ABSENT_SHARE` of the median of the columns' maxima).
        opposite_signs: sources that two streams carry with opposite signs at some site, both
            weights at least `ABSENT_SHARE` of the site's largest. With the pair of streams whose
            smaller weight is the largest, like "0.mlp (streams 1, 3)".
    """

    lambda_score: float
    embedding_in_readout: float
    parallel_pairs: list[tuple[str, str]]
    attention_share: float
    attention_reach: float
    wasted: list[str]
    opposite_signs: list[str]


def find_map_findings(unfolded: UnfoldedMap) -> MapFindings:
    """The findings of a map. See `MapFindings`."""
    weights = unfolded.mean.abs()
    counts = unfolded.sources_before
    rows = [row[:count] for row, count in zip(weights, counts, strict=True)]
    readout = rows[-1]
    attention = ["attn" in label and "mlp" not in label for label in unfolded.sources]
    attention_share = math.nan
    if any(attention):
        attention_share = (weights[:, attention].sum() / weights.sum()).item()
    return MapFindings(
        lambda_score=_lambda_score(rows),
        embedding_in_readout=(readout[0] / readout.mean()).item(),
        parallel_pairs=_parallel_pairs(rows, unfolded),
        attention_share=attention_share,
        attention_reach=_attention_reach(weights, unfolded),
        wasted=_wasted_sources(weights, unfolded.sources),
        opposite_signs=_opposite_signs(unfolded) if unfolded.has_streams else [],
    )


def _lambda_score(rows: list[Tensor]) -> float:
    scores = []
    for row in rows:
        if len(row) < MIN_SOURCES:
            continue
        quarter = len(row) // 4
        ends = torch.cat([row[:quarter], row[-quarter:]]).mean()
        scores.append((ends / row[quarter:-quarter].mean().clamp_min(1e-30)).item())
    return statistics.fmean(scores) if scores else math.nan


def _attention_reach(weights: Tensor, unfolded: UnfoldedMap) -> float:
    """Mean |c_kj| of attentions over that of MLPs, more than `NEAR_LAYERS` layers apart."""
    source_layers = [_layer_of(label) for label in unfolded.sources]
    readout = max(source_layers) + 1
    by_kind: dict[str, list[Tensor]] = {"attn": [], "mlp": []}
    for label, row in zip(unfolded.inputs, weights, strict=True):
        layer = readout if label == "readout" else _layer_of(label)
        for number, source in enumerate(unfolded.sources):
            kind = source.partition(".")[2]
            if kind in by_kind and layer - source_layers[number] > NEAR_LAYERS:
                by_kind[kind].append(row[number])
    if not by_kind["attn"] or not by_kind["mlp"]:
        return math.nan
    attention = torch.stack(by_kind["attn"]).mean()
    mlp = torch.stack(by_kind["mlp"]).mean()
    return (attention / mlp.clamp_min(1e-30)).item()


def _layer_of(label: str) -> int:
    """Of a source: the embedding stands before layer 0."""
    layer = re.match(r"\d+", label)  # "3" of "3b.mlp", too
    return int(layer[0]) if layer else -1


def _parallel_pairs(rows: list[Tensor], unfolded: UnfoldedMap) -> list[tuple[str, str]]:
    pairs = []
    for label, row in zip(unfolded.inputs, rows, strict=True):
        if 2 <= len(row) < len(unfolded.sources) and row[-1] < ABSENT_SHARE * row.mean():
            pairs.append((unfolded.sources[len(row) - 1], label))
    return pairs


def _wasted_sources(weights: Tensor, sources: list[str]) -> list[str]:
    largest = weights.amax(0)
    limit = ABSENT_SHARE * largest[1:].median()
    return [name for name, weight in zip(sources[1:], largest[1:], strict=True) if weight < limit]


def _opposite_signs(unfolded: UnfoldedMap) -> list[str]:
    strongest = torch.zeros(len(unfolded.sources), dtype=torch.float64)
    found: dict[int, str] = {}
    for streams in unfolded.stream_means:  # [streams sources]
        limit = ABSENT_SHARE * streams.abs().max()
        highest, positive = streams.max(0)
        lowest, negative = streams.min(0)
        strength = torch.minimum(highest, -lowest)
        for source in (strength > torch.maximum(limit, strongest)).nonzero().flatten().tolist():
            strongest[source] = strength[source]
            pair = sorted((int(positive[source]), int(negative[source])))
            name = unfolded.sources[source]
            found[source] = f"{name} (streams {pair[0]}, {pair[1]})"
    return [found[source] for source in sorted(found)]
