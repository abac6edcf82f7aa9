"""Weighted sums over depth: one pass over the sources, whatever their number and that of the mixtures.

out_c = Σ_l w[c, l] X_l              reads L·D, writes C·D elements a token
dX_l  = Σ_c w[c, l] dout_c           reads (L + C)·D, writes L·D
dw[c, l] = ⟨dout_c, X_l⟩             float32, a token's own; summed over tokens where w is static

A norm taken along writes D more, the norm of out_c as it was rounded; backward reads out_c, which is kept, and the
norm's gradient, whose part joins dout_c. A dout_c that nothing has made is not read. Norms need whole rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import NormSpec, apply_norm
from . import launch
from .norm import affine, given, keep, normalised, pair, parameters_back, parts, through, totals


def depth_mix(
    X: tuple[Tensor, ...], w: Tensor, norms: tuple[tuple[int, NormSpec], ...] = ()
) -> tuple[Tensor, ...]:
    """`ops.mix`. X: L x [B T D].  w: [C L], or [B T C L] a token's own.  ->  C mixtures and their norms, [B T D]."""
    if len(X) != w.shape[-1]:
        raise ValueError(f"mix: {len(X)} sources but weights for {w.shape[-1]}")
    if w.dim() > 2:
        w = w.expand(*X[0].shape[:-1], *w.shape[-2:])
    taken = norms if _takes(X[0].shape[-1], w.shape[-2], [norm for _, norm in norms]) else ()
    _, eps, centred = given(taken[0][1] if taken else None)
    affine = [p for _, norm in taken for p in given(norm)[0]]
    out = torch.ops.crosslayer.mix(X, w.float(), affine, [c for c, _ in taken], eps, centred)
    return (*out, *(apply_norm(out[c], norm) for c, norm in norms[len(taken) :]))


def _takes(D: int, C: int, norms: Sequence[NormSpec]) -> bool:
    # norms of one kind, of whole rows, that fit the registers beside the gradients of weights and biases
    kinds = {(norm.eps, norm.centred, norm.bias is None) for norm in norms}
    parameters = sum(len(given(norm)[0]) for norm in norms)
    return (
        len(kinds) == 1
        and D <= launch.ROW
        and launch.holds([], launch.block(D), C + len(norms) + parameters)
    )


def moves(
    N: int,
    D: int,
    L: int,
    C: int,
    size: int,
    static: bool = False,
    normed: int = 0,
    parameters: int = 0,
    back: int = 0,
) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens of `size` bytes an element.

    With so many norms, of so many parameters each, and where not all outputs have gradients, back of those that have.
    """
    w = 4 * C * L * (1 if static else N)
    forward = N * D * (L + C + normed) * size + w + 4 * D * normed * parameters
    backward = N * D * (2 * L + normed + (back or C + normed)) * size + 2 * w
    return forward, backward + normed * parameters_back(D, parameters)


@triton.jit
def row(x, t, d, D, BLOCK: tl.constexpr):
    """Token t's row in float32; zeros where there is none."""
    out = tl.zeros([BLOCK], tl.float32)
    if x is not None:
        out = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    return out


