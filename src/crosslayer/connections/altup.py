"""AltUp: K streams. Each layer runs on the next of them, and corrects a prediction of all.

Paper: Alternating Updates (Baykal et al., 2023), arXiv 2301.13310, Algorithm 1.

    X = the embedding, repeated K times;  at layer l, counted from 0, on stream j = l mod K:
    predict  X̂_i = Σ_k P_{i,k} X_k           P [K, K]
    compute  o = L(X_j), the whole layer with its residuals
    correct  X_i ← X̂_i + g_i (o − X̂_j)       g [K]
    readout: the sum of the streams, then the final norm

The embedding is repeated and the streams are summed as in the paper's Recycled-AltUp, because the
model's width is D. P = I and g = 1 at initialisation: the streams are equal copies of the plain
residual, and the final norm removes the factor K up to its eps.
State: the predicted K streams, the stream inside the layer, and g and X̂_j of the pending
correction.
Learned parameters: K² + K per layer.
Traffic: (2K + 4)D elements per token where a layer opens, 4D inside.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..connection import InitialFunction, NormFactory
from ..float32_parameters import assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights, join_columns, join_rows, part_weights
from ..norms import NormSpec, add_write, upcast_to_float32
from ..ops import collapse_streams, depth_connection, expand_to_streams, mix_streams
from ..sites import Site
from ._streams import check_stream_count


class Alternating(NamedTuple):
    """K streams between two layers, and the stream inside the layer that runs."""

    X: Tensor  # [B T K D]: predicted streams, or the embedding's before the first layer
    h: Tensor  # [B T D]: the stream inside the layer
    y: Tensor | None = None  # [B T D]: pending write
    g: Tensor | None = None  # [K]: weight of the correction in each stream
    active: Tensor | None = None  # X̂_j, [B T D]: the correction is o − X̂_j


class AltUp(FusedNormConnection[Alternating]):
    """AltUp: K streams. Each layer runs on the next of them, and corrects a prediction of all.

    Paper: Alternating Updates (Baykal et al., 2023), arXiv 2301.13310, Algorithm 1.

    Args:
        streams: K, the number of streams. The paper calls them blocks of a widened stream.
    """

    initial_function: InitialFunction = "prenorm up to scale of readout"
    gate_field = "g"
    sums_streams = True
    test_variants = ("altup(streams=3)",)

    def __init__(self, site: Site, dim: int, norm: NormFactory, streams: int = 2):
        super().__init__(site, dim, norm)
        check_stream_count(streams)
        self.K = streams
        if streams == 1:
            self.initial_function = "prenorm"
        # An integer that differs between layers: compiled layer by layer, there are K graphs.
        self.j = site.layer % streams
        self.can_fuse_norms = self.is_readout
        opens_update = site.opens_layer and not self.is_readout
        self.P = float32_parameter(streams, streams) if opens_update else None
        self.g = float32_parameter(streams) if opens_update else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.P is not None and self.g is not None:
            assign_value(self.P, torch.eye(self.K, device=self.P.device))
            nn.init.ones_(self.g)

    def initial_state(self, x: Tensor) -> Alternating:
        return Alternating(expand_to_streams(x, self.K), x)

    def fused_read(
        self, state: Alternating, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Alternating]:
        h = add_write(state.h, state.y)
        if not self.opens_layer:
            return (h,), Alternating(state.X, h, g=state.g, active=state.active)
        # The layer has ended: h is its output o.
        X = state.X
        if state.g is not None and state.active is not None:
            correction = upcast_to_float32(h - state.active)
            X = depth_connection(X, correction[..., None, :], state.g)
        if self.P is None or self.g is None:  # the readout
            return (collapse_streams(X, None, *norms),), Alternating(X, h)
        h = X[..., self.j, :]
        predicted = mix_streams(X, self.P.mT)
        active = predicted[..., self.j, :]
        return (h,), Alternating(predicted, h, g=self.g.clone(), active=active)

    def state_parts(self, state: Alternating) -> tuple[Tensor, ...]:
        active = () if state.active is None else (state.active,)
        return (*state.X.unbind(-2), state.h, *active)

    def mixing_weights(self, state: Alternating) -> MixingWeights:
        K = self.K
        parts = len(self.state_parts(state))
        columns = identity_weights(parts + (state.y is not None), state.h)
        X = columns[:K]
        h = columns[K : K + 1]
        active = columns[K + 1 : parts]
        if state.y is not None:
            h = h + columns[-1:]
        if not self.opens_layer:
            write = join_rows(X, h, active)
            return MixingWeights(write, part_weights(parts, K, X), identity_weights(parts, X))
        if state.g is not None:
            X = X + state.g[:, None, None] * (h - active)
        write = join_rows(X, h)
        if self.P is None:  # the readout
            every_stream = torch.ones_like(X[:1, :K])
            read = join_columns(every_stream, torch.zeros_like(every_stream[:, :1]))
            return MixingWeights(write, read, identity_weights(K + 1, X))
        predicted = self.P[..., None]
        read = part_weights(K, self.j, X)
        carry = join_rows(predicted, read, predicted[self.j : self.j + 1])
        return MixingWeights(X, read, carry)

    def memory_traffic(self) -> float:
        if not self.opens_layer:
            return super().memory_traffic()
        # Read: the prediction, h and y. Written: the next prediction and h.
        read = self.K + 2 if self.site.index else 1
        written = 0 if self.is_readout else self.K + 1
        return read + written + len(self.ports)
