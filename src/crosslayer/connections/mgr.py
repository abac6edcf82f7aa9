"""Multi-gate residuals: n streams gated towards each output and pooled for the next input.

Paper: Multi-Gate Residuals (Zheng et al., 2026), arXiv 2605.23259, equations 1-6 and 14, Listing 1.

    streams start as [y_0], and input_1 = y_0
    k = 1 .. n−1:  append y_k as a stream          k = n .. S:  s_i ← s_i + β_i (y_k − s_i)
    competitive:   β = softmax([0, q] + b_k)[1:],  q_i = (RMS(s_i)·w1_k)/√D,  b_k [n+1], index 0 the forget gate
    independent:   β = σ(q + b_k),                 b_k [n]
    input_{k+1} = Σ_i softmax_i((RMS(s_i)·w2_k)/√D) s_i,   and the readout is input_{S+1}

As Listing 1: RMS has no weight, eps 1e-6, w1 = w2 = 0. Eq. 14 gives b from the number L = S − (n−1) of gated
sub-layers,  b = ln(√(L/21) (e³ + 1) − n).  Competitive: b_0 = b, the others 0. Independent: −b with n = 1 in the
formula, as the text's −3 asks, or with n as the formula has it under eq14="literal".
The gate of write k depends on the streams before it, so the read of sub-layer k computes it and the state carries it.
Every stream is a convex combination of outputs: it neither starts as PreNorm nor can represent it, so do not connect a
trained model with it unless it is to be trained anew.
State: n streams, and beta of the pending write. Parameters: D a sub-layer, and D + n + 1 (or n) more where gated.
Traffic: (2n + 2)D a token and boundary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import NormFactory, Site, float32_parameter
from ..fused_norms import FusedNormConnection
from ..norms import NormSpec, apply_norm
from ..ops import depth_attention, depth_scores, gate_pool
from ..validation import check_choice, check_positive


class Gated(NamedTuple):
    S: tuple[Tensor, ...]  # up to n streams, [B T D] each
    y: Tensor | None = None  # pending write ...
    beta: Tensor | None = (
        None  # ... and how far each stream moves towards it, [B T n]; None appends it as a stream
    )


class Spared(NamedTuple):
    """What is kept of a state whose streams inversion finds: where β is largest, it would find them inexactly."""

    beta: Tensor | None = None  # [B T n], where a gate is pending
    place: Tensor | None = None  # [p·n·B·T], of the largest in β, laid out [n B T]
    s: Tensor | None = None  # the streams there, [p·n·B·T D]


class MGR(FusedNormConnection[Gated]):
    gate_fields = ("beta",)
    starts_as_prenorm = False
    test_variants = ("mgr(gate='independent')", "mgr(streams=2, eq14='literal')")

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        streams: int = 4,
        gate: str = "competitive",
        eq14: str = "text",
    ):
        super().__init__(site, dim, norm)
        check_positive(streams=streams)
        self.gate = check_choice("gate", gate, GATES)
        gated = streams - 1 <= site.index < site.depth
        self.streams = min(site.index + 1, streams)  # once the pending write is absorbed
        self.gates = site.index >= streams  # the pending write, rather than append it
        alone = check_choice("eq14", eq14, {"text": 1, "literal": streams})
        self.bias = self.gate.bias(site.depth - (streams - 1), streams, alone) if gated else []
        self.w2 = float32_parameter(dim) if site.index else None
        self.w1 = float32_parameter(dim) if gated else None
        self.b = float32_parameter(len(self.bias)) if gated else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.w2 is not None:
            nn.init.zeros_(self.w2)
        if self.w1 is not None and self.b is not None:
            nn.init.zeros_(self.w1)
            self.b.copy_(torch.tensor(self.bias, device=self.b.device))

    def initial_state(self, x: Tensor) -> Gated:
        return Gated((x,))

    def memory_traffic(self) -> float:
        # the paper's own fused kernel (section 4.4) is at 4n: it reads the streams three times, and writes them
        read = self.streams + self.gates
        return read + (self.streams if self.gates and not self.is_readout else 0) + len(self.ports)

    def fused_read(
        self, state: Gated, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Gated]:
        (S, y, beta), norm = state, norms[0] if norms else None
        pool, score = (None if w is None else w / math.sqrt(self.dim) for w in (self.w2, self.w1))
        if y is None or beta is None or pool is None:
            S = S if y is None else (*S, y)
            h = apply_norm(S[0], norm) if pool is None else depth_attention(S, pool, norm=norm)
            q = None if score is None else depth_scores(S, score)
        else:
            S, h, q = gate_pool(S, y, beta, pool, score, norm=norm)
        return (h,), Gated(
            S, beta=None if q is None or self.b is None else self.gate.beta(q, self.b)
        )

    @torch.no_grad()
    def inversion_context(self, state: Gated, p: float = 0.01) -> Spared:
        """What inversion needs beside y (section 4.4.2): β, and of the streams the share p where β is largest."""
        S, _, beta = state
        if not all(s.dtype in (torch.float32, torch.float64) for s in S):
            raise ValueError(
                "inversion needs the streams in float32; say mgr(stream_dtype='float32')"
            )
        if beta is None:
            return Spared()
        place = beta.movedim(-1, 0).flatten().topk(math.ceil(p * beta.numel())).indices
        tokens = beta.shape[:-1].numel()
        rows = [s.flatten(0, -2)[place % tokens] for s in S]
        kept = rows[0]
        for i, row in enumerate(rows):
            kept = torch.where((place // tokens == i)[:, None], row, kept)
        return Spared(beta, place, kept)

    @torch.no_grad()
    def invert(self, after: Gated, y: Tensor | None, spared: Spared) -> Gated:
        """The state that was gated towards y, from the streams this gave (Eq. 16): s = (s' − β y) / (1 − β)."""
        beta, place, kept = spared
        if y is None or beta is None or place is None or kept is None:
            return Gated(after.S if y is None else after.S[:-1], y)
        S, b = torch.stack(after.S), beta.movedim(-1, 0)[..., None]
        S.addcmul_(b, y.to(S.dtype), value=-1).div_(1 - b)
        S.flatten(0, -2)[place] = kept
        return Gated(S.unbind(), y, beta)


def margin(L: int, n: int) -> float:
    """Eq. 14: the forget gate's bias at the start, in a model with L gated sub-layers and n streams."""
    exceeds = math.sqrt(L / 21) * (math.exp(3) + 1) - n
    if exceeds <= 0:
        raise ValueError(
            f"mgr: Eq. 14 has no bias for {n} streams and {L} gated sub-layers: √(L/21)·(e³+1) must exceed n"
        )
    return math.log(exceeds)


class Gate(NamedTuple):
    beta: Callable[[Tensor, Tensor], Tensor]  # scores q [B T n] and biases b -> β [B T n]
    bias: Callable[
        [int, int, int], list[float]
    ]  # b at the start, given L, n, and n as a stream alone counts it


def competitive(q: Tensor, b: Tensor) -> Tensor:
    return (F.pad(q, (1, 0)) + b).softmax(-1)[..., 1:]


def competitive_bias(L: int, n: int, alone: int) -> list[float]:
    return [margin(L, n)] + [0.0] * n


def independent(q: Tensor, b: Tensor) -> Tensor:
    return (q + b).sigmoid()


def independent_bias(L: int, n: int, alone: int) -> list[float]:
    return [-margin(L, alone)] * n


GATES = {
    "competitive": Gate(competitive, competitive_bias),
    "independent": Gate(independent, independent_bias),
}
