"""What hyper- and frac-connections share: alpha and beta, static or computed from the streams.

    alpha = s_a · tanh(N(H) W_a) + static_alpha   [B T n columns]   what is mixed from n streams
    beta  = s_b · tanh(N(H) w_b) + static_beta    [B T n]           the next write in each stream

The parameters have the same names in both methods. Fractions of the width are streams here.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..float32_parameters import assign_value, float32_parameter
from ..ops import CoefficientMap, dynamic_coefficients
from ..ops.hyper import BoundName


class StreamNorm(NamedTuple):
    """N, the norm of the streams that coefficients are computed from."""

    eps: float
    centred: bool
    weighted: bool
    biased: bool


STREAM_NORMS = {
    "layernorm": StreamNorm(1e-5, centred=True, weighted=True, biased=True),
    "rmsnorm": StreamNorm(1e-6, centred=False, weighted=True, biased=False),
    "unweighted": StreamNorm(1e-5, centred=True, weighted=False, biased=False),
}


class AlphaBetaConnection(Protocol):
    """A connection with alpha and beta. Below `static_beta` are attributes of a dynamic one alone.

    Attributes:
        dynamic: alpha and beta depend on the input.
        bound: of the dynamic part.
        stream_norm: N.
        static_alpha: [n columns].
        static_beta: [n].
        dynamic_alpha_fn: W_a [width columns].
        dynamic_beta_fn: w_b [width].
        dynamic_alpha_scale: s_a [1].
        dynamic_beta_scale: s_b [1].
        norm_weight: of N, [width]; None where it has none.
        norm_bias: of N, [width]; None where it has none.
    """

    dynamic: bool
    bound: BoundName
    stream_norm: StreamNorm
    static_alpha: Tensor
    static_beta: Tensor
    dynamic_alpha_fn: Tensor
    dynamic_beta_fn: Tensor
    dynamic_alpha_scale: Tensor
    dynamic_beta_scale: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None


def add_alpha_and_beta(
    connection: AlphaBetaConnection, width: int, streams: int, columns: int
) -> None:
    """Register the parameters of the static part and, if `connection.dynamic`, of the dynamic one.

    Args:
        connection: has `dynamic` and `stream_norm`, and gets the other attributes.
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
    connection.norm_weight = float32_parameter(width) if connection.stream_norm.weighted else None
    connection.norm_bias = float32_parameter(width) if connection.stream_norm.biased else None


@torch.no_grad()
def reset_alpha_and_beta(
    connection: AlphaBetaConnection, static_alpha: list[list[float]], static_beta: list[float]
) -> None:
    """Set the static part to the given values and the dynamic part to zero.

    Args:
        connection: after `add_alpha_and_beta`.
        static_alpha: [n columns].
        static_beta: [n].
    """
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


def coefficient_map(connection: AlphaBetaConnection) -> CoefficientMap:
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
        eps=connection.stream_norm.eps,
        centred=connection.stream_norm.centred,
    )


def width_weights(
    connection: AlphaBetaConnection, H: Tensor, Y: Tensor | None, beta: Tensor | None
) -> Tensor:
    """alpha [B T n columns], or [n columns] where it is static.

    Args:
        connection: of the site that mixes.
        H: the streams, [B T n D].
        Y: the pending write, [B T n D] or [B T 1 D]; None without one.
        beta: its weight in each stream, [n] or [B T n]; None without one.
    """
    if not connection.dynamic:
        return connection.static_alpha
    _, alpha, _ = dynamic_coefficients(H, Y, beta, coefficient_map(connection))
    return alpha
