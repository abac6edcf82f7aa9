"""Kernels of `ops.depth_mix`: weighted sums over depth in one pass over the sources.

m_c  = Σ_l w[c, l] X_l             reads L·D, writes D elements a token for each output
dX_l = dX'_l + Σ_c w[c, l] dm_c    reads 2L·D, and D for each output; writes L·D
dw[c, l] = ⟨dm_c, X_l⟩             float32, for each token; summed over tokens where w is static

dX'_l is the gradient of the source passed on (`ops.mix`). An output is m_c, or the norm of m_c as
rounded. A mixture that only feeds a norm is not stored: the backward recomputes it, so it takes the
sources twice, the second time from registers or from cache. A gradient that autograd left undefined
is not read. A fused norm needs a whole row in one program.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from .. import ops
from ..norms import NormSpec, apply_norm
from ..ops.dispatch import reference_of
from ..ops.manual_backward import definition_gradients, run_function
from ..ops.mix import MixOutputs, pass_sources_on
from . import launch
from .fused_norm import (
    add_affine_partial_sums,
    empty_affine_partial_sums,
    load_affine,
    load_parameter,
    norm_arguments,
    norm_of_arguments,
    norm_row,
    norm_rows_backward,
    store_affine_gradients,
    weight_and_bias,
)
from .library_op import LibraryOp
from .row_sums import repeat_conversion, sum_rows
from .sources import bucket_size, load_numbers, load_rows, pad_sources

# A launch takes three pointers for each, and drivers before R530 take 4 KiB of arguments.
MOST_SOURCES = 128


def depth_mix(
    X: tuple[Tensor, ...], w: Tensor, outputs: MixOutputs | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`ops.depth_mix`."""
    if len(X) != w.shape[-1]:
        raise ValueError(f"depth_mix: {len(X)} sources but weights for {w.shape[-1]}")
    if w.dim() > 2:
        w = w.expand(*X[0].shape[:-1], *w.shape[-2:])
    if outputs is None:
        outputs = tuple((c, None) for c in range(w.shape[-2]))
    norms = [norm for _, norm in outputs if norm is not None]
    if norms and not _can_fuse(X[0].shape[-1], w.shape[-2], norms):
        # Each mixture is stored once. Its norms follow the kernel.
        mixtures = tuple(dict.fromkeys(c for c, _ in outputs))
        stored, passed = depth_mix(X, w, tuple((c, None) for c in mixtures))
        mixed = dict(zip(mixtures, stored, strict=True))
        return tuple(apply_norm(mixed[c], norm) for c, norm in outputs), passed
    normed_mixtures = tuple(c for c, norm in outputs if norm is not None)
    _, eps, centred = norm_arguments(norms[0] if norms else None)
    affine: list[Tensor] = []
    for norm in norms:
        affine += norm_arguments(norm)[0]
    plain = tuple(dict.fromkeys(c for c, norm in outputs if norm is None))  # that are stored
    results = run_function(
        _DepthMix, w.float(), plain, normed_mixtures, eps, centred, len(X), *X, *affine
    )
    mixed = dict(zip(plain, results, strict=False))
    normed = iter(results[len(plain) :])
    returned = tuple(mixed[c] if norm is None else next(normed) for c, norm in outputs)
    return returned, pass_sources_on(X, results[-len(X) :])


def _can_fuse(D: int, C: int, norms: Sequence[NormSpec]) -> bool:
    """Whether all norms are of one kind and fit in registers with their parameters' gradients."""
    kinds = {(norm.eps, norm.centred, norm.bias is None) for norm in norms}
    if len(kinds) != 1 or D > launch.MAX_ROW_BLOCK:
        return False
    parameters = sum(len(norm_arguments(norm)[0]) for norm in norms)
    return launch.fits_in_registers([], launch.block_size(D), C + len(norms) + parameters)


@triton.jit
def _load_row(x, t, d, D, BLOCK: tl.constexpr):
    """Token t's row in float32; zeros where there is none."""
    out = tl.zeros([BLOCK], tl.float32)
    if x is not None:
        out = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    return out


