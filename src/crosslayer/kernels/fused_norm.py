"""RMSNorm or LayerNorm fused into the kernel before it: device functions and their host side.

x̂ = (x − μ) r,   r = rsqrt(mean((x − μ)²) + eps);   out = x̂·weight + bias
μ is mean(x) in a LayerNorm, else 0

backward:   g = dout·weight,   dx = r (g − mean(g) − x̂ mean(g x̂)),   mean(g) in a LayerNorm alone
dweight = Σ_tokens dout x̂,   dbias = Σ_tokens dout;   μ and r are recomputed

An op takes a norm as `affine` = [weight] or [weight, bias], or [] for no norm, with eps and
`centred`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec
from . import launch
from .row_sums import pick_number, sum_rows


@triton.jit
def norm_row(x, w, b, d, D, eps, CENTRED: tl.constexpr):
    """x̂·w + b of a row."""
    if CENTRED:
        x = tl.where(d < D, x - tl.sum(x, 0) / D, 0.0)
    r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    return x * r * w + b


@triton.jit
def load_parameter(parameter, d, D):
    """A norm's weight or bias."""
    return tl.load(parameter + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def load_affine(weight, bias, d, D):
    """A norm's weight and bias; the bias is 0 where it has none."""
    b = 0.0
    if bias is not None:
        b = load_parameter(bias, d, D)
    return load_parameter(weight, d, D), b


@triton.jit
def norm_rows_backward(rows, douts, weights, d, D, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """x̂ and dx of each of a tuple of rows x, given the gradients of their norms.

    The sums of all rows are computed together.
    """
    centred = rows
    means = ()
    if CENTRED:
        products = ()
        for i in tl.static_range(len(rows)):
            products = products + (rows[i], douts[i] * weights[i])
        sums = sum_rows(products, BLOCK)
        centred = ()
        for i in tl.static_range(len(rows)):
            centred = centred + (tl.where(d < D, rows[i] - pick_number(sums, 2 * i) / D, 0.0),)
            means = means + (pick_number(sums, 2 * i + 1) / D,)
    products = ()
    for i in tl.static_range(len(rows)):
        products = products + (centred[i] * centred[i], douts[i] * weights[i] * centred[i])
    sums = sum_rows(products, BLOCK)
    normed = ()
    gradients = ()
    for i in tl.static_range(len(rows)):
        r = tl.rsqrt(pick_number(sums, 2 * i) / D + eps)
        x = centred[i] * r
        dx = douts[i] * weights[i] - x * (r * pick_number(sums, 2 * i + 1) / D)
        if CENTRED:
            dx = tl.where(d < D, dx - means[i], 0.0)
        normed = normed + (x,)
        gradients = gradients + (r * dx,)
    return normed, gradients


@triton.jit
def store_affine_gradients(dw, db, dweight, dbias, d, D):
    """Store a program's partial sums of the gradients of weight and bias."""
    row = tl.program_id(0).to(tl.int64) * D
    tl.store(dweight + row + d, dw, mask=d < D)
    if dbias is not None:
        tl.store(dbias + row + d, db, mask=d < D)


def norm_arguments(norm: NormSpec | None) -> tuple[list[Tensor], float, bool]:
    """A norm as an op takes it: `affine`, eps and `centred`."""
    if norm is None:
        return [], 0.0, False
    affine = [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    return affine, norm.eps, norm.centred


def norm_of_arguments(affine: Sequence[Tensor], eps: float, centred: bool) -> NormSpec | None:
    """The norm of which these are the `norm_arguments`."""
    weight, bias = weight_and_bias(affine)
    return None if weight is None else NormSpec(weight, bias, eps, centred)


def weight_and_bias(affine: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """`affine` as a kernel takes it."""
    weight = affine[0] if affine else None
    bias = affine[1] if len(affine) > 1 else None
    return weight, bias


def empty_affine_partial_sums(affine: Sequence[Tensor], programs: int) -> list[Tensor]:
    """Memory for what `store_affine_gradients` stores in each program."""
    return [launch.empty_partial_sums(p, programs, len(p)) for p in affine]


def add_affine_partial_sums(partial: Sequence[Tensor], affine: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of weight and bias, in their dtypes."""
    return [
        launch.add_partial_sums(sums, 0).to(p.dtype)
        for sums, p in zip(partial, affine, strict=True)
    ]
