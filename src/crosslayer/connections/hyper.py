"""Hyper-connections: n streams with learnt, input-dependent wiring.

Paper: Hyper-Connections (Zhu et al., 2024), arXiv 2409.19606, equations 10-14 and Algorithm 2.

    H_0 = the embedding, repeated n times;  at sub-layer k, counted from 1:
    alpha = s_a · tanh(N(H) W_a) + static_alpha      [B T n n+1]     static_alpha = [e_{(k−1) mod n} | I]
    beta  = s_b · tanh(N(H) w_b) + static_beta       [B T n]         static_beta = 1
    mixed = alphaᵀ H                                 [B T n+1 D]     row 0 is the input, rows 1..n are carried
    H ← beta ⊗ F_k(Norm(mixed_0)) + mixed_{1..n};    readout: the sum of the streams, then the final norm

Row s of the dynamic part depends on stream s alone. W_a = w_b = 0 and s = 0.01 at the start: the streams are then
equal copies of the plain residual, and the readout n times it, which the final norm removes up to its eps.
    dynamic=False     the static part alone (SHC); `tanh=False` drops the tanh
    stats             N: "layernorm" with weight and bias as in the listing, "rmsnorm", or "unweighted" LayerNorm (OLMo)
    matrix            where the static part starts, as the paper writes it: [[0, B], [A_m, A_r]], one for every
                      sub-layer or a list of them taken in turn (Eq. 17-19, 54)
    beta              what static_beta starts at; 1/√n or √n is the paper's scaling of the output projections, whose
                      direction it does not state
    frozen            "B", "WC" or "B WC": the depth or width connections keep their initial values (Table 4)
State: n streams, and beta of the pending write. Parameters a sub-layer: n(n+2), and when dynamic D(n+2) + |N| + 2.
Traffic: (2n + 2)D a token and boundary at the least.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection, Norm, Site, choice, positive, weight
from ..ops import Following, carry, deposit, follow, probe, repeat


class Streams(NamedTuple):
    H: Tensor  # [B T n D]
    y: Tensor | None = None  # pending write ...
    beta: Tensor | None = None  # ... and how much of it each stream takes, [B T n] or [n]


class Hyper(Connection):
    weighs = ("beta",)
    fuses = True
    variants: ClassVar[tuple[str, ...]] = (
        "hyper(streams=2, dynamic=False)",
        "hyper(streams=3, tanh=False, stats='rmsnorm')",
        "hyper(stats='unweighted', frozen='B')",
        "hyper(dynamic=False, matrix=[[0, 1, 1], [1, 1, 0], [0, 0, 1]], streams=2)",
    )
    decayed = frozenset({"dynamic_alpha_fn", "dynamic_beta_fn"})

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: Norm,
        streams: int = 4,
        dynamic: bool = True,
        tanh: bool = True,
        stats: str = "layernorm",
        beta: float = 1.0,
        matrix: Sequence[Any] | None = None,
        frozen: str = "",
    ):
        super().__init__(site, dim, norm)
        positive(streams=streams)
        if not (dynamic or tanh):
            raise ValueError("tanh=False and dynamic=False exclude each other: tanh bounds the dynamic part alone")
        if matrix is not None and beta != 1.0:
            raise ValueError("matrix and beta exclude each other: the matrix has beta in its first row")
        self.n, self.dynamic, self.bound = streams, dynamic, torch.tanh if tanh else nn.Identity()
        self.stats = choice("stats", stats, STATS)
        self.start = (self.identity(), [float(beta)] * streams) if matrix is None else self.given(matrix)
        if not self.last:
            self.add_parameters(columns=len(self.start[0][0]))
            self.freeze(frozen)
        self.reset_parameters()

    def identity(self) -> list[list[float]]:
        """static_alpha [n n+1] that reads one stream and passes every one on."""
        read = self.site.index % self.n
        return [[float(s == read), *(float(s == t) for t in range(self.n))] for s in range(self.n)]

    def given(self, matrix: Sequence[Any]) -> tuple[list[list[float]], list[float]]:
        """static_alpha and static_beta of the paper's matrix at this site."""
        turns = matrix if isinstance(matrix[0][0], Sequence) else [matrix]
        HC = turns[self.site.index % len(turns)]
        (_, *beta), *alpha = HC
        if [len(row) for row in HC] != [self.n + 1] * (self.n + 1):
            raise ValueError(f"matrix must be {self.n + 1} by {self.n + 1} for {self.n} streams, got {matrix!r}")
        return alpha, beta

    def add_parameters(self, columns: int) -> None:
        width = self.dim if columns == self.n + 1 else self.dim // self.n
        self.static_alpha, self.static_beta = weight(self.n, columns), weight(self.n)
        if self.dynamic:
            self.dynamic_alpha_fn, self.dynamic_beta_fn = weight(width, columns), weight(width)
            self.dynamic_alpha_scale, self.dynamic_beta_scale = weight(1), weight(1)
            self.norm_weight = weight(width) if self.stats.weighted else None
            self.norm_bias = weight(width) if self.stats.biased else None

    def freeze(self, frozen: str) -> None:
        if not set(frozen.split()) <= {"B", "WC"}:
            raise ValueError(f"frozen must be 'B', 'WC' or 'B WC', got {frozen!r}")
        parts = {"B": "beta", "WC": "alpha"}
        for name, p in self.named_parameters(recurse=False):
            if any(parts[word] in name for word in frozen.split()) or (len(frozen.split()) == 2 and "norm" in name):
                p.requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.last:
            return
        for p, values in zip((self.static_alpha, self.static_beta), self.start, strict=True):
            p.copy_(torch.tensor(values, device=p.device))
        if self.dynamic:
            nn.init.zeros_(self.dynamic_alpha_fn)
            nn.init.zeros_(self.dynamic_beta_fn)
            nn.init.constant_(self.dynamic_alpha_scale, 0.01)
            nn.init.constant_(self.dynamic_beta_scale, 0.01)
            if self.norm_weight is not None:
                nn.init.ones_(self.norm_weight)
            if self.norm_bias is not None:
                nn.init.zeros_(self.norm_bias)

    def begin(self, x: Tensor) -> Streams:
        return Streams(repeat(x, self.n))

    def spread(self, y: Tensor) -> Tensor:
        """The sub-layer's output as the streams take it: [B T D] -> [B T 1 D]."""
        return y[..., None, :]

    def collapse(self, H: Tensor) -> Tensor:
        """What the head reads: [B T n D] -> [B T D]."""
        return H.sum(-2)

    def traffic(self) -> float:
        return streams_traffic(self, self.n)

    def gather(self, state: Streams, *norms: Following) -> tuple[tuple[Tensor, ...], Streams]:
        H, y, beta = state
        Y = None if y is None else self.spread(y)
        if self.dynamic and not self.last:
            W, b = self.projection()
            H, z = probe(H, Y, beta, W, self.stats.eps, self.stats.centred)
            alpha, beta = self.coefficients(z + b)
        else:
            H = deposit(H, Y, beta)
            if self.last:
                return (follow(self.collapse(H), *norms),), Streams(H)
            alpha, beta = self.static_alpha, self.static_beta.clone()
        x, H = self.mixtures(H, alpha, *norms)
        return (x,), Streams(H, beta=beta)

    def projection(self) -> tuple[Tensor, Tensor]:
        """N(H)'s weights [D n+2], the norm's own multiplied in, and what its bias adds; laid out by output."""
        W = torch.cat([self.dynamic_alpha_fn.mT, self.dynamic_beta_fn[None]])
        b = W.new_zeros(len(W)) if self.norm_bias is None else (W * self.norm_bias).sum(-1)
        return (W if self.norm_weight is None else W * self.norm_weight).mT, b

    def coefficients(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """alpha [B T n n+1] and beta [B T n]."""
        z_alpha, z_beta = self.bound(z).tensor_split([-1], -1)
        alpha = self.dynamic_alpha_scale * z_alpha + self.static_alpha
        beta = self.dynamic_beta_scale * z_beta[..., 0] + self.static_beta
        return alpha, beta

    def mixtures(self, H: Tensor, alpha: Tensor, *norms: Following) -> tuple[Tensor, Tensor]:
        """The layer's input [B T D] and the streams carried."""
        return carry(H, alpha[..., 0], alpha[..., 1:], *norms)


def streams_traffic(connection: Connection, n: int) -> float:
    """What n streams move at a site: they and y are read, they and the inputs written."""
    read = n + 1 if connection.site.index else 1  # they start as copies of one
    return read + (0 if connection.last else n) + len(connection.ports)


class Stats(NamedTuple):
    eps: float
    centred: bool
    weighted: bool
    biased: bool


STATS = {
    "layernorm": Stats(1e-5, True, True, True),
    "rmsnorm": Stats(1e-6, False, True, False),
    "unweighted": Stats(1e-5, True, False, False),
}
