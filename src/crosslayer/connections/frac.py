"""Frac-connections: hyper-connections over m fractions of the width instead of m copies of it.

Paper: Frac-Connections (Zhu et al., 2025), arXiv 2503.14125, Algorithms 2 and 3.

    H = reshape(h, (m, D/m))
    alpha = tanh(LayerNorm(H) W_a) s_a + static_alpha     [B T m 2m]     static_alpha = [I | I]
    beta  = tanh(LayerNorm(H) w_b) s_b + static_beta      [B T m]        static_beta = 1
    mixed = alphaᵀ H;   input = concat(mixed_{1..m});   H ← beta · reshape(F(Norm(input))) + mixed_{m+1..2m}

The stream is as wide as a plain residual's. W_a = w_b = 0 at the start, which is exactly the plain residual.
State: one stream in m fractions, and beta of the pending write. Parameters a sub-layer: 2m² + m, and when dynamic
(D/m)(2m + 3) + 2. Traffic: 4D a token and boundary.
"""

from torch import Tensor

from ..connection import Connection, Norm, Site, positive
from ..ops import Following, follow, mixtures
from .hyper import Hyper, Streams


class Frac(Hyper):
    fuses = False  # no kernel makes its input
    variants = ("frac(dynamic=False)",)

    def __init__(self, site: Site, dim: int, norm: Norm, fractions: int = 2, dynamic: bool = True, tanh: bool = True):
        positive(fractions=fractions)
        if dim % fractions:
            raise ValueError(f"fractions must divide the width {dim}, got {fractions}")
        super().__init__(site, dim, norm, fractions, dynamic, tanh)

    def identity(self) -> list[list[float]]:
        return [[float(s == t % self.n) for t in range(2 * self.n)] for s in range(self.n)]

    def begin(self, x: Tensor) -> Streams:
        return Streams(self.spread(x))

    def spread(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.n, -1))

    def traffic(self) -> float:
        return Connection.traffic(self)

    def mixtures(self, H: Tensor, alpha: Tensor, *norms: Following) -> tuple[Tensor, Tensor]:
        x, H = mixtures(H, alpha).tensor_split(2, -2)
        return follow(self.collapse(x), *norms), H

    def collapse(self, H: Tensor) -> Tensor:
        return H.flatten(-2)
