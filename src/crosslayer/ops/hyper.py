"""A sub-layer of dynamic hyper-connections: the pending write, coefficients, mixtures of streams.

The definition is `write_norm_project`, coefficients computed from its result, and then
`width_connection`. Those ops move (4n + 2)·D elements a token forward and (6n + 3)·D backward,
because the second needs coefficients that the first computes. Here W is small: all streams share
it. So one program can keep a token's streams on chip between the two, and a kernel moves
(2n + 2)·D and (3n + 3)·D.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..norms import NormSpec
from .dispatch import kernel_op
from .products import mix_streams
from .project import write_norm_project
from .streams import width_connection

BoundName = Literal["tanh", "none"]


class Bound(NamedTuple):
    """What bounds the dynamic part of coefficients.

    Args:
        apply: the function.
        slope: its derivative, given its result.
    """

    apply: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


COEFFICIENT_BOUNDS: dict[BoundName, Bound] = {
    "tanh": Bound(torch.tanh, lambda bounded: 1 - bounded * bounded),
    "none": Bound(lambda x: x, torch.ones_like),
}


class CoefficientMap(NamedTuple):
    """K coefficients of each of n streams: static + scale · bound(N(H) W + bias).

    Args:
        W: [D K]; all parameters are float32.
        bias: [K].
        scale: [K].
        static: [n K].
        bound: the name of a bound.
        eps: of the norm N, as in `write_norm_project`.
        centred: N subtracts the mean.
    """

    W: Tensor
    bias: Tensor
    scale: Tensor
    static: Tensor
    bound: BoundName
    eps: float
    centred: bool


def dynamic_coefficients(
    H: Tensor, Y: Tensor | None, beta: Tensor | None, coefficient_map: CoefficientMap
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the pending write, then compute coefficients from the streams.

    Args:
        H, Y, beta: as in `write_norm_project`.
        coefficient_map: of K coefficients.

    Returns:
        H' [B T n D] in H's dtype, alpha [B T n K-1] and the next beta [B T n], float32.
    """
    W, bias, scale, static, bound, eps, centred = coefficient_map
    H, z = write_norm_project(H, Y, beta, W, eps, centred)
    coefficients = scale * COEFFICIENT_BOUNDS[bound].apply(z + bias) + static
    alpha, new_beta = coefficients.tensor_split([-1], -1)
    return H, alpha, new_beta[..., 0]


@kernel_op
def hyper_connection(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    coefficient_map: CoefficientMap,
    inputs: int = 1,
    norm: NormSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sub-layer: the pending write, then mixtures with coefficients of the written streams.

    V = depth_connection(H, Y, beta),   alpha, beta' = dynamic_coefficients
    mixed_c = Σ_s alpha[s, c] V_s;   x is the first `inputs` mixtures, H' the others

    Moves (2n + 1 + inputs)·D elements a token, and W.

    Args:
        H: [B T n D].
        Y: [B T 1 D], or [B T n D]; None where no write is pending.
        beta: [n] static, or [B T n]; None for 1, or where no write is pending.
        coefficient_map: of K = inputs + n + 1 coefficients: alpha, then beta'.
        inputs: the number of mixtures in x.
        norm: the norm of x, if `inputs` is 1; None for no norm.

    Returns:
        x [B T inputs·D] and H' [B T n D] in H's dtype, and beta' [B T n] float32.

    Raises:
        ValueError: a norm, and several mixtures in x.
    """
    if inputs > 1 and norm is not None:
        raise ValueError(f"a norm of x with {inputs} mixtures: only a single mixture has one")
    H, alpha, new_beta = dynamic_coefficients(H, Y, beta, coefficient_map)
    if inputs == 1:
        x, H = width_connection(H, alpha[..., 0], alpha[..., 1:], norm)
        return x, H, new_beta
    mixed, H = mix_streams(H, alpha).tensor_split([inputs], -2)
    return mixed.flatten(-2), H, new_beta
