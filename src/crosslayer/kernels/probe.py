"""The pending write, and projections of the normed streams, in one pass: what coefficients are made of.

H'_s = H_s + β_s Y_s, rounded as it is stored;   z = (v − μ) r W,   r = rsqrt(mean((v − μ)²) + eps)
v is each stream of H' by itself, or all of a token's as one vector; μ is its mean, or 0. (v − μ) W is v times W less
the mean of its columns, and so W is what is centred
reads (n + 1)·D, writes n·D elements a token; W comes from cache, once a tile of tokens

backward:   g = dz r,   c = ⟨dz, z⟩ r²/width,   dH = dH' + g Wᵀ − c (v − μ),   dW = Σ_tokens vᵀ g, centred as W
dY = Σ_s β_s dH_s,   dβ_s = ⟨dH_s, Y⟩
reads (2n + 1)·D, writes (n + 1)·D: each program has a piece of the width for all its tokens, so that W is read, and dW
added up, in its registers
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import ops
from . import launch

WIDEST = 64  # columns of W whose piece fits a program: mHC has more from 7 streams on, and its product is then torch's


def write_norm_project(
    H: Tensor,
    Y: Tensor | None,
    beta: Tensor | None,
    W: Tensor,
    eps: float = 1e-6,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.probe`. H: [B T n D].  Y: [B T 1|n D].  beta: [B T n].  W: [D|nD K].  ->  [B T n D], [B T n|1 K]."""
    if W.shape[1] > WIDEST:
        return ops.write_norm_project.reference(H, Y, beta, W, eps, centred)  # type: ignore[attr-defined]
    beta = None if beta is None else beta.float().expand(H.shape[:-1])
    return torch.ops.crosslayer.probe(H, Y, beta, W.float(), eps, centred)[:2]


def moves(
    N: int, D: int, n: int, K: int, joint: bool, size: int, pending: int = 1
) -> tuple[int, int]:
    """Bytes that forward and backward must move for N tokens, each with so many rows of Y, `size` bytes an element."""
    W, rows, beta = (
        4 * K * D * (n if joint else 1),
        N if joint else N * n,
        4 * N * n * (pending > 0),
    )
    forward = N * D * (2 * n + pending) * size + beta + 4 * rows * (K + 1) + W
    return forward, N * D * (3 * n + 2 * pending) * size + 2 * beta + 4 * rows * (K + 1) + 2 * W


