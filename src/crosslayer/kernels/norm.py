"""A norm taken along by the op before it, and the pending write with the norm of what comes of it.

x̂ = (x − μ) r,   r = rsqrt(mean((x − μ)²) + eps);   out = x̂·weight + bias;   μ is mean(x) in a LayerNorm, else 0
backward:   g = dout·weight,   dx = r (g − mean(g) − x̂ mean(g x̂)),   mean(g) in a LayerNorm alone
dweight = Σ_tokens dout x̂,   dbias = Σ_tokens dout;   μ and r are computed again

add_norm:   h' = h + y, rounded as it is stored, and its norm
reads 2D, writes 2D elements a token;   backward reads 3D (h', dh', dout), writes D: h and y have one gradient
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec, add_write, apply_norm
from . import launch


def add_norm(h: Tensor, y: Tensor | None, norm: NormSpec | None = None) -> tuple[Tensor, Tensor]:
    """`ops.add_norm`. h, y: [B T D].  ->  h' and its norm, [B T D] each."""
    if y is None or norm is None or y.dtype != h.dtype:
        h = add_write(h, y)
        return h, apply_norm(h, norm)
    return torch.ops.crosslayer.add_norm(h, y, *given(norm))


def moves(N: int, D: int, size: int, parameters: int) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element."""
    return 4 * N * D * size + 4 * D * parameters, 4 * N * D * size + parameters_back(D, parameters)


def parameters_back(D: int, parameters: int) -> int:
    """Bytes of a norm's weight, read by a backward, and of the gradients of it and of a bias, written."""
    return 4 * D * (1 + parameters) if parameters else 0


@triton.jit
def normalised(x, d, D, eps, CENTRED: tl.constexpr):
    """x̂ and r of a row, 0 beyond D."""
    if CENTRED:
        x = tl.where(d < D, x - tl.sum(x, 0) / D, 0.0)
    r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    return x * r, r


@triton.jit
def affine(weight, bias, d, D):
    """A norm's weight and bias, 0 where it has none."""
    w, b = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32), 0.0
    if bias is not None:
        b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def through(g, x, r, d, D, CENTRED: tl.constexpr):
    """dx of the norm, given g = dout·weight, x̂ and r."""
    dx = g - x * (tl.sum(g * x, 0) / D)
    if CENTRED:
        dx = tl.where(d < D, dx - tl.sum(g, 0) / D, 0.0)
    return r * dx


@triton.jit
def norm_forward(
    h, y, weight, bias, new, out, N, D, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    w, b = affine(weight, bias, d, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(h + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x += tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = x.to(new.dtype.element_ty)
        tl.store(new + t * D + d, x, mask=d < D)
        x, _ = normalised(x.to(tl.float32), d, D, eps, CENTRED)
        tl.store(out + t * D + d, (x * w + b).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def norm_backward(
    new, weight, dnew, dout, dh, dweight, dbias, N, D, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(new + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dn = tl.load(dout + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x, r = normalised(x, d, D, eps, CENTRED)
        dw += dn * x
        db += dn
        dx = tl.load(dnew + t * D + d, mask=d < D, other=0.0).to(tl.float32) + through(
            dn * w, x, r, d, D, CENTRED
        )
        tl.store(dh + t * D + d, dx.to(dh.dtype.element_ty), mask=d < D)
    keep(dw, db, dweight, dbias, d, D)


@triton.jit
def keep(dw, db, dweight, dbias, d, D):
    """Store a program's parts of the gradients of weight and bias."""
    mine = tl.program_id(0).to(tl.int64) * D
    tl.store(dweight + mine + d, dw, mask=d < D)
    if dbias is not None:
        tl.store(dbias + mine + d, db, mask=d < D)


def given(norm: NormSpec | None) -> tuple[list[Tensor], float, bool]:
    """As an op takes it: [weight] or [weight, bias], eps and `centred`; [] without a norm."""
    if norm is None:
        return [], 0.0, False
    return [p for p in (norm.weight, norm.bias) if p is not None], norm.eps, norm.centred


def pair(affine: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """What a kernel takes for weight and bias."""
    weight, bias, *_ = (*affine, None, None)
    return weight, bias


def parts(affine: Sequence[Tensor], count: int) -> list[Tensor]:
    """Room for what `keep` stores of so many programs."""
    return [launch.part(p, count, len(p)) for p in affine]


def totals(kept: Sequence[Tensor], affine: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of weight and bias."""
    return [launch.total(part, 0).to(p.dtype) for part, p in zip(kept, affine, strict=True)]


@torch.library.custom_op("crosslayer::add_norm", mutates_args=())
def _add_norm(
    h: Tensor, y: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    h, y, affine = h.contiguous(), y.contiguous(), [p.contiguous() for p in affine]
    N, D, size = launch.tokens(h), h.shape[-1], launch.block(h.shape[-1])
    new, out = torch.empty_like(h), torch.empty_like(h)
    launch.launch(
        norm_forward, (launch.programs(N, h),), h, y, *pair(affine), new, out, N, D, eps, CENTRED=centred, BLOCK=size,
        num_warps=launch.warps(size),
    )  # fmt: skip
    return new, out


@_add_norm.register_fake
def _(
    h: Tensor, y: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape)


@torch.library.custom_op("crosslayer::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dnew: Tensor, dout: Tensor, new: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, list[Tensor]]:
    dnew, dout, new, affine = (
        *(t.contiguous() for t in (dnew, dout, new)),
        [p.contiguous() for p in affine],
    )
    N, D, size = launch.tokens(new), new.shape[-1], launch.block(new.shape[-1])
    count = launch.programs(N, new)
    dh, kept = torch.empty_like(new), parts(affine, count)
    launch.launch(
        norm_backward, (count,), new, affine[0], dnew, dout, dh, *pair(kept), N, D, eps, CENTRED=centred, BLOCK=size,
        num_warps=launch.warps(2 * size),
    )  # fmt: skip
    return dh, totals(kept, affine)


@_add_norm_backward.register_fake
def _(
    dnew: Tensor, dout: Tensor, new: Tensor, affine: Sequence[Tensor], eps: float, centred: bool
) -> tuple[Tensor, list[Tensor]]:
    return new.new_empty(new.shape), [p.new_empty(p.shape) for p in affine]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, _, affine, *ctx.rest = inputs
    ctx.save_for_backward(output[0], *affine)


def _differentiate(ctx: Any, dnew: Tensor, dout: Tensor) -> tuple[Any, ...]:
    new, *affine = ctx.saved_tensors
    dh, daffine = torch.ops.crosslayer.add_norm_backward(dnew, dout, new, affine, *ctx.rest)
    return dh, dh, daffine, None, None


_add_norm.register_autograd(_differentiate, setup_context=_save)
