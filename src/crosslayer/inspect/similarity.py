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

from .observation import SiteVisit, input_labels, site_label

# Tokens whose inputs are kept for CKA, which compares every pair of them.
CKA_TOKENS = 512


@dataclass
class CosineSimilarity:
    """Cosines over tokens between inputs, before their norms.

    Attributes:
        labels: of the inputs.
        adjacent: quantiles (5 %, 50 %, 95 %) of the cosine with the input before it: of the same
            port in the block before for q, k, v and r, else of the sub-layer before. [inputs 3];
            NaN for inputs without one before.
        embedding: quantiles of the cosine with the embedding, [inputs 3].
    """

    labels: list[str]
    adjacent: Tensor
    embedding: Tensor


class CosineAnalysis:
    """Cosines of inputs with those before them and with the embedding."""

    def __init__(self) -> None:
        self._adjacent: dict[str, list[Tensor]] = {}
        self._embedding: dict[str, list[Tensor]] = {}
        self._previous: dict[str, Tensor] = {}
        self._y_0 = torch.zeros(0)

    def visit_site(self, visit: SiteVisit) -> None:
        if visit.connection.site.index == 0:
            self._previous = {}
            self._y_0 = visit.parts[:, : visit.connection.fractions].flatten(-2)
        labels = input_labels(visit.connection, len(visit.inputs))
        inputs = [x.flatten(0, -2).float() for x in visit.inputs]
        ways = _way_labels(visit, len(inputs))
        for label, way, x in zip(labels, ways, inputs, strict=True):
            self._embedding.setdefault(label, []).append(_cosine(x, self._y_0))
            before = self._previous.get(way, self._previous.get("last"))
            values = torch.full_like(x[:, 0], math.nan) if before is None else _cosine(x, before)
            self._adjacent.setdefault(label, []).append(values)
        self._previous |= dict(zip(ways, inputs, strict=True))
        self._previous["last"] = inputs[0]

    def result(self) -> CosineSimilarity:
        labels = list(self._adjacent)
        return CosineSimilarity(
            labels,
            torch.stack([_quantiles(self._adjacent[label]) for label in labels]),
            torch.stack([_quantiles(self._embedding[label]) for label in labels]),
        )


def _way_labels(visit: SiteVisit, inputs: int) -> list[str]:
    """What an input is compared with: the last of the same name. One input alone: "last"."""
    return ["last"] if inputs == 1 else list(visit.connection.ports)


@dataclass
class DepthDistances:
    """Distances between the inputs of all pairs of sites.

    Attributes:
        labels: of the sites.
        angular: arccos(cos(x_T^l, x_T^m))/π of the last token (MGR Eq. 15), or of an image's class
            token; its mean over sequences, [sites sites].
        streams: the same for each stream between the states that sites read, [streams sites sites];
            empty where the number of parts differs between sites.
        cka: linear CKA of the inputs, [sites sites].
    """

    labels: list[str]
    angular: Tensor
    streams: Tensor
    cka: Tensor


class DistanceAnalysis:
    """Keeps the answers' inputs and streams, and some tokens' inputs, of every site."""

    def __init__(self) -> None:
        self._last: dict[str, list[Tensor]] = {}
        self._streams: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[Tensor]] = {}

    def visit_site(self, visit: SiteVisit) -> None:
        label = site_label(visit.connection)
        x = visit.inputs[0].flatten(0, -2).float()
        parts = visit.parts[:, : len(visit.connection.state_parts(visit.state))]
        self._last.setdefault(label, []).append(x[visit.answers].cpu())
        self._streams.setdefault(label, []).append(parts[visit.answers].cpu())
        kept = self._tokens.setdefault(label, [])
        missing = CKA_TOKENS - sum(map(len, kept))
        if missing > 0:
            kept.append(x[:missing].cpu())

    def result(self) -> DepthDistances:
        labels = list(self._last)
        last = torch.stack([torch.cat(self._last[label]) for label in labels])
        states = [torch.cat(self._streams[label]) for label in labels]
        streams = torch.zeros(0, len(labels), len(labels))
        if len({state.shape[1] for state in states}) == 1:
            by_stream = torch.stack(states, 1).movedim(2, 0)  # [streams sequences sites D]
            streams = torch.stack([_angular_distances(s.transpose(0, 1)) for s in by_stream])
        tokens = torch.stack([torch.cat(self._tokens[label]) for label in labels])
        return DepthDistances(labels, _angular_distances(last), streams, _linear_cka(tokens))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a, b, dim=-1).cpu()


def _quantiles(values: list[Tensor]) -> Tensor:
    return torch.cat(values).double().quantile(torch.tensor([0.05, 0.5, 0.95]).double())


def _angular_distances(x: Tensor) -> Tensor:
    """[sites sequences D] -> the mean distance of all pairs of sites, [sites sites]."""
    x = F.normalize(x.double(), dim=-1)
    cosines = torch.einsum("ind,jnd->nij", x, x).clamp(-1, 1)
    return (cosines.arccos() / math.pi).mean(0)


def _linear_cka(x: Tensor) -> Tensor:
    """Linear CKA (Kornblith et al., 2019, arXiv 1905.00414) of [sites tokens D]."""
    x = x.double() - x.double().mean(1, keepdim=True)
    grams = x @ x.mT  # [sites tokens tokens]
    flat = F.normalize(grams.flatten(1), dim=-1)
    return flat @ flat.mT
