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
`dilation` and `period` are DenseFormer's. GELU is erf's and the norm has no weight, as in the released checkpoints.
W1 ~ N(0, 1/D), W2 = 0, a one-hot on X_l: it starts exactly as the plain Transformer. q, k and v have norms of their
own where they are mixed apart.
State: the outputs of all blocks so far. Parameters: KD + KC(l+1) + C(l+1) after block l. Traffic: (l + 5)D a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import Connection, Norm, Site, normal_, positive, weight
from ..ops import add, mix, rms
from .denseformer import History


class Mudd(Connection):
    variants = (
        "mudd(ways='qkvr')",
        "mudd(ways='qkvr', dynamic=False)",
        "mudd(dynamic=False)",
        "mudd(ways='k v r', dilation=2)",
        "mudd(ways='qk v', period=2)",
    )
    decayed = frozenset({"W1", "W2"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: Norm,
        ways: str = "q k v r",
        dynamic: bool = True,
        dilation: int = 1,
        period: int = 1,
    ):
        positive(dilation=dilation, period=period)
        groups = streams_of(ways)
        last = site.index == site.depth
        if last:
            groups = [group for group in groups if "r" in group]
        mixes = bool(groups) and site.opens and site.layer > 0 and site.layer % period == 0
        # which mixture each stream is: an index, or None for X_l itself
        way = {stream: next((c for c, group in enumerate(groups) if stream in group), None) for stream in "qkvr"}
        apart = mixes and not last and not way["q"] == way["k"] == way["v"]
        ports = tuple(p for port in site.ports for p in (("q", "k", "v") if apart and port == "attn" else (port,)))
        super().__init__(site, dim, norm, ports)
        self.ways = [way[{"attn": "q", "mlp": "r", "out": "r"}.get(port, port)] for port in ports] + [way["r"]]
        self.sources = slice(site.layer % dilation, None, dilation)

        C, L = len(groups), site.layer // dilation + 1
        self.a = weight(C, L) if mixes else None
        self.W1 = weight(dim, C * L) if mixes and dynamic else None
        self.W2 = weight(C * L, C * L) if mixes and dynamic else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.a is not None:
            self.a.zero_()[:, -1] = 1
        if self.W1 is not None and self.W2 is not None:
            normal_(self.W1, self.dim**-0.5, self.site)
            nn.init.zeros_(self.W2)

    def init(self, x: Tensor) -> History:
        return History((), x)

    def traffic(self) -> float:
        return super().traffic() if self.a is None else sum(self.a.shape)

    def gather(self, state: History) -> tuple[tuple[Tensor, ...], History]:
        X, h = state.X, add(state.h, state.y)
        if self.opens:
            X = (*X, h)
        if self.a is None:
            return (h,), History(X, h)
        S = mix(X[self.sources], self.weights(h, self.a))
        *xs, r = (h if way is None else S[way] for way in self.ways)
        return tuple(xs), History(X, r)

    def weights(self, x: Tensor, a: Tensor) -> Tensor:
        """The mixtures' weights: [C L], or [B T C L] a token's own."""
        if self.W1 is None or self.W2 is None:
            return a
        return (F.gelu(rms(x) @ self.W1) @ self.W2).unflatten(-1, a.shape) + a


def streams_of(ways: str) -> list[str]:
    groups = ways.split() if isinstance(ways, str) else []
    if not groups or not set("".join(groups)) <= set("qkvr") or len(set("".join(groups))) < len("".join(groups)):
        raise ValueError(
            f"mudd: ways must name each of q, k, v, r at most once, like 'q k v r' or 'qkvr', got {ways!r}"
        )
    return groups
