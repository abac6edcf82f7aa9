"""Hyper-connections: n streams mixed with learned, input-dependent weights.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, equations 10-14 and Algorithm 2.

    H_0 = the embedding, repeated n times;  at sub-layer k, counted from 1:
    alpha = s_a · tanh(N(H) W_a) + static_alpha   [B T n n+1]   static_alpha = [e_{(k−1) mod n} | I]
    beta  = s_b · tanh(N(H) w_b) + static_beta    [B T n]       static_beta = 1
    mixed = alphaᵀ H                              [B T n+1 D]   row 0 is the input
            W_a [D, n+1] = [W_m | W_r], w_b [D] = W_β, alpha = [A_m | A_r], beta = B in the paper
    H ← beta ⊗ F_k(Norm(mixed_0)) + mixed_{1..n}
    readout: the sum of the streams, then the final norm

N is a norm of each stream, LayerNorm by default; |N| is the number of its parameters. Row s of the
dynamic part depends on stream s alone. W_a = w_b = 0 and s_a = s_b = 0.01 at
initialisation: the streams are equal copies of the plain residual, and the readout is n times it,
a factor that the final norm removes up to its eps.
State: n streams, and beta of the pending write.
Learned parameters a sub-layer: n(n+2), and when dynamic D(n+2) + |N| + 2 more.
Traffic: at least (2n + 2)D elements a token and site.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import (
    Connection,
    InitialFunction,
    NormFactory,
    Site,
    assign_value,
    float32_parameter,
)
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import NormSpec, upcast
from ..ops import (
    CoefficientMap,
    collapse_streams,
    depth_connection,
    dynamic_coefficients,
    expand_to_streams,
    hyper_connection,
    width_connection,
)
from ..ops.hyper import BoundName
from ..validation import check_non_negative, check_positive

Stats = Literal["layernorm", "rmsnorm", "unweighted"]
Frozen = Literal["", "B", "WC", "B WC"]
OutputScale = Literal["1", "1/n", "1/sqrt(n)", "sqrt(n)"]
OUTPUT_SCALE_EXPONENTS: dict[OutputScale, float] = {
    "1": 0,
    "1/n": -1,
    "1/sqrt(n)": -0.5,
    "sqrt(n)": 0.5,
}


class Streams(NamedTuple):
    H: Tensor  # [B T n D]
    y: Tensor | None = None  # pending write ...
    beta: Tensor | None = None  # ... and its weight in each stream, [B T n] or [n]


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
            initial values (Table 3).
        output_scale: for training from scratch: `connect` multiplies the initial weights of the
            sub-layers' output projections, so that the sum of the streams, n times a plain
            residual, starts with the standard deviation of the original model. "1/n" keeps it,
            where the embedding is small compared to the outputs. "1/sqrt(n)" and "sqrt(n)" are
            the two readings of the factor √n that the paper prints (section 4).
        eps: eps of N; None for 1e-5 of a LayerNorm and 1e-6 of an RMSNorm.
    """

    initial_function: InitialFunction = "prenorm up to scale of readout"
    parts_are_streams = True
    gate_fields = ("beta",)
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
        check_positive(streams=streams)
        check_bound(dynamic, tanh)
        if matrix is not None and beta != 1.0:
            raise ValueError(
                "matrix and beta exclude each other: the first row of the matrix is beta"
            )
        self.output_scale = streams ** OUTPUT_SCALE_EXPONENTS[output_scale]
        self.n = streams
        self.dynamic = dynamic
        self.bound: BoundName = "tanh" if tanh else "none"
        self.statistics = STREAM_STATISTICS[stats]
        if eps is not None:
            check_non_negative(eps=eps)
            self.statistics = self.statistics._replace(eps=eps)
        if matrix is None:
            self.initial_alpha = _initial_alpha(site, streams)
            self.initial_beta = [float(beta)] * streams
        else:
            self.initial_alpha, self.initial_beta = _split_matrix(matrix, site, streams)
        if not _keeps_streams_equal(self.initial_alpha, self.initial_beta):
            self.initial_function = "other"
        elif streams == 1:
            self.initial_function = "prenorm"
        if not self.is_readout:
            add_wiring_parameters(self, width=dim, streams=streams, columns=streams + 1)
            self._freeze(frozen)
        self.reset_parameters()

    def _freeze(self, frozen: Frozen) -> None:
        frozen_kinds = frozen.split()
        for name, parameter in self.named_parameters(recurse=False):
            if "beta" in name:
                is_frozen = "B" in frozen_kinds
            elif "alpha" in name:
                is_frozen = "WC" in frozen_kinds
            else:  # the norm that both are computed from
                is_frozen = len(frozen_kinds) == 2
            parameter.requires_grad_(not is_frozen)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.is_readout:
            reset_wiring_parameters(self, self.initial_alpha, self.initial_beta)

    def initial_state(self, x: Tensor) -> Streams:
        return Streams(expand_to_streams(x, self.n))

    def fused_read(
        self, state: Streams, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Streams]:
        H, y, beta = state
        Y = None if y is None else y[..., None, :]
        if self.is_readout:
            H = depth_connection(H, Y, beta)
            return (collapse_streams(H, None, *norms),), Streams(H)
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
        Y = None if state.y is None else state.y[..., None, :]
        alpha = width_weights(self, state.H, Y, state.beta).mT[..., None]
        return MixingWeights(write, alpha[..., :1, :, :], alpha[..., 1:, :, :])

    def memory_traffic(self) -> float:
        return streams_memory_traffic(self, self.n)


