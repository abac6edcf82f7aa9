"""The unfolded map: how much of each sub-layer's output reaches each later input.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, Eq. 20 and 27-29, Figures 7, 13, 14.

    x_k = Σ_j c_kj y_j + constant      y_0 the embedding, y_j the output of sub-layer j

With its coefficients held fixed, every read is linear in its parts. The map is the product of the
reads' matrices over depth. Methods that weigh each channel separately (a gate for each channel, a
norm on the stream) have no single number c_kj. The number is then the projection
⟨c_kj ⊙ y_j, y_j⟩ / ‖y_j‖².
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..connection import Connection
from ..norms import NormSpec, inverse_rms
from .moments import RunningMoments
from .observation import SiteVisit, input_labels, site_label

# The tokens of a batch that are unfolded where each channel has another map.
_CHANNELWISE_TOKENS = 32
# A larger error is no rounding of float32, nor of TF32: the method's `mixing_weights` are wrong. In
# a bfloat16 model large outputs that cancel may have it.
_LARGEST_ERROR = 0.05


@dataclass
class UnfoldedMap:
    """c_kj of every input k and source j, over tokens.

    Attributes:
        sources: labels of y_0 … y_S.
        inputs: labels of the inputs, the readout last.
        sources_before: the number of sources that exist where each input is read.
        mean: [inputs sources].
        std: over tokens, [inputs sources].
        one_token: the map of one token, chosen at random from the first batch, [inputs sources].
        has_streams: the parts of the state are streams that persist over depth.
        stream_means: the map to each part of the state as each site's read leaves it, a matrix
            [parts sources] for each site but the readout.
        one_token_streams: the same for the one token.
        tokens: the number of tokens.
        error: the largest ‖x_k − Σ_j c_kj y_j − constant‖ / ‖x_k‖ of a token and an input.
        by_projection: channels are weighed separately, so the numbers are projections.
    """

    sources: list[str]
    inputs: list[str]
    sources_before: list[int]
    mean: Tensor
    std: Tensor
    one_token: Tensor
    has_streams: bool
    stream_means: list[Tensor]
    one_token_streams: list[Tensor]
    tokens: int
    error: float
    by_projection: bool


class UnfoldingAnalysis:
    """Follows every source through the reads of each batch. `result` gives the `UnfoldedMap`.

    `visit_site` raises a ValueError where a float32 model's `mixing_weights` are not those of its
    reads.
    """

    def __init__(self) -> None:
        self._maps = RunningMoments()
        self._stream_maps: list[RunningMoments] = []
        self._sources: list[str] = []
        self._inputs: list[str] = []
        self._sources_before: list[int] = []
        self._one_token: Tensor | None = None
        self._one_token_streams: list[Tensor] = []
        self._by_projection = False
        self._has_streams = False
        self._error = 0.0
        self._batch: _BatchMap | None = None

    def visit_site(self, visit: SiteVisit) -> None:
        connection = visit.connection
        if connection.site.index == 0:
            self._batch = _BatchMap(visit)
            self._by_projection = connection.weighs_channels
            self._has_streams = connection.parts_are_streams
        batch = self._batch
        assert batch is not None
        rows, error = batch.follow_read(visit)
        _check_error(error, visit)
        self._error = max(self._error, error)
        self._record_labels(connection, rows.shape[-2])
        if not connection.is_readout:
            self._add_stream_map(connection.site.index, batch)
            return
        self._maps.add(torch.cat(batch.rows, -2))
        if self._one_token is None:
            self._one_token = torch.cat(batch.rows, -2)[batch.one_token]
        self._batch = None

    def _record_labels(self, connection: Connection, inputs: int) -> None:
        if self._maps.count:  # a later batch
            return
        if connection.site.index == 0:
            self._sources = ["embedding"]
            self._inputs = []
            self._sources_before = []
        self._inputs += input_labels(connection, inputs)
        self._sources_before += [len(self._sources)] * inputs
        if not connection.is_readout:
            self._sources.append(site_label(connection))

    def _add_stream_map(self, site: int, batch: "_BatchMap") -> None:
        if site == len(self._stream_maps):
            self._stream_maps.append(RunningMoments())
        numbers = batch.numbers(batch.parts)
        self._stream_maps[site].add(numbers)
        if self._one_token is None:
            self._one_token_streams.append(numbers[batch.one_token].double().cpu())

    def result(self) -> UnfoldedMap:
        """The map over all tokens so far."""
        assert self._one_token is not None
        return UnfoldedMap(
            sources=self._sources,
            inputs=self._inputs,
            sources_before=self._sources_before,
            mean=self._maps.mean,
            std=self._maps.std,
            one_token=self._one_token.double().cpu(),
            has_streams=self._has_streams,
            stream_means=[moments.mean for moments in self._stream_maps],
            one_token_streams=self._one_token_streams,
            tokens=self._maps.count,
            error=self._error,
            by_projection=self._by_projection,
        )


class _BatchMap:
    """The sources' contributions to each part of the state, for the tokens of one batch.

    Contributions are [N parts sources+1 K]; the last source is the constant that norms with a bias
    add. K is 1 where one number says how much of a source a part contains. Where channels are
    weighed separately, K is the width of a part, and the contribution is that share of y_j itself.
    """

    def __init__(self, visit: SiteVisit):
        connection = visit.connection
        self.fractions = connection.fractions
        self.is_channelwise = connection.weighs_channels
        tokens = len(visit.parts)
        self.stride = math.ceil(tokens / _CHANNELWISE_TOKENS) if self.is_channelwise else 1
        parts = visit.parts[:: self.stride]
        self.sources = parts.new_zeros(len(parts), connection.site.depth + 2, connection.dim)
        self.rows: list[Tensor] = []
        generator = torch.Generator().manual_seed(0)
        self.one_token = int(torch.randint(len(parts), (), generator=generator))
        # Every part of the first state is zero or the embedding, or its fraction at that place.
        copies = parts.unflatten(1, (-1, self.fractions)).unbind(1)
        embedding = next((copy for copy in copies if copy.any()), copies[0])
        if not all(torch.equal(copy, embedding) or not copy.any() for copy in copies):
            raise ValueError(
                f"{connection.name}: the unfolded map needs a first state whose parts are the "
                "embedding or zero"
            )
        self.sources[:, 0] = embedding.flatten(-2)
        unit = self._unit(0)
        self.parts = torch.cat([unit if copy.any() else 0 * unit for copy in copies], 1)

    def follow_read(self, visit: SiteVisit) -> tuple[Tensor, float]:
        """The numbers c_kj of a site's inputs, [N inputs sources], and their largest error."""
        connection = visit.connection
        state = visit.state
        parts = self.parts
        if state.y is not None:
            self.sources[:, connection.site.index] = state.y.flatten(0, -2)[:: self.stride]
            parts = torch.cat([parts, self._unit(connection.site.index)], 1)
        weights = visit.weights
        written = self._mix(weights.write, parts)
        for part, norm in enumerate(weights.norms):
            if norm is not None:
                written[:, part] = _held_norm(written[:, part], norm)
        inputs = self._mix(weights.read, written)
        self.parts = self._mix(weights.carry, written)
        rows = self.numbers(inputs)
        self.rows.append(rows)
        return rows, self._largest_error(inputs, visit.inputs)

    def numbers(self, contributions: Tensor) -> Tensor:
        """[N parts sources+1 K] -> [N parts/fractions sources], without the constant."""
        contributions = contributions[:, :, :-1]
        if not self.is_channelwise:
            return contributions[..., 0]
        sources = self.sources[:, None, :-1]
        contributions = self._join_fractions(contributions)
        return (contributions * sources).sum(-1) / sources.square().sum(-1).clamp_min(1e-30)

    def _unit(self, source: int) -> Tensor:
        """The contributions to y_j of y_j itself: one part, or one a fraction."""
        tokens, sources = self.sources.shape[:2]
        if not self.is_channelwise:
            unit = self.sources.new_zeros(tokens, 1, sources, 1)
            unit[:, :, source] = 1
            return unit
        fractions = self.sources[:, source].unflatten(-1, (self.fractions, -1))
        unit = self.sources.new_zeros(tokens, self.fractions, sources, fractions.shape[-1])
        unit[:, :, source] = fractions
        return unit

    def _mix(self, weights: Tensor, parts: Tensor) -> Tensor:
        """[out in K] or [N out in K] times [N in sources K] -> [N out sources K]."""
        weights = weights.to(parts.dtype)
        if weights.dim() > 3:
            weights = weights[:: self.stride]
        if weights.shape[-1] == 1:
            return (weights[..., 0] @ parts.flatten(-2)).unflatten(-1, parts.shape[-2:])
        return torch.einsum("...oik,...isk->...osk", weights, parts)

    def _join_fractions(self, parts: Tensor) -> Tensor:
        """[N parts sources K] -> [N parts/fractions sources D]."""
        if self.fractions == 1:
            return parts
        return parts.unflatten(1, (-1, self.fractions)).movedim(2, -2).flatten(-2)

    def _largest_error(self, contributions: Tensor, inputs: tuple[Tensor, ...]) -> float:
        if self.is_channelwise:
            sums = self._join_fractions(contributions).sum(2)
        else:
            sums = contributions[..., 0] @ self.sources
        x = torch.stack([x.flatten(0, -2)[:: self.stride] for x in inputs], 1).to(sums.dtype)
        return ((sums - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)).max().item()


def _check_error(error: float, visit: SiteVisit) -> None:
    """Raise a ValueError where a map of a float32 model is not that of the inputs."""
    is_precise = visit.inputs[0].dtype in (torch.float32, torch.float64)
    if is_precise and error > _LARGEST_ERROR:
        raise ValueError(
            f"mixing_weights of {visit.connection.name} do not give the inputs of its read: at "
            f"{site_label(visit.connection)} the relative error is {error:.1g}"
        )


def _held_norm(contributions: Tensor, norm: NormSpec) -> Tensor:
    """The norm of the sum of contributions [N sources+1 D], applied to each with its scale held."""
    x = contributions.sum(1, keepdim=True)
    if norm.centred:
        contributions = contributions - contributions.mean(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
    normed = contributions * inverse_rms(x, norm.eps)[..., None] * norm.weight
    if norm.bias is not None:
        normed[:, -1] += norm.bias
    return normed
