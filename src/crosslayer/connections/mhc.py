"""mHC: hyper-connections whose residual matrix is doubly stochastic, in DeepSeek-V4's convention.

Paper: Manifold-Constrained Hyper-Connections (Xie et al., 2025), arXiv 2512.24880, equations 7-9.

    v = vec(H) [nD];   z = (v·fnᵀ)·rsqrt(mean(v²) + norm_eps)·scale + base      fn [n²+2n, nD], order pre | post | res
    pre = σ(z_pre) + eps;   post = 2σ(z_post);   R = Sinkhorn(z_res), R[src, dst]
    input = Σ_s pre_s H_s;   H_dst ← post_dst · y + Σ_src R[src, dst] H_src
    entry: the embedding repeated n times;   readout: Σ_s (σ(z_head) + eps)_s H_s, then the final norm

Public implementations differ in what follows and give fluent wrong answers where it is mixed up, so each is named:
    orientation    "src dst" (default): z_res is laid out with the source as its row;  "dst src": transposed
    order          "src last" (default, the paper's T_r(T_c(·))): the last normalisation is over sources;  "dst last"
    readout        "head" (learnt, DeepSeek-V4), "sum" or "mean" (GLM)
    residual       "sinkhorn", or "identity": R = I and no z_res (iHC)
    eps, norm_eps  of pre's sigmoid and Sinkhorn; of the norm of v (GLM and Hy4: 1e-5)
    magnitude, post_eps    post = magnitude · σ(z_post) + post_eps (Hy4 adds 1e-6)
    single_pass    the pre computed from H_k collapses H_{k+1}, so that one pass reads and writes the streams; the
                   first collapse takes stream 0 and the readout uses the last pre (DeepSeek-V4.1)
Starts as PreNorm, up to eps: fn = 0, scale 0.01, base 0 on the diagonal of z_res and −8 off it, and −1 for pre but +1
at the layer's own stream; post 1. Mixer parameters stay float32.
State: n streams, post of the pending write, and pre when single-pass. Parameters a sub-layer: (n²+2n)(nD + 1) + 3, and
n(nD + 1) + 1 for the head. Traffic: (2n + 2)D a token and boundary at the least.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..connection import NormFactory, Site, float32_parameter
from ..fused_norms import FusedNormConnection
from ..norms import NormSpec, apply_norm, upcast
from ..ops import (
    depth_connection,
    expand_to_streams,
    mix_streams,
    sinkhorn,
    width_connection,
    write_norm_project,
)
from ..validation import check_choice, check_positive
from .hyper import streams_memory_traffic


class Manifold(NamedTuple):
    H: Tensor  # [B T n D]
    y: Tensor | None = None  # pending write ...
    post: Tensor | None = None  # ... and how much of it each stream takes, [B T n]
    pre: Tensor | None = None  # single pass: what collapses the streams next, [B T n]


class MHC(FusedNormConnection[Manifold]):
    gate_fields = ("post",)
    prenorm_up_to_scale = True
    test_variants = (
        "mhc(orientation='dst src', order='dst last', readout='sum', iterations=3)",
        "mhc(residual='identity', readout='mean', streams=2, norm_eps=1e-5)",
        "mhc(single_pass=True)",
    )
    weight_decay_params = frozenset({"fn"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        streams: int = 4,
        iterations: int = 20,
        orientation: str = "src dst",
        order: str = "src last",
        readout: str = "head",
        residual: str = "sinkhorn",
        single_pass: bool = False,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        magnitude: float = 2.0,
        post_eps: float = 0.0,
    ):
        super().__init__(site, dim, norm)
        check_positive(streams=streams, iterations=iterations)
        self.n, self.iterations, self.single_pass = streams, iterations, single_pass
        self.eps, self.norm_eps, self.magnitude, self.post_eps = eps, norm_eps, magnitude, post_eps
        self.transposed = check_choice(
            "orientation", orientation, {"src dst": False, "dst src": True}
        )
        self.dst_last = check_choice("order", order, {"src last": False, "dst last": True})
        self.mixes = check_choice("residual", residual, {"sinkhorn": True, "identity": False})
        self.collapse = check_choice("readout", readout, READOUTS)
        if magnitude + post_eps <= 1 or post_eps >= 1:
            raise ValueError(
                f"post must reach 1 at the start, got magnitude={magnitude!r} and post_eps={post_eps!r}"
            )
        if single_pass and readout != "head":
            raise ValueError(
                f"single_pass and readout={readout!r} exclude each other: its readout is the last pre"
            )
        n = streams
        sizes = [n] if self.is_readout else [n, n] + [n * n] * self.mixes
        mixers = not self.is_readout or (readout == "head" and not single_pass)
        self.sizes = sizes
        self.fn = float32_parameter(sum(sizes), n * dim) if mixers else None
        self.base = float32_parameter(sum(sizes)) if mixers else None
        self.scale = float32_parameter(len(sizes)) if mixers else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.fn is None or self.base is None or self.scale is None:
            return
        nn.init.zeros_(self.fn)
        nn.init.constant_(self.scale, 0.01)
        nn.init.zeros_(self.base)
        if not self.is_readout:
            share = (1 - self.post_eps) / self.magnitude  # post is 1 at the start
            self.base[self.n : 2 * self.n] = math.log(share / (1 - share))
            self.base[: self.n] = -1
            self.base[self.site.index % self.n] = 1
        if not self.is_readout and self.mixes:
            self.base[2 * self.n :] = -8 * (
                1 - torch.eye(self.n, device=self.base.device).flatten()
            )

    def initial_state(self, x: Tensor) -> Manifold:
        first = (
            torch.eye(self.n, device=x.device).to(upcast(x).dtype)[0].expand(*x.shape[:-1], self.n)
        )
        return Manifold(expand_to_streams(x, self.n), pre=first if self.single_pass else None)

    def fused_read(
        self, state: Manifold, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Manifold]:
        H, y, post, pre = state
        Y = None if y is None else y[..., None, :]
        if self.fn is None:  # a readout without a head
            H = depth_connection(H, Y, post)
            return (
                apply_norm(self.collapse(H) if pre is None else collapsed(H, pre), *norms),
            ), Manifold(H)
        H, z = write_norm_project(H, Y, post, self.fn.mT, self.norm_eps)
        now, *rest = self.coefficients(z[..., 0, :])
        if self.is_readout:
            return (apply_norm(collapsed(H, now), *norms),), Manifold(H)
        post = self.magnitude * rest[0].sigmoid() + self.post_eps
        reads = now if pre is None else pre
        if self.mixes:
            x, H = width_connection(H, reads, self.mixture(rest[1]), *norms)
        else:
            x = apply_norm(collapsed(H, reads), *norms)
        return (x,), Manifold(H, post=post, pre=now if self.single_pass else None)

    def memory_traffic(self) -> float:
        return streams_memory_traffic(self, self.n)

    def coefficients(self, z: Tensor) -> tuple[Tensor, ...]:
        """pre [B T n], and the logits of post [B T n] and of R [B T n·n] as far as the site has them."""
        assert self.base is not None and self.scale is not None
        parts = zip(z.split(self.sizes, -1), self.scale, self.base.split(self.sizes), strict=True)
        pre, *rest = (part * s + b for part, s, b in parts)
        return pre.sigmoid() + self.eps, *rest

    def mixture(self, logits: Tensor) -> Tensor:
        """R [B T src dst]."""
        R = logits.unflatten(-1, (self.n, self.n))
        R = R.mT if self.transposed else R
        if self.dst_last:
            return sinkhorn(R.mT, self.iterations, self.eps).mT
        return sinkhorn(R, self.iterations, self.eps)


def collapsed(H: Tensor, pre: Tensor) -> Tensor:
    """Σ_s pre_s H_s: [B T n D] -> [B T D]."""
    return mix_streams(H, pre[..., None]).squeeze(-2)


def total(H: Tensor) -> Tensor:
    return H.sum(-2)


def mean(H: Tensor) -> Tensor:
    return H.mean(-2)


READOUTS = {"head": total, "sum": total, "mean": mean}
