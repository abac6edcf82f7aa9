"""mHC-lite: mHC whose residual matrix is a convex combination of permutations, exactly doubly stochastic.

Paper: mHC-lite (Yang and Gao, 2026), arXiv 2601.05732.

    v = vec(H)/‖vec(H)‖ · √(nD) · (1 + gamma) [nD];   z = v W_alpha [n + n!],  z_post = v W_beta [n]
    pre = σ(s_pre z_pre + b_pre);   post = 2σ(s_post z_post + b_post)
    R = Σ_r softmax(s_res z_res + b_res)_r P_r,   P_r the n! permutations in lexicographic order, the identity first
    input = Σ_s pre_s H_s;   H_dst ← post_dst · y + Σ_src R[src, dst] H_src;   readout: the sum of the streams

W = 0 and b_res = 0 for the identity and −8 for the others at the start; pre as in mHC: it starts as PreNorm, as R is a
doubly stochastic mixture of equal streams.
State: n streams, and post of the pending write. Parameters a sub-layer: nD(2n + n! + 1) + 2n + n! + 3.
Traffic: (2n + 2)D a token and boundary at the least.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import NormFactory, Site, float32_parameter
from ..fused_norms import FusedNormConnection
from ..norms import NormSpec, apply_norm
from ..ops import depth_connection, expand_to_streams, width_connection, write_norm_project
from ..validation import check_positive
from .hyper import Streams, streams_memory_traffic


class MHCLite(FusedNormConnection[Streams]):
    gate_fields = ("beta",)
    prenorm_up_to_scale = True
    test_variants = ("mhc_lite(streams=3)",)
    weight_decay_params = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})

    def __init__(self, site: Site, dim: int, norm: NormFactory, streams: int = 4):
        super().__init__(site, dim, norm)
        check_positive(streams=streams)
        if streams > 5:
            raise ValueError(
                f"streams must be at most 5, as n! permutations are mixed, got {streams}"
            )
        self.n = streams
        if not self.is_readout:
            count = math.factorial(streams)
            self.static_alpha, self.static_beta = (
                float32_parameter(streams + count),
                float32_parameter(streams),
            )
            self.dynamic_alpha_fn = float32_parameter(streams * dim, streams + count)
            self.dynamic_beta_fn = float32_parameter(streams * dim, streams)
            self.pre_branch_scale, self.residual_scale, self.h_post_scale = (
                float32_parameter(1),
                float32_parameter(1),
                float32_parameter(1),
            )
            self.gamma = float32_parameter(streams * dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.is_readout:
            return
        for p in (self.dynamic_alpha_fn, self.dynamic_beta_fn, self.static_beta, self.gamma):
            nn.init.zeros_(p)
        for p in (self.pre_branch_scale, self.residual_scale, self.h_post_scale):
            nn.init.constant_(p, 0.01)
        nn.init.constant_(self.static_alpha, -8)
        self.static_alpha[: self.n] = -1
        self.static_alpha[self.site.index % self.n] = 1
        self.static_alpha[self.n] = 0

    def initial_state(self, x: Tensor) -> Streams:
        return Streams(expand_to_streams(x, self.n))

    def fused_read(
        self, state: Streams, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Streams]:
        H, y, beta = state
        Y = None if y is None else y[..., None, :]
        if self.is_readout:
            H = depth_connection(H, Y, beta)
            return (apply_norm(H.sum(-2), *norms),), Streams(H)
        W = torch.cat([self.dynamic_alpha_fn, self.dynamic_beta_fn], 1) * (1 + self.gamma[:, None])
        H, z = write_norm_project(H, Y, beta, W, eps=1e-24 / len(W))  # as F.normalize's
        pre, post, R = self.coefficients(z[..., 0, :])
        x, H = width_connection(H, pre, R, *norms)
        return (x,), Streams(H, beta=post)

    def memory_traffic(self) -> float:
        return streams_memory_traffic(self, self.n)

    def coefficients(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre and post [B T n], R [B T src dst]."""
        z_pre, z_res, z_post = z.tensor_split([self.n, -self.n], -1)
        b_pre, b_res = self.static_alpha.tensor_split([self.n])
        pre = (self.pre_branch_scale * z_pre + b_pre).sigmoid()
        share = (self.residual_scale * z_res + b_res).softmax(-1)
        post = 2 * (self.h_post_scale * z_post + self.static_beta).sigmoid()
        return pre, post, torch.tensordot(share, permutations(self.n, share), 1)


def permutations(n: int, like: Tensor) -> Tensor:
    """All permutation matrices [n! n n] in lexicographic order, P[r, i, perm_r(i)] = 1."""
    orders = torch.tensor(list(itertools.permutations(range(n))), device=like.device)
    return F.one_hot(orders, n).to(like.dtype)