@triton.jit
def probe_forward(
    H, Y, beta, W, new, z, rstd, mu, N, D, eps, CENTRED: tl.constexpr, PENDING: tl.constexpr, EACH: tl.constexpr,
    n: tl.constexpr, K: tl.constexpr, JOINT: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = TILE if JOINT else TILE * SIDE
    C: tl.constexpr = SIDE * BLOCK if JOINT else BLOCK
    first = tl.program_id(0).to(tl.int64) * TILE
    t, s = first + tl.arange(0, TILE)[:, None, None], tl.arange(0, SIDE)[None, :, None]
    k, column = tl.arange(0, WIDE)[None, :], tl.arange(0, C)[:, None]
    if PENDING:
        b = tl.load(beta + t * n + s, mask=(t < N) & (s < n), other=0.0)
    dots = tl.zeros([R, WIDE], tl.float32)
    mean, spread = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, None, :]
        on = (t < N) & (s < n) & (d < D)
        h = tl.load(H + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
        if PENDING:
            if EACH:
                y = tl.load(Y + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
            else:
                y = tl.load(Y + t * D + d, mask=(t < N) & (d < D), other=0.0).to(tl.float32)
            h = h + b * y
        h = h.to(new.dtype.element_ty)
        tl.store(new + (t * n + s) * D + d, h, mask=on)
        v = tl.reshape(h.to(tl.float32), [R, C])
        at = start + column % BLOCK
        w = tl.load(
            W + (column // BLOCK * D + at) * K + k,
            mask=(column // BLOCK < n) & (at < D) & (k < K),
            other=0.0,
        )
        dots += tl.dot(v, w, input_precision="tf32x3")
        if CENTRED:
            # this piece's mean and squares about it, joined to those of the pieces before
            before, count = (
                start * (n if JOINT else 1),
                tl.minimum(D - start, BLOCK) * (n if JOINT else 1),
            )
            piece = tl.sum(v, 1) / count
            off = tl.where(tl.reshape(on.to(tl.int32), [R, C]) > 0, v - piece[:, None], 0.0)
            step = piece - mean
            mean += step * (count / (before + count))
            spread += tl.sum(off * off, 1) + step * step * (before / (before + count) * count)
        else:
            spread += tl.sum(v * v, 1)
    r = tl.rsqrt(spread / (D * (n if JOINT else 1)) + eps)
    row = tl.arange(0, R)
    if JOINT:
        row, real = first + row, first + row < N
    else:
        row, real = (
            (first + row // SIDE) * n + row % SIDE,
            (first + row // SIDE < N) & (row % SIDE < n),
        )
    if CENTRED:
        tl.store(mu + row, mean, mask=real)
    tl.store(rstd + row, r, mask=real)
    tl.store(z + row[:, None] * K + k, dots * r[:, None], mask=real[:, None] & (k < K))


@triton.jit
def probe_backward(
    new, Y, beta, W, g, c, mu, dnew, dH, dY, dbeta, dW, N, D, CENTRED: tl.constexpr, PENDING: tl.constexpr,
    EACH: tl.constexpr, n: tl.constexpr, K: tl.constexpr, JOINT: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = TILE if JOINT else TILE * SIDE
    C: tl.constexpr = SIDE * BLOCK if JOINT else BLOCK
    d, s = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, None, :],
        tl.arange(0, SIDE)[None, :, None],
    )
    k, column = tl.arange(0, WIDE)[None, :], tl.arange(0, C)[:, None]
    at = tl.program_id(0) * BLOCK + column % BLOCK
    held = (column // BLOCK < n) & (at < D) & (k < K)
    w = tl.load(W + (column // BLOCK * D + at) * K + k, mask=held, other=0.0)
    dw = tl.zeros([C, WIDE], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(N, TILE), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * TILE
        t, row = first + tl.arange(0, TILE)[:, None, None], tl.arange(0, R)
        if JOINT:
            row, real = first + row, first + row < N
        else:
            row, real = (
                (first + row // SIDE) * n + row % SIDE,
                (first + row // SIDE < N) & (row % SIDE < n),
            )
        on = (t < N) & (s < n) & (d < D)
        v = tl.reshape(
            tl.load(new + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32), [R, C]
        )
        g_t = tl.load(g + row[:, None] * K + k, mask=real[:, None] & (k < K), other=0.0)
        dw += tl.dot(tl.trans(v), g_t, input_precision="tf32x3")
        if CENTRED:
            v -= tl.load(mu + row, mask=real, other=0.0)[:, None]
        dh = tl.dot(g_t, tl.trans(w), input_precision="tf32x3")
        dh -= tl.load(c + row, mask=real, other=0.0)[:, None] * v
        dh = tl.reshape(dh, [TILE, SIDE, BLOCK])
        dh += tl.load(dnew + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
        dh = tl.where(on, dh, 0.0)
        tl.store(dH + (t * n + s) * D + d, dh.to(dH.dtype.element_ty), mask=on)
        if PENDING:
            b = tl.load(beta + t * n + s, mask=(t < N) & (s < n), other=0.0)
            if EACH:
                y = tl.load(Y + (t * n + s) * D + d, mask=on, other=0.0).to(tl.float32)
                tl.store(dY + (t * n + s) * D + d, (b * dh).to(dY.dtype.element_ty), mask=on)
            else:
                y = tl.load(Y + t * D + d, mask=(t < N) & (d < D), other=0.0).to(tl.float32)
                dy = tl.sum(b * dh, 1, keep_dims=True)
                tl.store(dY + t * D + d, dy.to(dY.dtype.element_ty), mask=(t < N) & (d < D))
            own = dbeta + tl.program_id(0).to(tl.int64) * N * n
            tl.store(own + t * n + s, tl.sum(dh * y, 2, keep_dims=True), mask=(t < N) & (s < n))
    mine = dW + tl.program_id(1).to(tl.int64) * K * D * (n if JOINT else 1)
    tl.store(mine + (column // BLOCK * D + at) * K + k, dw, mask=held)


def _cut(H: Tensor, W: Tensor, joint_tokens: int, tokens: int, elements: int) -> dict[str, Any]:
    """How a tile is cut: its tokens, where streams are normed jointly and where not, their lanes, and a piece of D."""
    n, D = H.shape[-2:]
    joint, side, wide = (
        W.shape[0] > D,
        triton.next_power_of_2(n),
        max(16, triton.next_power_of_2(W.shape[1])),
    )
    tile = joint_tokens if joint else tokens
    of_W = (side if joint else 1) * wide
    piece = max(16, min(triton.next_power_of_2(D), elements // (tile * side), 8192 // of_W))
    return {
        "n": n, "K": W.shape[1], "JOINT": joint, "TILE": tile, "SIDE": side, "BLOCK": piece, "WIDE": wide,
        "num_warps": 8, "num_stages": 1 if of_W * piece > 4096 else 2,
    }  # fmt: skip


@torch.library.custom_op("crosslayer::probe", mutates_args=())
def _probe(
    H: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    H, W = H.contiguous(), W.contiguous()
    new, z, rstd, mu = _room(H, W, centred)
    W = _centre(W) if centred else W
    cut, D, N = _cut(H, W, 64, 32, 8192), H.shape[-1], H.shape[:-2].numel()
    launch.launch(
        probe_forward, (triton.cdiv(N, cut["TILE"]),), H, *_pending(H, Y, beta), W, new, z, rstd, mu, N, D,
        eps, CENTRED=centred, PENDING=Y is not None, EACH=Y is not None and Y.shape[-2] > 1, **cut,
    )  # fmt: skip
    return new, z, rstd, mu


def _pending(H: Tensor, Y: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    # where nothing is pending, pointers that nothing is read from
    return (H, H) if Y is None or beta is None else (Y.contiguous(), beta.contiguous())


def _room(H: Tensor, W: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = (*H.shape[:-2], 1 if W.shape[0] > H.shape[-1] else H.shape[-2])
    z = W.new_empty(*rows, W.shape[1])
    return H.new_empty(H.shape), z, z.new_empty(rows), z.new_empty(rows if centred else 0)


@_probe.register_fake
def _(
    H: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(H, W, centred)


@torch.library.custom_op("crosslayer::probe_backward", mutates_args=())
def _probe_backward(
    dnew: Tensor, dz: Tensor, new: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, z: Tensor, rstd: Tensor,
    mu: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dnew, W = dnew.contiguous(), W.contiguous()
    # a token's numbers are read once a piece of D, and so those are long
    cut, D, N = (
        _cut(new, W, 16, max(1, 16 // triton.next_power_of_2(new.shape[-2])), 4096),
        new.shape[-1],
        new.shape[:-2].numel(),
    )
    centred = mu.numel() > 0
    W = _centre(W) if centred else W
    g, c = dz * rstd[..., None], (dz * z).sum(-1) * rstd * rstd / len(W)
    pieces, tiles = triton.cdiv(D, cut["BLOCK"]), triton.cdiv(N, cut["TILE"])
    splits = (
        min(tiles, max(1, launch.programs(4 * N, new) // pieces)) if new.is_cuda else min(tiles, 1)
    )
    dH, (dY, dbeta) = torch.empty_like(new), _pending_gradients(Y, new)
    parts = launch.part(W, pieces, *dbeta.shape), launch.part(W, splits, *W.shape)
    launch.launch(
        probe_backward, (pieces, splits), new, *_pending(new, Y, beta), W, g, c, mu if centred else c, dnew, dH, dY,
        *parts, N, D, CENTRED=centred, PENDING=Y is not None, EACH=Y is not None and Y.shape[-2] > 1, **cut,
    )  # fmt: skip
    dW = launch.total(parts[1], 0)
    return dH, dY, launch.total(parts[0], 0), _centre(dW) if centred else dW


def _centre(W: Tensor) -> Tensor:
    return W - W.mean(0)


def _pending_gradients(Y: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    if Y is None:
        return new.new_empty(0), new.new_empty(0, dtype=torch.float32)
    return Y.new_empty(Y.shape), new.new_empty(new.shape[:-1], dtype=torch.float32)


@_probe_backward.register_fake
def _(
    dnew: Tensor, dz: Tensor, new: Tensor, Y: Tensor | None, beta: Tensor | None, W: Tensor, z: Tensor, rstd: Tensor,
    mu: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return new.new_empty(new.shape), *_pending_gradients(Y, new), W.new_empty(W.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, Y, beta, W, _, _ = inputs
    new, z, rstd, mu = output
    ctx.mark_non_differentiable(rstd, mu)
    ctx.save_for_backward(new, Y, beta, W, z, rstd, mu)


def _differentiate(ctx: Any, dnew: Tensor, dz: Tensor, *_: Any) -> tuple[Any, ...]:
    dH, dY, dbeta, dW = torch.ops.crosslayer.probe_backward(dnew, dz, *ctx.saved_tensors)
    pending = ctx.saved_tensors[1] is not None
    return dH, dY if pending else None, dbeta if pending else None, dW, None, None


_probe.register_autograd(_differentiate, setup_context=_save)
