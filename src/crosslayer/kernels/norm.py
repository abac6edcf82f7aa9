"""The pending write and the norm of what comes of it, in one pass.

h' = h + y, rounded as it is stored;   x̂ = (h' − μ) r,   r = rsqrt(mean((h' − μ)²) + eps);   out = x̂·weight + bias
μ is the mean of h' in a LayerNorm, and 0, with no bias, in an RMSNorm
reads 2D, writes 2D elements a token

backward:   g = dout·weight,   dh = dy = dh' + r (g − mean(g) − x̂ mean(g x̂)),   mean(g) in a LayerNorm alone
dweight = Σ_tokens dout x̂,   dbias = Σ_tokens dout
reads 3D (h', dh', dout), writes D: h and y have one gradient; r and μ are saved, two numbers a token
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


def add_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`ops.add_norm`. h, y: [B T D].  weight: [D].  ->  h' and its RMSNorm, [B T D] each."""
    return torch.ops.crosslayer.add_norm(h, y, weight, None, eps, False)[:2]


def add_layer_norm(h: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """`ops.add_layer_norm`. h, y: [B T D].  weight, bias: [D].  ->  h' and its LayerNorm, [B T D] each."""
    return torch.ops.crosslayer.add_norm(h, y, weight, bias, eps, True)[:2]


def moves(N: int, D: int, size: int, centred: bool, weight: int = 4) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element, `weight` of the weight's."""
    parameters = D * weight * (1 + centred)
    return 4 * N * D * size + parameters, 4 * N * D * size + D * weight + parameters


@triton.jit
def norm_forward(
    h, y, weight, bias, new, out, rstd, mu, N, D, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if CENTRED:
        b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(h + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x += tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = x.to(new.dtype.element_ty)
        tl.store(new + t * D + d, x, mask=d < D)
        x = x.to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, 0) / D
            tl.store(mu + t, mean)
            x = tl.where(d < D, x - mean, 0.0)
        r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        tl.store(rstd + t, r)
        normed = x * r * w
        if CENTRED:
            normed += b
        tl.store(out + t * D + d, normed.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def norm_backward(
    new, weight, rstd, mu, dnew, dout, dh, dweight, dbias, N, D, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        x = tl.load(new + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        dn = tl.load(dout + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        r = tl.load(rstd + t)
        if CENTRED:
            x = tl.where(d < D, x - tl.load(mu + t), 0.0)
            db += dn
        x = x * r
        dw += dn * x
        g = dn * w
        dx = g - x * (tl.sum(g * x, 0) / D)
        if CENTRED:
            dx -= tl.sum(g, 0) / D
        dx = tl.load(dnew + t * D + d, mask=d < D, other=0.0).to(tl.float32) + r * dx
        tl.store(dh + t * D + d, dx.to(dh.dtype.element_ty), mask=d < D)
    mine = tl.program_id(0).to(tl.int64) * D
    tl.store(dweight + mine + d, dw, mask=d < D)
    if CENTRED:
        tl.store(dbias + mine + d, db, mask=d < D)


@torch.library.custom_op("crosslayer::add_norm", mutates_args=())
def _add_norm(
    h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h, y, weight = (t.contiguous() for t in (h, y, weight))
    new, out, rstd, mu = _room(h, centred)
    N, D, size = launch.tokens(h), h.shape[-1], launch.block(h.shape[-1])
    launch.launch(
        norm_forward, (launch.programs(N, h),), h, y, weight, weight if bias is None else bias.contiguous(), new, out,
        rstd, mu, N, D, eps, CENTRED=centred, BLOCK=size, num_warps=launch.warps(size),
    )  # fmt: skip
    return new, out, rstd, mu


@_add_norm.register_fake
def _(
    h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(h, centred)


def _room(h: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd = h.new_empty(h.shape[:-1], dtype=torch.float32)
    return h.new_empty(h.shape), h.new_empty(h.shape), rstd, rstd.new_empty(rstd.shape if centred else 0)


@torch.library.custom_op("crosslayer::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dnew: Tensor, dout: Tensor, new: Tensor, weight: Tensor, rstd: Tensor, mu: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dnew, dout, new, weight = (t.contiguous() for t in (dnew, dout, new, weight))
    N, D, size = launch.tokens(new), new.shape[-1], launch.block(new.shape[-1])
    count = launch.programs(N, new)
    dh, dweight, dbias = torch.empty_like(new), launch.part(new, count, D), launch.part(new, count, D * centred)
    launch.launch(
        norm_backward, (count,), new, weight, rstd, mu, dnew, dout, dh, dweight, dbias, N, D, CENTRED=centred,
        BLOCK=size, num_warps=launch.warps(2 * size),
    )  # fmt: skip
    return dh, launch.total(dweight, 0).to(weight.dtype), launch.total(dbias, 0).to(weight.dtype)


@_add_norm_backward.register_fake
def _(
    dnew: Tensor, dout: Tensor, new: Tensor, weight: Tensor, rstd: Tensor, mu: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return new.new_empty(new.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0] * centred)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, _, weight, _, _, ctx.centred = inputs
    new, _, rstd, mu = output
    ctx.mark_non_differentiable(rstd, mu)
    ctx.save_for_backward(new, weight, rstd, mu)


def _differentiate(ctx: Any, dnew: Tensor, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    dh, dweight, dbias = torch.ops.crosslayer.add_norm_backward(dnew, dout, *ctx.saved_tensors, ctx.centred)
    return dh, dh, dweight, dbias if ctx.centred else None, None, None


_add_norm.register_autograd(_differentiate, setup_context=_save)
