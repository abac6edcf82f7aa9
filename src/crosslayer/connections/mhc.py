"""mHC: hyper-connections whose residual matrix is doubly stochastic, in DeepSeek-V4's convention.

Paper: Manifold-Constrained Hyper-Connections (Xie et al., 2025), arXiv 2512.24880, equations 7-9.

    v = vec(H) [nD];   z = (v·fnᵀ)·rsqrt(mean(v²) + norm_eps)·scale + base
                       fn [n²+2n, nD], its rows in the order pre | post | res;
                       base [n²+2n], scale [3], one for each of the three
    pre = σ(z_pre) + eps;   post = 2σ(z_post);   R = Sinkhorn(z_res), R[src, dst]
    input = Σ_s pre_s H_s;   H_dst ← post_dst · y + Σ_src R[src, dst] H_src
    entry: the embedding repeated n times
    readout: Σ_s (σ(z_head) + eps)_s H_s, then the final norm

Public implementations differ in the orientation of z_res, the order of Sinkhorn's normalisations,
the readout and the eps. A model run with the wrong ones still gives fluent text, so each is an
option. At initialisation fn = 0, scale 0.01, post 1; base is 0 on the diagonal of z_res and −8 off
it, and for pre it is 1 at the stream (k−1) mod n of sub-layer k, counted from 1, and −1 at the
others. That is pre-norm up to constant factors of the inputs and of the readout, which norms
remove up to their eps. fn, base and scale stay float32.
State: n streams and post of the pending write; with `single_pass` also pre and the pending R.
Learned parameters: (n²+2n)(nD + 1) + 3 per sub-layer, 2n(nD + 1) + 2 with `residual="identity"`,
and n(nD + 1) + 1 for the head. The head is the readout's fn [n, nD], base [n] and scale [1], which
give z_head as z above. It is there with `readout="head"`, but not with `single_pass`.
Names: fn is φ_pre | φ_post | φ_res of the paper, transposed, scale α, base b; pre, post and R are
H^pre, H^post and the transpose of H^res.
Traffic: at least (2n + 2)D elements per token and site.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import NormFactory
from ..float32_parameters import assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights
from ..norms import NormSpec, apply_norm, upcast_to_float32
from ..ops import (
    collapse_streams,
    depth_connection,
    expand_to_streams,
    mix_streams,
    single_pass_connection,
    sinkhorn,
    width_connection,
    write_norm_project,
)
from ..sites import Site
from ..validation import check_idle_options, check_non_negative, check_positive
from ._streams import (
    check_stream_count,
    set_read_logits,
    shared_write,
    streams_memory_traffic,
    write_to_streams,
)

Orientation = Literal["src dst", "dst src"]
Order = Literal["src last", "dst last"]
Readout = Literal["head", "sum", "mean"]
Residual = Literal["sinkhorn", "identity"]


class Manifold(NamedTuple):
    """n streams, and what is pending for them."""

    H: Tensor  # [B T n D]
    y: Tensor | None = None  # [B T D]: pending write ...
    post: Tensor | None = None  # ... and its weight in each stream, [B T n]
    # With `single_pass`: the weights by which the next site reads its input [B T n], and R
    # [B T n n], which it applies to H together with the write.
    pre: Tensor | None = None
    res: Tensor | None = None


class MHC(FusedNormConnection[Manifold]):
    """mHC: hyper-connections whose residual matrix is doubly stochastic, as in DeepSeek-V4.

    Paper: Manifold-Constrained Hyper-Connections (Xie et al., 2025), arXiv 2512.24880, Eq. 7-9.

    Args:
        streams: n, the number of streams.
        iterations: Sinkhorn's rounds, 20 in the paper.
        orientation: "src dst": z_res has the source as its row; "dst src": transposed.
        order: "src last": Sinkhorn's last normalisation is over sources, the paper's T_r(T_c(·));
            "dst last": over destinations.
        readout: "head": learned (DeepSeek-V4); "sum"; "mean" (GLM).
        residual: "sinkhorn"; "identity": R = I and no z_res (iHC).
        single_pass: a sub-layer reads H_{k+1} with the pre that was computed from H_k, so one pass
            over the streams does all: it mixes them with R of H_k, adds the write and computes the
            input. The first sub-layer reads stream 0, and the readout uses the last pre
            (DeepSeek-V4.1).
        eps: eps of pre and of Sinkhorn. With 0 Sinkhorn is computed with logarithms in torch,
            because sums can underflow.
        norm_eps: eps of the norm of v; 1e-5 in GLM and Hy4, 1e-20 in the paper's Appendix A.1.
        magnitude: post = magnitude · σ(z_post) + post_eps. 2 in the paper.
        post_eps: see `magnitude`; 1e-6 in Hy4.
    """

    parts_are_streams = True
    gate_field = "post"
    sums_streams = True
    initial_function = "prenorm up to scales"
    weight_decay_params = frozenset({"fn"})
    test_variants = (
        "mhc(orientation='dst src', order='dst last', readout='sum', iterations=3)",
        "mhc(residual='identity', readout='mean', streams=2, norm_eps=1e-5)",
        "mhc(single_pass=True)",
    )

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        streams: int = 4,
        iterations: int = 20,
        orientation: Orientation = "src dst",
        order: Order = "src last",
        readout: Readout = "head",
        residual: Residual = "sinkhorn",
        single_pass: bool = False,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        magnitude: float = 2.0,
        post_eps: float = 0.0,
    ):
        super().__init__(site, dim, norm)
        check_stream_count(streams)
        check_positive(iterations=iterations)
        check_non_negative(eps=eps, norm_eps=norm_eps)
        if magnitude + post_eps <= 1 or post_eps >= 1:
            raise ValueError(
                "post must be able to start at 1: magnitude + post_eps > 1 > post_eps, "
                f"got magnitude={magnitude!r} and post_eps={post_eps!r}"
            )
        if single_pass and readout != "head":
            raise ValueError(
                f"single_pass and readout={readout!r} exclude each other: "
                "the readout of a single pass uses the last pre"
            )
        if residual == "identity":
            idle = {"iterations": iterations, "orientation": orientation, "order": order}
            check_idle_options(MHC, "residual='identity'", **idle)
        self.gate_limits = (post_eps, post_eps + magnitude)
        self.n = streams
        self.iterations = iterations
        self.source_is_column = orientation == "dst src"
        self.destinations_last = order == "dst last"
        self.reads_mean = readout == "mean"
        self.mixes_streams = residual == "sinkhorn"
        self.single_pass = single_pass
        self.eps = eps
        self.norm_eps = norm_eps
        self.magnitude = magnitude
        self.post_eps = post_eps

        # The numbers of rows of fn: pre | post | res, or pre alone at the head.
        if self.is_readout:
            self.sizes = [streams]
        elif self.mixes_streams:
            self.sizes = [streams, streams, streams * streams]
        else:
            self.sizes = [streams, streams]
        has_head = readout == "head" and not single_pass
        has_mixers = has_head or not self.is_readout
        self.fn = float32_parameter(sum(self.sizes), streams * dim) if has_mixers else None
        self.base = float32_parameter(sum(self.sizes)) if has_mixers else None
        self.scale = float32_parameter(len(self.sizes)) if has_mixers else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.fn is None or self.base is None or self.scale is None:
            return
        nn.init.zeros_(self.fn)
        nn.init.constant_(self.scale, 0.01)
        if self.is_readout:
            nn.init.zeros_(self.base)
            return
        n = self.n
        base = torch.zeros(self.base.shape, device=self.base.device)
        set_read_logits(base[:n], self.site)
        sigmoid_of_post = (1 - self.post_eps) / self.magnitude  # so that post = 1
        base[n : 2 * n] = math.log(sigmoid_of_post / (1 - sigmoid_of_post))
        if self.mixes_streams:
            base[2 * n :] = -8 * (1 - torch.eye(n, device=base.device).flatten())
        assign_value(self.base, base)

    def initial_state(self, x: Tensor) -> Manifold:
        H = expand_to_streams(x, self.n)
        if not self.single_pass:
            return Manifold(H)
        stream_0 = torch.eye(self.n, device=x.device).to(upcast_to_float32(x).dtype)[0]
        return Manifold(H, pre=stream_0.expand(*x.shape[:-1], self.n))

    def fused_read(
        self, state: Manifold, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Manifold]:
        if self.single_pass:
            return self._read_in_one_pass(state, norms)
        H, y, post, *_ = state
        Y = shared_write(y)
        if self.fn is None:  # a readout without a head
            H = depth_connection(H, Y, post)
            return (self.read_streams(H, None, *norms),), Manifold(H)
        H, z = write_norm_project(H, Y, post, self.fn.mT, self.norm_eps)
        pre, post, R = self.coefficients(z[..., 0, :])
        if self.is_readout:
            return (self.read_streams(H, pre, *norms),), Manifold(H)
        if R is None:
            x = self.read_streams(H, pre, *norms)
        else:
            x, H = width_connection(H, pre, R, *norms)
        return (x,), Manifold(H, post=post)

    def _read_in_one_pass(
        self, state: Manifold, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Manifold]:
        H, y, post, pre, res = state
        assert pre is not None
        if self.fn is None:  # the readout
            H = self._written_streams(state)
            return (self.read_streams(H, pre, *norms),), Manifold(H)
        if y is None or post is None:  # the first site
            H, z = write_norm_project(H, None, None, self.fn.mT, self.norm_eps)
            x = self.read_streams(H, pre, *norms)
            z = z[..., 0, :]
        else:
            x, H, z = single_pass_connection(
                H, y, post, res, pre, self.fn.mT, self.norm_eps, *norms
            )
        pre, post, R = self.coefficients(z)
        return (x,), Manifold(H, post=post, pre=pre, res=R)

    def _written_streams(self, state: Manifold) -> Tensor:
        """The streams with all that is pending applied."""
        H, y, post, _, res = state
        Y = shared_write(y)
        mixed = H if res is None else mix_streams(upcast_to_float32(H), res)
        return depth_connection(mixed, Y, post).to(H.dtype)

    def coefficients(self, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """pre and post [B T n], and R [B T src dst], where the site has them.

        Args:
            z: the projection, [B T rows of fn], before scale and base.
        """
        z_pre, *others = self.logits(z)
        pre = z_pre.sigmoid() + self.eps
        if self.is_readout:
            return pre, None, None
        post = self.magnitude * others[0].sigmoid() + self.post_eps
        R = self.residual_matrix(others[1]) if self.mixes_streams else None
        return pre, post, R

    def logits(self, z: Tensor) -> list[Tensor]:
        """Those of pre and post [B T n] and of R [B T n·n], where the site has them.

        Args:
            z: the projection, [B T rows of fn], before scale and base.
        """
        assert self.base is not None and self.scale is not None
        parts = zip(z.split(self.sizes, -1), self.scale, self.base.split(self.sizes), strict=True)
        return [z_part * scale + base for z_part, scale, base in parts]

    def residual_matrix(self, logits: Tensor) -> Tensor:
        """R [B T src dst] of its logits [B T n·n]."""
        R = logits.unflatten(-1, (self.n, self.n))
        if self.source_is_column:
            R = R.mT
        if self.destinations_last:
            return sinkhorn(R.mT, self.iterations, self.eps).mT
        return sinkhorn(R, self.iterations, self.eps)

    def read_streams(self, H: Tensor, pre: Tensor | None, norm: NormSpec | None = None) -> Tensor:
        """norm(Σ_s pre_s H_s), or that of the sum or mean without a pre: [B T n D] -> [B T D]."""
        if pre is None and self.reads_mean:
            return apply_norm(H.mean(-2), norm)
        return collapse_streams(H, pre, norm)

    def state_parts(self, state: Manifold) -> tuple[Tensor, ...]:
        # The pending R is applied, the pending write is not.
        mixed = state.H if state.res is None else mix_streams(state.H, state.res)
        return mixed.unbind(-2)

    def mixing_weights(self, state: Manifold) -> MixingWeights:
        write = write_to_streams(state.H, state.post)
        carry = identity_weights(self.n, write)
        pre = state.pre
        if self.fn is not None:
            H = self._written_streams(state)
            _, z = write_norm_project(H, None, None, self.fn.mT, self.norm_eps)
            new_pre, _, R = self.coefficients(z[..., 0, :])
            pre = new_pre if pre is None else pre
            carry = carry if R is None else R.mT[..., None]
        if pre is None:
            pre = write.new_full((self.n,), 1 / self.n if self.reads_mean else 1)
        return MixingWeights(write, pre[..., None, :, None], carry)

    def memory_traffic(self) -> float:
        traffic = streams_memory_traffic(self, self.n)
        if not self.single_pass:
            return traffic
        # The equal copies of the embedding are mixed at the second site; the first writes none.
        if self.site.index == 0:
            return traffic - self.n
        return traffic - (self.n - 1 if self.site.index == 1 else 0)