@triton.jit
def mix_forward(
    X, w, weight, bias, out, normed, N, D, step, eps, WAYS: tl.constexpr, CENTRED: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    affines = ()
    for i in tl.static_range(len(WAYS)):
        affines = affines + (affine(weight[i], bias[i], d, D),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        sums = ()
        for _ in tl.static_range(C):
            sums = sums + (tl.zeros([BLOCK], tl.float32),)
        for l in tl.static_range(L):
            x = row(X[l], t, d, D, BLOCK)
            more = ()
            for c in tl.static_range(C):
                more = more + (sums[c] + tl.load(w + t * step + c * L + l) * x,)
            sums = more
        for c in tl.static_range(C):
            tl.store(out[c] + t * D + d, sums[c].to(out[c].dtype.element_ty), mask=d < D)
        for i in tl.static_range(len(WAYS)):
            x = sums[WAYS[i]].to(normed[i].dtype.element_ty).to(tl.float32)
            x, _ = normalised(x, d, D, eps, CENTRED)
            x = x * affines[i][0] + affines[i][1]
            tl.store(normed[i] + t * D + d, x.to(normed[i].dtype.element_ty), mask=d < D)


@triton.jit
def mix_backward(
    X, w, weight, mixed, dout, dnormed, dX, dw, dweight, dbias, N, D, step, eps, WAYS: tl.constexpr,
    CENTRED: tl.constexpr, L: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights, dweights, dbiases = (), (), ()
    for i in tl.static_range(len(WAYS)):
        weights = weights + (affine(weight[i], None, d, D)[0],)
        dweights = dweights + (tl.zeros([BLOCK], tl.float32),)
        dbiases = dbiases + (tl.zeros([BLOCK], tl.float32),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        own = dw + (tl.program_id(1) * tl.cast(N, tl.int64) + t) * C * L
        dmixed, more, more_b, douts = (), (), (), ()
        for i in tl.static_range(len(WAYS)):
            x, r = normalised(row(mixed[i], t, d, D, BLOCK), d, D, eps, CENTRED)
            dn = row(dnormed[i], t, d, D, BLOCK)
            more, more_b = more + (dweights[i] + dn * x,), more_b + (dbiases[i] + dn,)
            dmixed = dmixed + (through(dn * weights[i], x, r, d, D, CENTRED),)
        dweights, dbiases = more, more_b
        for c in tl.static_range(C):
            dout_c = row(dout[c], t, d, D, BLOCK)
            for i in tl.static_range(len(WAYS)):
                if WAYS[i] == c:
                    dout_c += dmixed[i]
            douts = douts + (dout_c,)
        for l in tl.static_range(L):
            x = row(X[l], t, d, D, BLOCK)
            dx = tl.zeros([BLOCK], tl.float32)
            for c in tl.static_range(C):
                dx += tl.load(w + t * step + c * L + l) * douts[c]
                tl.store(own + c * L + l, tl.sum(douts[c] * x, 0))
            tl.store(dX[l] + t * D + d, dx.to(dX[l].dtype.element_ty), mask=d < D)
    for i in tl.static_range(len(WAYS)):
        keep(dweights[i], dbiases[i], dweight[i], dbias[i], d, D)


def _pairs(affine: Sequence[Tensor], norms: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Weights and biases, one a norm."""
    each = len(affine) // max(1, norms)
    pairs = [pair(affine[i * each : (i + 1) * each]) for i in range(norms)]
    return [weight for weight, _ in pairs], [bias for _, bias in pairs]


def _cut(x: Tensor, w: Tensor, norms: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid, the step from a token's weights to the next one's, and the constants of a launch."""
    (C, L), N, size = w.shape[-2:], launch.tokens(x), launch.block(x.shape[-1], launch.ROW)
    # a program a token, but where they keep parts of a gradient
    grid = launch.programs(N, x) if norms else N, triton.cdiv(x.shape[-1], size)
    constants = {"L": L, "C": C, "BLOCK": size, "num_warps": launch.warps(size)}
    return grid, 0 if w.dim() == 2 else C * L, constants


@torch.library.custom_op("crosslayer::mix", mutates_args=())
def _mix(
    X: Sequence[Tensor],
    w: Tensor,
    affine: Sequence[Tensor],
    ways: Sequence[int],
    eps: float,
    centred: bool,
) -> list[Tensor]:
    X, w, affine = [x.contiguous() for x in X], w.contiguous(), [p.contiguous() for p in affine]
    N, D, C = launch.tokens(X[0]), X[0].shape[-1], w.shape[-2]
    out = [torch.empty_like(X[0]) for _ in range(C + len(ways))]
    grid, step, constants = _cut(X[0], w, len(ways))
    launch.launch(
        mix_forward, grid, X, w, *_pairs(affine, len(ways)), out[:C], out[C:], N, D, step, eps, WAYS=tuple(ways),
        CENTRED=centred, **constants,
    )  # fmt: skip
    return out


@_mix.register_fake
def _(
    X: Sequence[Tensor],
    w: Tensor,
    affine: Sequence[Tensor],
    ways: Sequence[int],
    eps: float,
    centred: bool,
) -> list[Tensor]:
    return [X[0].new_empty(X[0].shape) for _ in range(w.shape[-2] + len(ways))]


@torch.library.custom_op("crosslayer::mix_backward", mutates_args=())
def _mix_backward(
    dout: Sequence[Tensor | None], X: Sequence[Tensor], w: Tensor, mixed: Sequence[Tensor], affine: Sequence[Tensor],
    ways: Sequence[int], eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:  # fmt: skip
    X, w, affine = [x.contiguous() for x in X], w.contiguous(), [p.contiguous() for p in affine]
    dout, mixed = (
        [None if d is None else d.contiguous() for d in dout],
        [x.contiguous() for x in mixed],
    )
    N, D, C = launch.tokens(X[0]), X[0].shape[-1], w.shape[-2]
    grid, step, constants = _cut(X[0], w, len(ways))
    dX, dw, kept = (
        [torch.empty_like(x) for x in X],
        launch.part(w, *grid[1:], N, *w.shape[-2:]),
        parts(affine, grid[0]),
    )
    launch.launch(
        mix_backward, grid, X, w, _pairs(affine, len(ways))[0], mixed, dout[:C], dout[C:], dX, dw,
        *_pairs(kept, len(ways)), N, D, step, eps, WAYS=tuple(ways), CENTRED=centred, **constants,
    )  # fmt: skip
    return (
        dX,
        launch.total(dw, *((0, 1) if w.dim() == 2 else (0,))).view(w.shape),
        totals(kept, affine),
    )


@_mix_backward.register_fake
def _(
    dout: Sequence[Tensor | None], X: Sequence[Tensor], w: Tensor, mixed: Sequence[Tensor], affine: Sequence[Tensor],
    ways: Sequence[int], eps: float, centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:  # fmt: skip
    return (
        [x.new_empty(x.shape) for x in X],
        w.new_empty(w.shape),
        [p.new_empty(p.shape) for p in affine],
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    X, w, affine, ctx.ways, *ctx.rest = inputs
    ctx.sizes = len(X), len(ctx.ways), len(affine)
    ctx.set_materialize_grads(False)  # zeros would be read
    ctx.save_for_backward(w, *X, *(output[c] for c in ctx.ways), *affine)


def _differentiate(ctx: Any, dout: list[Tensor | None]) -> tuple[Any, ...]:
    w, *rest = ctx.saved_tensors
    saved = iter(rest)
    X, mixed, affine = ([next(saved) for _ in range(size)] for size in ctx.sizes)
    back = torch.ops.crosslayer.mix_backward(dout, X, w, mixed, affine, ctx.ways, *ctx.rest)
    return *back, None if ctx.ways else [], None, None


_mix.register_autograd(_differentiate, setup_context=_save)
