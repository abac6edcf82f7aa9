"""How alike the inputs of sub-layers are over depth.

Papers: Hyper-Connections (arXiv 2409.19606, Figure 3), MUDDFormer (arXiv 2502.12170, Figure 6),
DenseFormer (arXiv 2402.02622, Figures 6 and 9), Multi-Gate Residuals (arXiv 2605.23259, Eq. 15,
Figures 3, 8 and 9).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import RunningMoments, TokenSample
from .observation import SiteVisit, site_label

# Tokens whose inputs are kept for CKA, which compares every pair of them.
_CKA_TOKENS = 512
# A stream whose mean angular distance over all pairs of depths is smaller is called static. The
# paper says "near-zero" (MGR, section 4.2) and states no threshold: this is 3.6 degrees.
STATIC_DISTANCE = 0.02


@dataclass
class CosineSimilarity:
    """Cosines over tokens between what sub-layers and layers are given, before the norms.

    What a sub-layer is given is its input, or the stream r where q, k and v are mixed separately.

    Attributes:
        labels: of the sites.
        adjacent: quantiles (5 %, 50 %, 95 %) of the cosine with what the sub-layer before is given,
            [sites 3]; NaN at the first.
        embedding: quantiles of the cosine with the embedding, [sites 3].
        block_labels: of the layers that `blocks` compares, from the second on.
        blocks: for each way ("input", or q, k, v and r where these are mixed separately), quantiles
            of the cosine of what a layer is given with what the layer before is given,
            [layers − 1 3].
        depth_labels: "X_0", and "Y_i" for what follows block i.
        depths: mean cosine with the embedding of what follows each block, [layers + 1].
    """

    labels: list[str]
    adjacent: Tensor
    embedding: Tensor
    block_labels: list[str]
    blocks: dict[str, Tensor]
    depth_labels: list[str]
    depths: Tensor


class CosineAnalysis:
    """Cosines of inputs with those before them and with the embedding."""

    def __init__(self) -> None:
        self._adjacent: dict[str, TokenSample] = {}
        self._embedding: dict[str, TokenSample] = {}
        self._before: Tensor | None = None
        self._blocks: dict[str, dict[str, TokenSample]] = {}
        self._block_before: dict[str, Tensor] = {}
        self._hidden_before = torch.zeros(0)
        self._depths: list[RunningMoments] = []
        self._y_0 = torch.zeros(0)

    def visit_site(self, visit: SiteVisit) -> None:
        if visit.connection.site.index == 0:
            self._before = None
            self._y_0 = visit.parts[:, : visit.connection.fractions].flatten(-2)
        label = site_label(visit.connection)
        x = visit.hidden
        missing = torch.full_like(x[:, 0], math.nan)
        adjacent = missing if self._before is None else _cosine(x, self._before)
        self._adjacent.setdefault(label, TokenSample()).add(adjacent)
        self._embedding.setdefault(label, TokenSample()).add(_cosine(x, self._y_0))
        self._before = x
        if visit.connection.opens_layer:
            self._visit_block(visit)

    def _visit_block(self, visit: SiteVisit) -> None:
        layer = visit.connection.site.layer
        if layer == len(self._depths):
            self._depths.append(RunningMoments())
        self._depths[layer].add(_cosine(visit.hidden, self._y_0))
        if layer and not visit.connection.is_readout:
            for way, x in visit.ways.items():
                # The first layer is given one input, and so are those without an average.
                before = self._block_before.get(way, self._hidden_before)
                layers = self._blocks.setdefault(way, {})
                layers.setdefault(str(layer), TokenSample()).add(_cosine(x, before))
        self._block_before = visit.ways
        self._hidden_before = visit.hidden

    def result(self) -> CosineSimilarity:
        labels = list(self._adjacent)
        layers = [str(layer) for layer in range(1, len(self._depths) - 1)]
        depths = [moments.mean for moments in self._depths]
        return CosineSimilarity(
            labels=labels,
            adjacent=torch.stack([_quantiles(self._adjacent[label]) for label in labels]),
            embedding=torch.stack([_quantiles(self._embedding[label]) for label in labels]),
            block_labels=layers,
            blocks={way: _stack_layers(values, layers) for way, values in self._blocks.items()},
            depth_labels=["X_0", *[f"Y_{number}" for number in range(1, len(depths))]],
            depths=torch.stack(depths),
        )


def _stack_layers(values: dict[str, TokenSample], layers: list[str]) -> Tensor:
    """Quantiles of each layer, NaN where it has none."""
    missing = torch.full((3,), math.nan, dtype=torch.float64)
    return torch.stack(
        [_quantiles(values[layer]) if layer in values else missing for layer in layers]
    )


@dataclass
class DepthDistances:
    """Distances between depths.

    Attributes:
        labels: of the sites.
        angular: arccos(cos(x_T^l, x_T^m))/π of the last token (MGR Eq. 15), or an image's class
            token, between what sites are given, its mean over sequences, [sites sites]. What a site
            is given is its input, or the stream r where q, k and v are mixed separately.
        streams: the same for each stream once the site has applied the pending write,
            [streams sites sites]. NaN at sites where the stream does not exist yet. Empty where the
            parts of the state are no streams.
        cka: linear CKA of what sites are given, [sites sites].
        opens_layer: whether a site opens a layer or is the readout, [sites].
    """

    labels: list[str]
    angular: Tensor
    streams: Tensor
    cka: Tensor
    opens_layer: list[bool]

    def is_static(self, stream: int) -> bool:
        """Whether the stream's mean distance, over all pairs of two different sites at which it
        exists, is below `STATIC_DISTANCE`.
        """
        distances = self.streams[stream]
        row, column = torch.triu_indices(len(distances), len(distances), offset=1)
        return distances[row, column].nanmean().item() < STATIC_DISTANCE


class DistanceAnalysis:
    """Distances of each batch's answers as it ends, and some tokens' inputs of every site."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}  # of one batch
        self._streams: dict[str, Tensor] = {}
        self._opens_layer: list[bool] = []
        self._angular = RunningMoments()
        self._stream_angular = RunningMoments()
        self._tokens: dict[str, list[Tensor]] = {}

    def visit_site(self, visit: SiteVisit) -> None:
        connection = visit.connection
        if connection.site.index == 0:
            self._last = {}
            self._streams = {}
            self._opens_layer = []
        label = site_label(connection)
        x = visit.hidden
        self._last[label] = x[visit.answers]
        self._opens_layer.append(connection.opens_layer)
        if connection.parts_are_streams:
            self._streams[label] = visit.written[visit.answers]
        kept = self._tokens.setdefault(label, [])
        missing = _CKA_TOKENS - sum(map(len, kept))
        if missing > 0:
            kept.append(x[:missing].cpu())
        if connection.is_readout:
            self._end_batch()

    def _end_batch(self) -> None:
        self._angular.add(_angular_distances(torch.stack(list(self._last.values()))))
        if not self._streams:
            return
        states = list(self._streams.values())  # [sequences streams D] each
        count = max(state.shape[1] for state in states)
        # A stream that does not exist yet is NaN, and so are its distances.
        padded = [F.pad(x, (0, 0, 0, count - x.shape[1]), value=math.nan) for x in states]
        by_stream = torch.stack(padded).unbind(2)  # [sites sequences D] each
        distances = [_angular_distances(x) for x in by_stream]
        self._stream_angular.add(torch.stack(distances, 1))

    def result(self) -> DepthDistances:
        labels = list(self._tokens)
        streams = torch.zeros(0, len(labels), len(labels))
        if self._stream_angular.count:
            streams = self._stream_angular.mean
        tokens = torch.stack([torch.cat(self._tokens[label]) for label in labels])
        return DepthDistances(
            labels=labels,
            angular=self._angular.mean,
            streams=streams,
            cka=_linear_cka(tokens),
            opens_layer=self._opens_layer,
        )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a, b, dim=-1).cpu()


def _quantiles(sample: TokenSample) -> Tensor:
    return sample.values.quantile(torch.tensor([0.05, 0.5, 0.95]).double())


def _angular_distances(x: Tensor) -> Tensor:
    """[sites sequences D] -> the distances of all pairs of sites, [sequences sites sites]."""
    x = F.normalize(x.double(), dim=-1)
    cosines = torch.einsum("ind,jnd->nij", x, x).clamp(-1, 1)
    return cosines.arccos() / math.pi


def _linear_cka(x: Tensor) -> Tensor:
    """Linear CKA (Kornblith et al., 2019, arXiv 1905.00414) of [sites tokens D]."""
    x = x.double() - x.double().mean(1, keepdim=True)
    grams = x @ x.mT  # [sites tokens tokens]
    flat = F.normalize(grams.flatten(1), dim=-1)
    return flat @ flat.mT
