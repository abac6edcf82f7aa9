"""mHC-lite: mHC whose residual matrix is a convex combination of permutations, so that it is
exactly doubly stochastic.

Paper: mHC-lite (Yang and Gao, 2026), arXiv 2601.05732.

    v = vec(H)/‖vec(H)‖ · √(nD) · (1 + gamma) [nD];   z = v W_alpha [n + n!],  z_post = v W_beta [n]
                       W_alpha [nD, n + n!], W_beta [nD, n];   z = z_pre | z_res, [n] and [n!]
    pre = σ(s_pre z_pre + b_pre);   post = 2σ(s_post z_post + b_post)
    R = Σ_r softmax(s_res z_res + b_res)_r P_r
        P_r the n! permutations in lexicographic order, the identity first
    input = Σ_s pre_s H_s;   H_dst ← post_dst · y + Σ_src R[src, dst] H_src
    readout: the sum of the streams

At initialisation W = 0, b_res is 0 for the identity and −8 for the others, and pre is as in mHC. R
keeps equal streams equal, so it starts as pre-norm up to constant factors of the inputs and of
the readout, which norms remove up to their eps.
State: n streams, and post of the pending write.
Learned parameters per sub-layer: nD(2n + n! + 1) + 2n + n! + 3.
Names: static_alpha is b_pre | b_res, static_beta b_post, dynamic_alpha_fn W_alpha, dynamic_beta_fn
W_beta, pre_branch_scale s_pre, residual_scale s_res, h_post_scale s_post.
Traffic: at least (2n + 2)D elements per token and site.
"""

import math

import torch
from torch import Tensor, nn

from ..connection import NormFactory
from ..float32_parameters import assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights
from ..norms import NormSpec
from ..ops import expand_to_streams, width_connection, write_norm_project
from ..sites import Site
from ..validation import check_positive
from ._streams import (
    Streams,
    read_sum,
    set_read_logits,
    shared_write,
    streams_memory_traffic,
    sum_readout_weights,
    write_to_streams,
)


class MHCLite(FusedNormConnection[Streams]):
    """mHC-lite: mHC whose residual matrix is a convex combination of permutations.

    Paper: mHC-lite (Yang and Gao, 2026), arXiv 2601.05732.

    Args:
        streams: n, the number of streams; at most 5, because n! permutations are mixed.
    """

    parts_are_streams = True
    gate_field = "beta"
    gate_limits = (0.0, 2.0)
    sums_streams = True
    initial_function = "prenorm up to scales"
    weight_decay_params = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})
    test_variants = ("mhc_lite(streams=3)",)

    def __init__(self, site: Site, dim: int, norm: NormFactory, streams: int = 4):
        super().__init__(site, dim, norm)
        check_positive(streams=streams)
        if streams > 5:
            raise ValueError(
                f"streams must be at most 5, because n! permutations are mixed, got {streams}"
            )
        self.n = streams
        if not self.is_readout:
            n = streams
            permutations = math.factorial(streams)
            self.static_alpha = float32_parameter(n + permutations)  # b_pre | b_res
            self.static_beta = float32_parameter(n)  # b_post
            self.dynamic_alpha_fn = float32_parameter(n * dim, n + permutations)  # W_alpha
            self.dynamic_beta_fn = float32_parameter(n * dim, n)  # W_beta
            self.pre_branch_scale = float32_parameter(1)  # s_pre
            self.residual_scale = float32_parameter(1)  # s_res
            self.h_post_scale = float32_parameter(1)  # s_post
            self.gamma = float32_parameter(n * dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.is_readout:
            return
        for parameter in (
            self.dynamic_alpha_fn,
            self.dynamic_beta_fn,
            self.static_beta,
            self.gamma,
        ):
            nn.init.zeros_(parameter)
        for scale in (self.pre_branch_scale, self.residual_scale, self.h_post_scale):
            nn.init.constant_(scale, 0.01)
        static_alpha = torch.full(self.static_alpha.shape, -8.0, device=self.static_alpha.device)
        set_read_logits(static_alpha[: self.n], self.site)
        static_alpha[self.n] = 0
        assign_value(self.static_alpha, static_alpha)

    def initial_state(self, x: Tensor) -> Streams:
        return Streams(expand_to_streams(x, self.n))

    def fused_read(
        self, state: Streams, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Streams]:
        if self.is_readout:
            return read_sum(state, norms)
        H, z = self._write_and_project(state)
        pre, post, R = self.coefficients(z)
        x, H = width_connection(H, pre, R, *norms)
        return (x,), Streams(H, beta=post)

    def _write_and_project(self, state: Streams) -> tuple[Tensor, Tensor]:
        """The streams with the pending write applied, [B T n D], and z of them, [B T 2n+n!]."""
        Y = shared_write(state.y)
        # √(nD)·v/‖v‖ is an RMSNorm. Its weight 1 + gamma is multiplied into W. Its eps is close to
        # that of torch's F.normalize, which is a maximum and no sum.
        W = torch.cat([self.dynamic_alpha_fn, self.dynamic_beta_fn], 1) * (1 + self.gamma[:, None])
        H, z = write_norm_project(state.H, Y, state.beta, W, eps=1e-24 / len(W))
        return H, z[..., 0, :]

    def coefficients(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre and post [B T n], and R [B T src dst]."""
        z_pre, z_res, z_post = z.tensor_split([self.n, -self.n], -1)
        b_pre, b_res = self.static_alpha.tensor_split([self.n])
        pre = (self.pre_branch_scale * z_pre + b_pre).sigmoid()
        post = 2 * (self.h_post_scale * z_post + self.static_beta).sigmoid()
        weights = (self.residual_scale * z_res + b_res).softmax(-1)
        R = torch.tensordot(weights, _permutation_matrices(self.n, weights), 1)
        return pre, post, R

    def state_parts(self, state: Streams) -> tuple[Tensor, ...]:
        return state.H.unbind(-2)

    def mixing_weights(self, state: Streams) -> MixingWeights:
        write = write_to_streams(state.H, state.beta)
        if self.is_readout:
            return sum_readout_weights(write, self.n)
        _, z = self._write_and_project(state)
        pre, _, R = self.coefficients(z)
        return MixingWeights(write, pre[..., None, :, None], R.mT[..., None])

    def memory_traffic(self) -> float:
        return streams_memory_traffic(self, self.n)


def _permutation_matrices(n: int, like: Tensor) -> Tensor:
    """All permutation matrices [n! n n] in lexicographic order, P[r, i, permutation_r(i)] = 1."""
    # Computed on the device: a copy from the host cannot be part of a CUDA graph.
    number = torch.arange(math.factorial(n), device=like.device)
    free = like.new_ones(len(number), n)  # the columns that no earlier row has taken
    rows = []
    for i in range(n):
        choice = number // math.factorial(n - 1 - i) % (n - i)  # which of the free columns
        row = free * (free.cumsum(-1) == choice[:, None] + 1)
        free = free - row
        rows.append(row)
    return torch.stack(rows, 1)
