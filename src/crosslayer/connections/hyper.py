"""Hyper-connections: n streams with learnt, input-dependent wiring.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, equations 10-14 and Algorithm 2.

    H_0 = the embedding, repeated n times;  at sub-layer k, counted from 1:
    alpha = s_a · tanh(N(H) W_a) + static_alpha      [B T n n+1]     static_alpha = [e_{(k−1) mod n} | I]
    beta  = s_b · tanh(N(H) w_b) + static_beta       [B T n]         static_beta = 1
    mixed = alphaᵀ H                                 [B T n+1 D]     row 0 is the input, rows 1..n are carried
    H ← beta ⊗ F_k(Norm(mixed_0)) + mixed_{1..n};    readout: the sum of the streams, then the final norm

Row s of the dynamic part depends on stream s alone. N is the listing's LayerNorm with weight and bias; `tanh=False`
drops the tanh, `dynamic=False` leaves the static part (SHC). W_a = w_b = 0 and s = 0.01 at the start: the streams are
then equal copies of the plain residual, and the readout n times it, which the final norm removes up to its eps.
State: n streams, and beta of the pending write. Parameters a sub-layer: n(n+2), and when dynamic D(n+2) + 2D + 2.
Traffic: (2n + 2)D a token and boundary at the least.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import Connection, Norm, Site, positive, weight
from ..ops import deposit, streams, wide


class Streams(NamedTuple):
    H: Tensor  # [B T n D]
    y: Tensor | None = None  # pending write ...
    beta: Tensor | None = None  # ... and how much of it each stream takes, [B T n] or [n]


class Hyper(Connection):
    variants = ("hyper(streams=2, dynamic=False)", "hyper(streams=3, tanh=False)")
    decayed = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})

    def __init__(
        self, site: Site, dim: int, norm: Norm, streams: int = 4, dynamic: bool = True, tanh: bool = True
    ):  # fmt: skip
        super().__init__(site, dim, norm)
        positive(streams=streams)
        if not (dynamic or tanh):
            raise ValueError("tanh=False and dynamic=False exclude each other: tanh bounds the dynamic part alone")
        self.n, self.dynamic, self.bound = streams, dynamic, torch.tanh if tanh else nn.Identity()
        if not self.last:
            self.static_alpha, self.static_beta = weight(streams, streams + 1), weight(streams)
        if not self.last and dynamic:
            self.dynamic_alpha_fn, self.dynamic_beta_fn = weight(dim, streams + 1), weight(dim)
            self.dynamic_alpha_scale, self.dynamic_beta_scale = weight(1), weight(1)
            self.norm_weight, self.norm_bias = weight(dim), weight(dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.last:
            return
        nn.init.eye_(self.static_alpha[:, 1:])
        nn.init.zeros_(self.static_alpha[:, 0])[self.site.index % self.n] = 1
        nn.init.ones_(self.static_beta)
        if self.dynamic:
            nn.init.zeros_(self.dynamic_alpha_fn)
            nn.init.zeros_(self.dynamic_beta_fn)
            nn.init.constant_(self.dynamic_alpha_scale, 0.01)
            nn.init.constant_(self.dynamic_beta_scale, 0.01)
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)

    def init(self, x: Tensor) -> Streams:
        return Streams(x[..., None, :].expand(*x.shape[:-1], self.n, x.shape[-1]))

    def traffic(self) -> float:
        read = self.n + 1 if self.site.index else 1  # the streams start as copies of one
        return read + (0 if self.last else self.n) + len(self.ports)

    def gather(self, state: Streams) -> tuple[tuple[Tensor, ...], Streams]:
        H = deposit(*state)
        if self.last:
            return (H.sum(-2),), Streams(H)
        alpha, beta = self.coefficients(H)
        (x,) = streams(H, alpha[..., :1]).unbind(-2)
        return (x,), Streams(streams(H, alpha[..., 1:]), beta=beta)

    def coefficients(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """alpha [B T n n+1] and beta [B T n], or without the leading axes when static."""
        if not self.dynamic:
            return self.static_alpha, self.static_beta.clone()
        N = F.layer_norm(wide(H), (self.dim,), self.norm_weight, self.norm_bias)
        alpha = self.dynamic_alpha_scale * self.bound(N @ self.dynamic_alpha_fn) + self.static_alpha
        beta = self.dynamic_beta_scale * self.bound(N @ self.dynamic_beta_fn) + self.static_beta
        return alpha, beta
