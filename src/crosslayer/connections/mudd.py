"""MUDD: multiway dynamic dense connections, a mixture of the blocks' outputs for each of q, k, v and the residual.

Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, equations 4-8.

    X_0 the embedding, X_l the output of block l;  the depth aggregation after block l, K = C(l+1):
    A   = GELU(RMSNorm(X_l) W1) W2 + a      [B T C l+1]     W1 [D, K], W2 [K, C(l+1)], a [C, l+1]       (Eq. 6)
    S_c = Σ_{j ≤ l} A_{c,j} ⊙ X_j           c = q, k, v, r                                              (Eq. 5, 8)
    block l + 1:  h = S_r + MHA(n_q(S_q), n_k(S_k), n_v(S_v));   X_{l+1} = h + FFN(n(h))                (Eq. 7)
    parallel:     X_{l+1} = S_r + MHA(…) + FFN(n(S_r));          readout: S_r of the last block, its one way

`ways` are the mixtures, separated by spaces, each named by the streams it feeds; a stream left out reads X_l, as a
plain residual does:
    mudd                                     the paper's: "q k v r"
    mudd(ways="qkvr")                        one dynamic way for all: DDFormer (section 2.2)
    mudd(ways="qkvr", dynamic=False)         static: DenseFormer's averages (section 2.1)
    mudd(ways="k v r")                       the paper's ablation −Q
`dilation` and `period` are DenseFormer's; `window=n` keeps the last n blocks and the embedding (SW-n, section 4).
`normed=True` is PrePostDANorm (Eq. 10): P_j = n_j(X_j) for every source, m_c = Σ A_{c,j} ⊙ P_j, S_c = X_l + m_c for
q, k and v, S_r = X_l + post(m_r) with post's weight 1e-3, a = 0, and the generator's norm has a weight. The cure where
plain MUDD diverges: 24 layers and more with a large learning rate.
`expand_last=True` takes four times K in the last block and `round64=True` then rounds K up to (K//64 + 1)·64, both as
the released checkpoints do. GELU is erf's, and the norm has no weight, as there.
W1 ~ N(0, 1/D), W2 = 0, a one-hot on X_l: it starts exactly as the plain Transformer. q, k and v have norms of their
own where they are mixed apart.
State: the outputs of all blocks so far. Parameters: KD + KC(l+1) + C(l+1) after block l. Traffic: (l + 5)D a token.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import NormFactory, Site, float32_parameter, init_normal_
from ..fused_norms import FusedNormConnection
from ..norms import NormSpec, rms
from ..ops import add_norm, depth_mix, project_tall
from .denseformer import History, mixed_sources


class Mudd(FusedNormConnection[History]):
    bitwise_prenorm = True
    test_variants = (
        "mudd(ways='qkvr')",
        "mudd(ways='qkvr', dynamic=False)",
        "mudd(dynamic=False)",
        "mudd(ways='k v r', dilation=2)",
        "mudd(ways='qk v', period=2)",
        "mudd(window=2, round64=True, expand_last=True)",
        "mudd(normed=True)",
        "mudd(normed=True, ways='q kvr', dynamic=False)",
    )
    weight_decay_params = frozenset({"W1", "W2"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        ways: str = "q k v r",
        dynamic: bool = True,
        dilation: int = 1,
        period: int | Literal["last"] = 1,
        window: int | None = None,
        normed: bool = False,
        round64: bool = False,
        expand_last: bool = False,
    ):
        if normed and (dilation, period) != (1, 1):
            raise ValueError(
                "normed=True excludes dilation and period: a source left out would have an idle norm"
            )
        last = site.index == site.depth
        groups = [group for group in streams_of(ways) if not last or "r" in group]
        depths = mixed_sources(site, dilation, period, window) if groups else ()
        # which mixture each stream is: an index, or None for X_l itself
        way = {
            stream: next((c for c, group in enumerate(groups) if stream in group), None)
            for stream in "qkvr"
        }
        apart = bool(depths) and not last and not way["q"] == way["k"] == way["v"]
        ports = tuple(
            p
            for port in site.ports
            for p in (("q", "k", "v") if apart and port == "attn" else (port,))
        )
        super().__init__(site, dim, norm, ports)
        # the streams of the ports and, last, the block's residual: (mixture, whether it is the residual stream r)
        read = [{"attn": "q", "mlp": "r", "out": "r"}.get(port, port) for port in ports]
        self.ways = [(way[stream], stream == "r") for stream in (*read, "r")]
        self.sources = depths
        # norms are taken along where every port reads a mixture as it is, or all of them X_l
        self.can_fuse_norms = not depths or not (normed or None in [c for c, _ in self.ways[:-1]])

        C, L = len(groups), len(depths)
        K = C * L * (4 if expand_last and last else 1)
        K = (K // 64 + 1) * 64 if round64 else K
        self.a = float32_parameter(C, L) if depths else None
        self.W1 = float32_parameter(dim, K) if depths and dynamic else None
        self.W2 = float32_parameter(K, C * L) if depths and dynamic else None
        # of PrePostDANorm: of the source this block adds, of the generator's input, and after the mixture for r
        self.pre = float32_parameter(dim) if normed and (depths or site.index == 0) else None
        self.weigh = float32_parameter(dim) if normed and depths and dynamic else None
        self.post = float32_parameter(dim) if normed and depths and way["r"] is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.a is not None:
            self.a.zero_()
            if self.pre is None:
                self.a[:, -1] = 1
        if self.W1 is not None and self.W2 is not None:
            init_normal_(self.W1, self.dim**-0.5, self.site)
            nn.init.zeros_(self.W2)
        for p, value in ((self.pre, 1.0), (self.weigh, 1.0), (self.post, 1e-3)):
            if p is not None:
                nn.init.constant_(p, value)

    def initial_state(self, x: Tensor) -> History:
        return History((), x)

    def memory_traffic(self) -> float:
        return super().memory_traffic() if self.a is None else sum(self.a.shape)

    def fused_read(
        self, state: History, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], History]:
        X, a = state.X, self.a
        h, x = add_norm(state.h, state.y, *(norms if a is None else ()))
        if self.opens_layer:
            X = (*X, h if self.pre is None else (rms(h) * self.pre).to(h.dtype))
        if a is None:
            return (x,), History(X, h)
        taken = tuple(
            (way, norm) for (way, _), norm in zip(self.ways, norms, strict=False) if way is not None
        )
        S = depth_mix(tuple(X[j] for j in self.sources), self.weights(h, a), taken)
        *xs, r = (
            h if way is None else self.around(h, S[way], residual) for way, residual in self.ways
        )
        return S[len(a) :] or tuple(xs), History(X, r)

    def weights(self, x: Tensor, a: Tensor) -> Tensor:
        """The mixtures' weights: [C L], or [B T C L] a token's own."""
        if self.W1 is None or self.W2 is None:
            return a
        N = rms(x) if self.weigh is None else rms(x) * self.weigh
        return (project_tall(F.gelu(project_tall(N, self.W1)), self.W2)).unflatten(-1, a.shape) + a

    def around(self, h: Tensor, m: Tensor, residual: bool) -> Tensor:
        """What a stream makes of its mixture: PrePostDANorm adds it to X_l, and norms it first for r alone."""
        if self.pre is None:
            return m
        return h + (m if self.post is None or not residual else (rms(m) * self.post).to(h.dtype))


def streams_of(ways: str) -> list[str]:
    groups = ways.split() if isinstance(ways, str) else []
    if (
        not groups
        or not set("".join(groups)) <= set("qkvr")
        or len(set("".join(groups))) < len("".join(groups))
    ):
        raise ValueError(
            f"mudd: ways must name each of q, k, v, r at most once, like 'q k v r' or 'qkvr', got {ways!r}"
        )
    return groups
