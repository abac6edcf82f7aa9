"""Hyper-connections: n streams mixed with learned, input-dependent weights.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, equations 10-14 and Algorithm 2.

    H_0 = the embedding, repeated n times;  at sub-layer k, counted from 1:
    alpha = s_a · tanh(N(H) W_a) + static_alpha   [B T n n+1]   static_alpha = [e_{(k−1) mod n} | I]
    beta  = s_b · tanh(N(H) w_b) + static_beta    [B T n]       static_beta = 1
    mixed = alphaᵀ H                              [B T n+1 D]   row 0 is the input
            W_a [D, n+1] = [W_m | W_r], w_b [D] = W_β, and in the paper
            static_alpha = [A_m | A_r], static_beta = B, alpha = [𝓐_m(H) | 𝓐_r(H)], beta = 𝓑(H)
    H ← beta ⊗ F_k(Norm(mixed_0)) + mixed_{1..n}
    readout: the sum of the streams, then the final norm

Eq. 14 prints e_{k mod n} for k = 1, 2, … with columns e_1 … e_n, which leaves e_0 undefined.
Algorithm 2 counts rows from 0, and does not say where its layer_id starts. Here the first sub-layer
reads stream 0, the paper's first, and sub-layer n the last.
N is a norm of each stream, LayerNorm by default; |N| is the number of its parameters. Row s of the
dynamic part depends on stream s alone. W_a = w_b = 0 and s_a = s_b = 0.01 at
initialisation: the streams are equal copies of the plain residual, and the readout is n times it,
a factor that the final norm removes up to its eps.
State: n streams, and beta of the pending write.
Learned parameters per sub-layer: n(n+2), and when dynamic D(n+2) + |N| + 2 more.
Names: dynamic_alpha_fn is W_a, dynamic_beta_fn w_b, dynamic_alpha_scale s_a, dynamic_beta_scale
s_b, norm_weight and norm_bias are N's.
Traffic: at least (2n + 2)D elements per token and site.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..connection import InitialFunction, NormFactory
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights
from ..norms import NormSpec
from ..ops import depth_connection, expand_to_streams, hyper_connection, width_connection
from ..ops.hyper import BoundName
from ..sites import Site
from ..validation import check_idle_options, check_non_negative, check_option_type
from ._alpha_beta import (
    STREAM_NORMS,
    add_alpha_and_beta,
    coefficient_map,
    reset_alpha_and_beta,
    width_weights,
)
from ._streams import (
    Streams,
    check_stream_count,
    read_sum,
    shared_write,
    streams_memory_traffic,
    sum_readout_weights,
    write_to_streams,
)

Stats = Literal["layernorm", "rmsnorm", "unweighted"]
Frozen = Literal["", "B", "WC", "B WC"]
OutputScale = Literal["1", "1/n", "1/sqrt(n)", "sqrt(n)"]
_OUTPUT_SCALE_EXPONENTS: dict[OutputScale, float] = {
    "1": 0,
    "1/n": -1,
    "1/sqrt(n)": -0.5,
    "sqrt(n)": 0.5,
}

# What each parameter serves: depth connections B, width connections WC.
_SERVED_KINDS = {
    "static_alpha": {"WC"},
    "dynamic_alpha_fn": {"WC"},
    "dynamic_alpha_scale": {"WC"},
    "static_beta": {"B"},
    "dynamic_beta_fn": {"B"},
    "dynamic_beta_scale": {"B"},
    "norm_weight": {"B", "WC"},
    "norm_bias": {"B", "WC"},
}


class Hyper(FusedNormConnection[Streams]):
    """Hyper-connections: n streams mixed with learned, input-dependent weights.

    Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, equations 10-14 and Algorithm 2.

    Args:
        streams: n, the number of streams (the paper's expansion rate).
        dynamic: alpha and beta depend on the input (DHC); False for the static part alone (SHC).
        tanh: whether tanh bounds the dynamic part.
        stats: N, the norm of the streams: "layernorm" with weight and bias as in the paper's
            listing, "rmsnorm", or "unweighted" LayerNorm as in OLMo.
        beta: initial value of static_beta.
        matrix: initial values of the static part as the paper writes it, [[0, B], [A_m, A_r]]
            (Eq. 17-19, 42, 54, 55): one matrix for all sub-layers, or a list of which the
            sub-layers take one each, in turn.
        frozen: "B", "WC" or "B WC": the depth connections B or the width connections WC keep their
            initial values (Table 3), and with both so do N's weights.
        output_scale: for training from scratch: `connect` multiplies the initial weights of the
            sub-layers' output projections, so that the sum of the streams, n times a plain
            residual, starts with the standard deviation of the original model. "1/n" keeps it,
            where the embedding is small compared to the outputs. "1/sqrt(n)" and "sqrt(n)" are
            the two readings of the factor √n that the paper prints (section 4).
        eps: eps of N; None for 1e-5 of a LayerNorm and 1e-6 of an RMSNorm.
    """

    initial_function: InitialFunction = "prenorm up to scale of readout"
    parts_are_streams = True
    gate_field = "beta"
    sums_streams = True
    test_variants = (
        "hyper(streams=2, dynamic=False)",
        "hyper(streams=3, tanh=False, stats='rmsnorm')",
        "hyper(stats='unweighted', frozen='B')",
        "hyper(dynamic=False, matrix=[[0, 1, 1], [1, 1, 0], [0, 0, 1]], streams=2)",
    )
    weight_decay_params = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        streams: int = 4,
        dynamic: bool = True,
        tanh: bool = True,
        stats: Stats = "layernorm",
        beta: float = 1.0,
        matrix: Sequence[Any] | None = None,
        frozen: Frozen = "",
        eps: float | None = None,
        output_scale: OutputScale = "1",
    ):
        super().__init__(site, dim, norm)
        check_stream_count(streams)
        if not dynamic:
            check_idle_options(Hyper, "dynamic=False", tanh=tanh, stats=stats)
        if matrix is not None and beta != 1.0:
            raise ValueError(
                "matrix and beta exclude each other: the first row of the matrix is beta"
            )
        self.output_scale = streams ** _OUTPUT_SCALE_EXPONENTS[output_scale]
        self.n = streams
        self.dynamic = dynamic
        self.bound: BoundName = "tanh" if tanh else "none"
        self.stream_norm = STREAM_NORMS[stats]
        if eps is not None:
            check_non_negative(eps=eps)
            self.stream_norm = self.stream_norm._replace(eps=eps)
        if matrix is None:
            self.initial_alpha = _initial_alpha(site, streams)
            self.initial_beta = [float(beta)] * streams
        else:
            self.initial_alpha, self.initial_beta = _split_matrix(matrix, site, streams)
        if not _starts_as_prenorm(self.initial_alpha, self.initial_beta):
            self.initial_function = "other"
        elif streams == 1:
            self.initial_function = "prenorm"
        if not self.is_readout:
            add_alpha_and_beta(self, width=dim, streams=streams, columns=streams + 1)
            self._freeze(frozen)
        self.reset_parameters()

    def _freeze(self, frozen: Frozen) -> None:
        frozen_kinds = set(frozen.split())
        for name, parameter in self.named_parameters(recurse=False):
            parameter.requires_grad_(not _SERVED_KINDS[name] <= frozen_kinds)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.is_readout:
            reset_alpha_and_beta(self, self.initial_alpha, self.initial_beta)

    def initial_state(self, x: Tensor) -> Streams:
        return Streams(expand_to_streams(x, self.n))

    def fused_read(
        self, state: Streams, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Streams]:
        if self.is_readout:
            return read_sum(state, norms)
        H, y, beta = state
        Y = shared_write(y)
        if self.dynamic:
            norm = norms[0] if norms else None
            x, H, beta = hyper_connection(H, Y, beta, coefficient_map(self), norm=norm)
        else:
            H = depth_connection(H, Y, beta)
            x, H = width_connection(H, self.static_alpha[:, 0], self.static_alpha[:, 1:], *norms)
            beta = self.static_beta.clone()
        return (x,), Streams(H, beta=beta)

    def state_parts(self, state: Streams) -> tuple[Tensor, ...]:
        return state.H.unbind(-2)

    def mixing_weights(self, state: Streams) -> MixingWeights:
        write = write_to_streams(state.H, state.beta)
        if self.is_readout:
            return sum_readout_weights(write, self.n)
        Y = shared_write(state.y)
        alpha = width_weights(self, state.H, Y, state.beta).mT[..., None]
        return MixingWeights(write, alpha[..., :1, :, :], alpha[..., 1:, :, :])

    def memory_traffic(self) -> float:
        return streams_memory_traffic(self, self.n)


def _starts_as_prenorm(alpha: list[list[float]], beta: list[float]) -> bool:
    """Whether equal streams are read and kept as they are, and each takes the output once.

    Then each column of alpha sums to 1, and each beta is 1.
    """
    sums = [sum(column) for column in zip(*alpha, strict=True)]
    return all(math.isclose(value, 1) for value in [*sums, *beta])


def _initial_alpha(site: Site, n: int) -> list[list[float]]:
    """[e | I]: each sub-layer reads the next stream, and every stream is kept."""
    read_stream = site.index % n
    rows = []
    for s in range(n):
        identity_row = [float(s == t) for t in range(n)]
        rows.append([float(s == read_stream), *identity_row])
    return rows


def _split_matrix(
    matrix: Sequence[Any], site: Site, n: int
) -> tuple[list[list[float]], list[float]]:
    """static_alpha and static_beta of the paper's matrix [[0, B], [A_m, A_r]] at this site."""
    try:
        matrices = matrix if isinstance(matrix[0][0], list | tuple) else [matrix]
        rows = matrices[site.index % len(matrices)]
        has_right_size = [len(row) for row in rows] == [n + 1] * (n + 1)
    except (TypeError, IndexError):
        has_right_size = False
    if not has_right_size:
        raise ValueError(
            f"matrix must be {n + 1} by {n + 1} for streams={n}, or a list of such matrices, "
            f"got {matrix!r}"
        )
    for row in rows:
        for number in row:
            check_option_type("a number of matrix", number, float)
    if rows[0][0] != 0:
        raise ValueError(f"the first number of matrix must be 0, as in Eq. 17, got {rows[0][0]!r}")
    beta = list(rows[0][1:])
    alpha = [list(row) for row in rows[1:]]
    return alpha, beta