@triton.jit
def _add_sources(sums, X, first: tl.constexpr, number: tl.constexpr, mixtures, w, count, row, d, D):
    """sums_i + Σ_l w[mixtures_i, l] X_l, over a number of sources from the first on."""
    weights = ()
    for i in tl.static_range(len(sums)):
        weights = weights + (load_numbers(w + mixtures[i] * count, first, number, count, 0.0),)
    rows = load_rows(X, first, number, count, row, d, D)
    for l in tl.static_range(number):
        x = rows[l].to(tl.float32)
        more = ()
        for i in tl.static_range(len(sums)):
            more = more + (sums[i] + weights[i][l] * x,)
        sums = more
    return sums, rows


@triton.jit
def _sum_sources(sums, X, first: tl.constexpr, number: tl.constexpr, mixtures, w, count, row, d, D):
    """The sums of `_add_sources` alone."""
    sums, _ = _add_sources(sums, X, first, number, mixtures, w, count, row, d, D)
    return sums


@triton.jit
def _mix_back(
    rows, X, later, dX, douts, w_t, dw_t, first: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, KEPT: tl.constexpr, count, row, d, D, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store dX and dw of a group of sources.

    A function, because triton joins what a branch assigns to what had the name before, and rows of
    two groups may differ: in dtype, or where no gradient was passed on.
    """
    passed = load_rows(later, first, GROUP, count, row, d, D)
    if not KEPT:  # a second time where there are norms, then from cache
        rows = load_rows(X, first, GROUP, count, row, d, D)
    w_group = ()
    products = ()
    for c in tl.static_range(C):
        w_group = w_group + (load_numbers(w_t + c * count, first, GROUP, count, 0.0),)
        for i in tl.static_range(GROUP):
            x = repeat_conversion(rows[first * KEPT + i])
            products = products + (douts[c] * x,)
    sums = sum_rows(products, BLOCK)
    k = tl.arange(0, sums.numel)
    l = first + k % GROUP
    mask = (k < C * GROUP) & (l < count)
    tl.store(dw_t + k // GROUP * count + l, sums, mask=mask)
    for i in tl.static_range(GROUP):
        dx = tl.zeros([BLOCK], tl.float32)
        for c in tl.static_range(C):
            dx += w_group[c][i] * douts[c]
        if later[first + i] is not None:
            dx += passed[i].to(tl.float32)
        mask = d < D * (first + i < count)
        tl.store(dX[first + i] + row, dx.to(dX[first + i].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "count", "step"])
def depth_mix_forward(
    X, w, weight, bias, out, normed, N, D, count, step, eps,
    NORMED: tl.constexpr, CENTRED: tl.constexpr, L: tl.constexpr, LOADED: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    affines = ()
    for i in tl.static_range(len(NORMED)):
        affines = affines + (load_affine(weight[i], bias[i], d, D),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        sums = ()
        every = ()
        for c in tl.static_range(C):
            sums = sums + (tl.zeros([BLOCK], tl.float32),)
            every = every + (c,)
        for first in tl.static_range(0, L, LOADED):
            # A branch, across which the compiler moves no loads: it would first load the weights of
            # all sources, and the registers would be too few for the rows of a group.
            if first == 0 or first < count:
                sums = _sum_sources(sums, X, first, LOADED, every, w + t * step, count, row, d, D)
        for c in tl.static_range(C):
            if out[c] is not None:
                tl.store(out[c] + row, sums[c].to(out[c].dtype.element_ty), mask=d < D)
        for i in tl.static_range(len(NORMED)):
            x = sums[NORMED[i]].to(normed[i].dtype.element_ty).to(tl.float32)
            x = norm_row(x, affines[i][0], affines[i][1], d, D, eps, CENTRED)
            tl.store(normed[i] + row, x.to(normed[i].dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N", "count", "step"])
def depth_mix_backward(
    X, w, weight, dout, dnormed, later, dX, dw, dweight, dbias, N, D, count, step, eps,
    NORMED: tl.constexpr, CENTRED: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr,
    LOADED: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Whether the rows that were read for the norms' backward are still in registers.
    KEPT: tl.constexpr = len(NORMED) > 0 and L == LOADED
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights = ()
    dweights = ()
    dbiases = ()
    for i in tl.static_range(len(NORMED)):
        weights = weights + (load_parameter(weight[i], d, D),)
        dweights = dweights + (tl.zeros([BLOCK], tl.float32),)
        dbiases = dbiases + (tl.zeros([BLOCK], tl.float32),)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        row = t * D + d
        w_t = w + t * step
        dw_t = dw + (tl.program_id(1) * tl.cast(N, tl.int64) + t) * C * count
        douts = ()
        kept = ()
        for c in tl.static_range(C):
            douts = douts + (_load_row(dout[c], t, d, D, BLOCK),)
        if len(NORMED) > 0:
            mixed = ()
            dnorms = ()
            gradients = ()
            for i in tl.static_range(len(NORMED)):
                mixed = mixed + (tl.zeros([BLOCK], tl.float32),)
                dnorms = dnorms + (_load_row(dnormed[i], t, d, D, BLOCK),)
            for first in tl.static_range(0, L, LOADED):
                if KEPT:
                    mixed, kept = _add_sources(
                        mixed, X, first, LOADED, NORMED, w_t, count, row, d, D
                    )
                elif first == 0 or first < count:  # without it triton compiles four times as long
                    mixed = _sum_sources(mixed, X, first, LOADED, NORMED, w_t, count, row, d, D)
            rounded = ()
            for i in tl.static_range(len(NORMED)):
                rounded = rounded + (mixed[i].to(X[0].dtype.element_ty).to(tl.float32),)
            normed, dmixed = norm_rows_backward(rounded, dnorms, weights, d, D, eps, CENTRED, BLOCK)
            new_dweights = ()
            new_dbiases = ()
            for i in tl.static_range(len(NORMED)):
                new_dweights = new_dweights + (dweights[i] + dnorms[i] * normed[i],)
                new_dbiases = new_dbiases + (dbiases[i] + dnorms[i],)
            dweights = new_dweights
            dbiases = new_dbiases
            for c in tl.static_range(C):
                dout_c = douts[c]
                for i in tl.static_range(len(NORMED)):
                    if NORMED[i] == c:
                        dout_c += dmixed[i]
                gradients = gradients + (dout_c,)
            douts = gradients
        for first in tl.static_range(0, L, GROUP):
            if first == 0 or first < count:
                _mix_back(
                    kept, X, later, dX, douts, w_t, dw_t, first, C, GROUP, KEPT, count, row, d, D,
                    BLOCK,
                )  # fmt: skip
    for i in tl.static_range(len(NORMED)):
        store_affine_gradients(dweights[i], dbiases[i], dweight[i], dbias[i], d, D)


def _weights_and_biases(
    affine: Sequence[Tensor], norms: int
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """`affine` of all norms as a kernel takes it: a weight and a bias for each norm."""
    step = len(affine) // max(1, norms)
    pairs = [weight_and_bias(affine[i * step : (i + 1) * step]) for i in range(norms)]
    return [weight for weight, _ in pairs], [bias for _, bias in pairs]


def _launch_sizes(x: Tensor, w: Tensor, norms: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid, the step from a token's weights to the next one's, and a launch's constants."""
    C, L = w.shape[-2:]
    N = launch.token_count(x)
    D = x.shape[-1]
    block = launch.block_size(D, launch.MAX_ROW_BLOCK)
    # One program a token, unless programs have partial sums of a norm's gradient.
    programs = launch.program_count(N, x) if norms else N
    bucket = bucket_size(L)
    constants = {"L": bucket, "LOADED": min(8, bucket), "C": C, "BLOCK": block}
    return (programs, launch.ceil_div(D, block)), 0 if w.dim() == 2 else C * L, constants


def _warp_count(block: int, normed_mixtures: Sequence[int]) -> int:
    """Warps of a program. With norms it also has their weights and gradients in registers."""
    return launch.warp_count(block * (2 if normed_mixtures else 1))


def _of_every_mixture(
    tensors: Sequence[Tensor | None], plain: Sequence[int], w: Tensor
) -> list[Tensor | None]:
    """A tensor for each mixture, where `tensors` begins with those of the stored ones, `plain`."""
    placed: list[Tensor | None] = [None] * w.shape[-2]
    for c, x in zip(plain, tensors, strict=False):
        placed[c] = x
    return placed


@LibraryOp
def _depth_mix(
    X: Sequence[Tensor],
    w: Tensor,
    affine: Sequence[Tensor],
    plain: Sequence[int],
    normed_mixtures: Sequence[int],
    eps: float,
    centred: bool,
) -> list[Tensor]:
    N = launch.token_count(X[0])
    D = X[0].shape[-1]
    mixed = [torch.empty_like(X[0]) for _ in plain]
    normed = [torch.empty_like(X[0]) for _ in normed_mixtures]
    grid, step, constants = _launch_sizes(X[0], w, len(normed_mixtures))
    launch.launch_kernel(
        depth_mix_forward, grid,
        pad_sources(X), w, *_weights_and_biases(affine, len(normed_mixtures)),
        _of_every_mixture(mixed, plain, w), normed, N, D, len(X), step, eps,
        NORMED=tuple(normed_mixtures), CENTRED=centred,
        num_warps=_warp_count(constants["BLOCK"], normed_mixtures),
        # Two programs of 8 warps side by side: where one waits for a sum, the other one loads.
        max_registers=128 if normed_mixtures else None, **constants,
    )  # fmt: skip
    return [*mixed, *normed]


@_depth_mix.register_fake
def _(X: Sequence[Tensor], plain: Sequence[int], normed_mixtures: Sequence[int]) -> list[Tensor]:
    return [X[0].new_empty(X[0].shape) for _ in (*plain, *normed_mixtures)]


@LibraryOp
def _depth_mix_backward(
    dout: Sequence[Tensor | None],
    later: Sequence[Tensor | None],
    X: Sequence[Tensor],
    w: Tensor,
    affine: Sequence[Tensor],
    plain: Sequence[int],
    normed_mixtures: Sequence[int],
    eps: float,
    centred: bool,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    N = launch.token_count(X[0])
    D = X[0].shape[-1]
    grid, step, constants = _launch_sizes(X[0], w, len(normed_mixtures))
    dX = [torch.empty_like(x) for x in X]
    dw = launch.empty_partial_sums(w, *grid[1:], N, *w.shape[-2:])
    daffine = empty_affine_partial_sums(affine, grid[0])
    launch.launch_kernel(
        depth_mix_backward, grid,
        pad_sources(X), w, _weights_and_biases(affine, len(normed_mixtures))[0],
        _of_every_mixture(dout, plain, w), dout[len(plain) :], pad_sources(later), pad_sources(dX),
        dw, *_weights_and_biases(daffine, len(normed_mixtures)), N, D, len(X), step, eps,
        NORMED=tuple(normed_mixtures), CENTRED=centred, GROUP=4,
        num_warps=_warp_count(constants["BLOCK"], normed_mixtures), **constants,
    )  # fmt: skip
    axes = (0, 1) if w.dim() == 2 else (0,)
    dw = launch.add_partial_sums(dw, *axes).view(w.shape)
    return dX, dw, add_affine_partial_sums(daffine, affine)


@_depth_mix_backward.register_fake
def _(
    X: Sequence[Tensor], w: Tensor, affine: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    dX = [x.new_empty(x.shape) for x in X]
    return dX, w.new_empty(w.shape), [p.new_empty(p.shape) for p in affine]


class _DepthMix(Function):
    """The ops above, and the sources passed on. See `ops.mix`."""

    @staticmethod
    def definition(
        w: Tensor,
        plain: Sequence[int],
        normed_mixtures: Sequence[int],
        eps: float,
        centred: bool,
        L: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        X = tensors[:L]
        affine = tensors[L:]
        step = len(affine) // max(1, len(normed_mixtures))
        outputs: list[tuple[int, NormSpec | None]] = [(c, None) for c in plain]
        for i, c in enumerate(normed_mixtures):
            outputs.append((c, norm_of_arguments(affine[i * step : (i + 1) * step], eps, centred)))
        out, X = reference_of(ops.depth_mix)(X, w, tuple(outputs))
        return *out, *X

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One *args: see `ops.mix._DepthMix`.
        ctx, w, plain, normed_mixtures, eps, centred, L, *tensors = args
        X = tensors[:L]
        affine = tensors[L:]
        out = _depth_mix(X, w, affine, plain, normed_mixtures, eps, centred)
        ctx.options = (plain, normed_mixtures, eps, centred)
        ctx.L = L
        ctx.set_materialize_grads(False)  # the kernel would read the zeros
        ctx.save_for_backward(w, *tensors)
        return *out, *X

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        w, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            inputs = (w, *ctx.options, ctx.L, *tensors)
            dw, _, _, *others = definition_gradients(_DepthMix.definition, inputs, *gradients)
            return dw, None, None, *others  # for a tuple of numbers it returns a tuple
        dout = gradients[: -ctx.L]
        later = gradients[-ctx.L :]
        X = tensors[: ctx.L]
        affine = tensors[ctx.L :]
        dX, dw, daffine = _depth_mix_backward(dout, later, X, w, affine, *ctx.options)
        return dw, None, None, None, None, None, *dX, *daffine