def _keeps_streams_equal(alpha: list[list[float]], beta: list[float]) -> bool:
    """Whether equal streams are read unscaled and stay equal: each column of alpha sums to 1."""
    sums = [sum(column) for column in zip(*alpha, strict=True)]
    return all(math.isclose(value, 1) for value in [*sums, *beta])


def _initial_alpha(site: Site, n: int) -> list[list[float]]:
    """[e | I]: the sub-layer reads one stream, by turns, and every stream is kept."""
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
        matrices = matrix if isinstance(matrix[0][0], Sequence) else [matrix]
        rows = matrices[site.index % len(matrices)]
        has_right_size = [len(row) for row in rows] == [n + 1] * (n + 1)
    except (TypeError, IndexError):
        has_right_size = False
    if not has_right_size:
        raise ValueError(
            f"matrix must be {n + 1} by {n + 1} for {n} streams, or a list of such matrices, "
            f"got {matrix!r}"
        )
    beta = list(rows[0][1:])
    alpha = [list(row) for row in rows[1:]]
    return alpha, beta


# What hyper-connections and frac-connections share: parameters of the same names, and how
# coefficients follow from them. `connection` is one of the two, with the attributes `dynamic`,
# `bound` and `statistics`.


def check_bound(dynamic: bool, tanh: bool) -> None:
    """Raise a ValueError where there is no dynamic part for tanh to leave unbounded."""
    if not (dynamic or tanh):
        raise ValueError(
            "tanh=False and dynamic=False exclude each other: tanh bounds the dynamic part alone"
        )


def add_wiring_parameters(connection: Any, width: int, streams: int, columns: int) -> None:
    """Register the parameters of the static part and, if `connection.dynamic`, of the dynamic one.

    Args:
        connection: gets static_alpha [streams columns], static_beta [streams], and so on.
        width: of what the coefficients are computed from: the width of a stream or a fraction.
        streams: the number of streams or fractions.
        columns: what is mixed from them: the inputs and the next streams.
    """
    connection.static_alpha = float32_parameter(streams, columns)
    connection.static_beta = float32_parameter(streams)
    if not connection.dynamic:
        return
    connection.dynamic_alpha_fn = float32_parameter(width, columns)
    connection.dynamic_beta_fn = float32_parameter(width)
    connection.dynamic_alpha_scale = float32_parameter(1)
    connection.dynamic_beta_scale = float32_parameter(1)
    connection.norm_weight = float32_parameter(width) if connection.statistics.weighted else None
    connection.norm_bias = float32_parameter(width) if connection.statistics.biased else None


@torch.no_grad()
def reset_wiring_parameters(
    connection: Any, static_alpha: list[list[float]], static_beta: list[float]
) -> None:
    """Set the static part to the given values and the dynamic part to zero."""
    assign_value(connection.static_alpha, static_alpha)
    assign_value(connection.static_beta, static_beta)
    if not connection.dynamic:
        return
    nn.init.zeros_(connection.dynamic_alpha_fn)
    nn.init.zeros_(connection.dynamic_beta_fn)
    nn.init.constant_(connection.dynamic_alpha_scale, 0.01)
    nn.init.constant_(connection.dynamic_beta_scale, 0.01)
    if connection.norm_weight is not None:
        nn.init.ones_(connection.norm_weight)
    if connection.norm_bias is not None:
        nn.init.zeros_(connection.norm_bias)


def coefficient_map(connection: Any) -> CoefficientMap:
    """How alpha and beta of a dynamic connection follow from the streams."""
    # N(H) W, with the norm's weight multiplied into W and its bias added after it. W is laid out by
    # output, which is faster in BLAS.
    W = torch.cat([connection.dynamic_alpha_fn.mT, connection.dynamic_beta_fn[None]])
    bias = W.new_zeros(len(W))
    if connection.norm_bias is not None:
        bias = (W * connection.norm_bias).sum(-1)
    if connection.norm_weight is not None:
        W = W * connection.norm_weight
    alpha_scale = connection.dynamic_alpha_scale.expand(len(W) - 1)
    return CoefficientMap(
        W.mT,
        bias,
        scale=torch.cat([alpha_scale, connection.dynamic_beta_scale]),
        static=torch.cat([connection.static_alpha, connection.static_beta[:, None]], -1),
        bound=connection.bound,
        eps=connection.statistics.eps,
        centred=connection.statistics.centred,
    )


def width_weights(connection: Any, H: Tensor, Y: Tensor | None, beta: Tensor | None) -> Tensor:
    """alpha [B T n columns], or [n columns] where it is static.

    H: [B T n D].  Y: [B T n D] or [B T 1 D].  beta: [n] or [B T n].
    """
    if not connection.dynamic:
        return connection.static_alpha
    _, alpha, _ = dynamic_coefficients(H, Y, beta, coefficient_map(connection))
    return alpha


def write_to_streams(H: Tensor, beta: Tensor | None, outputs: int = 1) -> Tensor:
    """[I | beta]: the weights of a pending write to n streams, [.. n n+1 1], or I without a write.

    With `outputs` = n, each stream gets another part of the write: [I | diag(beta)].
    """
    kept = identity_weights(H.shape[-2], upcast(H))
    if beta is None:
        return kept
    added = beta[..., None, None] if outputs == 1 else beta.diag_embed()[..., None]
    return join_columns(kept, added)


def sum_readout_weights(write: Tensor, n: int) -> MixingWeights:
    """`mixing_weights` of a readout that sums n streams, after the pending write."""
    return MixingWeights(write, torch.ones_like(write[..., :1, :n, :]), identity_weights(n, write))


def streams_memory_traffic(connection: Connection[Any], n: int) -> float:
    """The traffic of n streams: the streams and y are read, the streams and inputs are written."""
    read = n + 1 if connection.site.index else 1  # n equal copies of the embedding are read once
    written = 0 if connection.is_readout else n
    return read + written + len(connection.ports)


class Statistics(NamedTuple):
    """The norm of the streams that coefficients are computed from."""

    eps: float
    centred: bool
    weighted: bool
    biased: bool


STREAM_STATISTICS = {
    "layernorm": Statistics(1e-5, True, True, True),
    "rmsnorm": Statistics(1e-6, False, True, False),
    "unweighted": Statistics(1e-5, True, False, False),
}
