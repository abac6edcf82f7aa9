"""Multi-gate residuals: n streams gated towards each output and pooled for the next input.

Paper: Multi-Gate Residuals (Zheng et al., 2026), arXiv 2605.23259, Eq. 1-5, 14, 16, Listing 1.

    streams start as [y_0], and input_1 = y_0
    k = 1 .. n−1:  append y_k as a stream          k = n .. K:  s_i ← s_i + β_i (y_k − s_i)
    competitive:   β = softmax([0, q] + b_k)[1:],  q_i = (RMS(s_i)·w1_k)/√D
                   b_k [n+1] starts as [b, 0, …, 0], the bias of the forget gate first
    independent:   β = σ(q + b_k),                 b_k [n] starts as −b
    input_{k+1} = Σ_i softmax_i((RMS(s_i)·w2_k)/√D) s_i,   and the readout is input_{K+1}

y_0 is the embedding, y_k the output of sub-layer k of K, and RMS(s) = s/√(mean(s²) + 1e-6), as in
Listing 1. w1, w2 [D] are 0 at initialisation. The connection before sub-layer k has w1_k, b_k and
w2_{k−1}; the readout has w2_K. Eq. 14 gives b from the number L = K − (n−1) of gated sub-layers:
b = ln(√(L/21) (e³ + 1) − n).
The gate of write k depends on the streams before this write. So the read of sub-layer k computes
the gate, and the state holds it until the write is applied. A gated stream is a convex combination
of outputs, so a model with gates (n ≤ K) neither starts as pre-norm nor can represent it: a
pretrained model must be trained anew. Without gates each input starts as the mean of the outputs
before it, which is pre-norm up to a factor that the norms remove up to their eps.
State: n streams, and β of the pending write.
Names: w1 is w^(β) and b is b^(β) of Eq. 4, w2 is w^(α) of Eq. 1; Listing 1 has w1, b1 and w2.
Learned parameters: D per sub-layer, and D + n + 1 (or n) more where gated.
Traffic: (2n + 2)D elements per token where a write is gated into n streams, (n + 2)D at the
readout, and (m + 1)D where a site only pools m streams.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import InitialFunction, NormFactory
from ..float32_parameters import assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, identity_weights, join_columns
from ..norms import NormSpec, apply_norm
from ..ops import depth_attention, depth_scores, gate_pool, gate_streams
from ..sites import Site
from ..validation import check_idle_options, check_positive

Gate = Literal["competitive", "independent"]
Eq14 = Literal["text", "literal"]
# p of section 4.4.2: the share of (stream, token) pairs, those with the largest β, whose streams
# inversion keeps.
_KEPT_SHARE = 0.01


class Gated(NamedTuple):
    """Streams, and a write that is gated into them or appended."""

    S: tuple[Tensor, ...]  # up to n streams, [B T D] each
    y: Tensor | None = None  # [B T D]: pending write ...
    # ... and how far each stream moves towards it, [B T n]; None to append it as a stream
    beta: Tensor | None = None


class InversionContext(NamedTuple):
    """What `invert` needs of a state in addition to y and the next streams.

    Inversion divides by 1 − β, so it is least exact where β is largest. Those streams are kept.
    """

    beta: Tensor | None = None  # [B T n], where a gate is pending
    indices: Tensor | None = None  # [p·n·B·T], of the largest in β, laid out [n B T]
    s: Tensor | None = None  # the streams there, [p·n·B·T D]


class MGR(FusedNormConnection[Gated]):
    """Multi-gate residuals: n streams gated towards each output and pooled for the next input.

    Paper: Multi-Gate Residuals (Zheng et al., 2026), arXiv 2605.23259, Eq. 1-5, 14, 16, Listing 1.

    Args:
        streams: n, the number of streams; the paper's best has 8 (Table 1). A model of fewer than n
            sub-layers has a stream for each output, and no gates.
        gate: "competitive": the streams and a forget gate share one softmax;
            "independent": each stream has a sigmoid.
        eq14: n in Eq. 14 for independent gates. "text" has n = 1, which gives the bias −3 that the
            paper's text asks for; "literal" has n as the formula is printed.
        bias: b, in place of Eq. 14's. The equation has none for many streams and few sub-layers.
            Independent gates start at −b: the paper's −3 is `bias=3`.
    """

    parts_are_streams = True
    gate_field = "beta"
    gate_limits = (0.0, 1.0)
    initial_function: InitialFunction = "other"
    test_variants = (
        "mgr(gate='independent')",
        "mgr(streams=2, gate='independent', eq14='literal')",
        "mgr(streams=3, bias=2.0)",
    )

    def __init__(
        self,
        site: Site,
        dim: int,
        norm: NormFactory,
        streams: int = 4,
        gate: Gate = "competitive",
        eq14: Eq14 = "text",
        bias: float | None = None,
    ):
        super().__init__(site, dim, norm)
        check_positive(streams=streams)
        if gate == "competitive":
            check_idle_options(MGR, "gate='competitive'", eq14=eq14)
        if bias is not None and eq14 != "text":
            raise ValueError(
                "bias and eq14 exclude each other: the bias is not that of Eq. 14 then"
            )
        self.gate_weights = competitive_gate if gate == "competitive" else independent_gate
        # Once the pending write is applied.
        self.stream_count = min(site.index + 1, streams)
        # Whether the pending write is gated into the streams, rather than appended to them.
        self.gates_pending_write = site.index >= streams
        gates_own_write = streams - 1 <= site.index < site.depth
        if streams > site.depth:  # no gates
            self.initial_function = "prenorm up to scales"
        self.initial_bias: list[float] = []
        if gates_own_write:
            is_competitive = gate == "competitive"
            if bias is None:
                n = streams if is_competitive or eq14 == "literal" else 1
                bias = _eq14_bias(site.depth - (streams - 1), n)
            self.initial_bias = [bias, *[0.0] * streams] if is_competitive else [-bias] * streams
        self.w2 = float32_parameter(dim) if site.index else None
        self.w1 = float32_parameter(dim) if gates_own_write else None
        self.b = float32_parameter(len(self.initial_bias)) if gates_own_write else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.w2 is not None:
            nn.init.zeros_(self.w2)
        if self.w1 is not None and self.b is not None:
            nn.init.zeros_(self.w1)
            assign_value(self.b, self.initial_bias)

    def initial_state(self, x: Tensor) -> Gated:
        return Gated((x,))

    def fused_read(
        self, state: Gated, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Gated]:
        S, y, beta = state
        norm = norms[0] if norms else None
        pool_query = self._pool_query()
        gate_query = None if self.w1 is None else self.w1 / math.sqrt(self.dim)
        if y is not None and beta is not None and pool_query is not None:
            S, h, scores = gate_pool(S, y, beta, pool_query, gate_query, norm=norm)
        else:
            if y is not None:
                # Under autocast y is in half precision. The stream that begins here is not.
                S = (*S, y.to(S[0].dtype))
            if pool_query is None:
                h = apply_norm(S[0], norm)
            else:
                h, S = depth_attention(S, pool_query, norm=norm)
            scores = None if gate_query is None else depth_scores(S, gate_query)
        if scores is None or self.b is None:
            return (h,), Gated(S)
        return (h,), Gated(S, beta=self.gate_weights(scores, self.b))

    def _pool_query(self) -> Tensor | None:
        return None if self.w2 is None else self.w2 / math.sqrt(self.dim)

    def state_parts(self, state: Gated) -> tuple[Tensor, ...]:
        return state.S

    def mixing_weights(self, state: Gated) -> MixingWeights:
        S, y, beta = state
        if y is None:
            written = S
            write = identity_weights(len(S), S[0])
        elif beta is None:
            written = (*S, y)
            write = identity_weights(len(written), S[0])
        else:
            written = gate_streams(S, y, beta)
            write = join_columns((1 - beta).diag_embed()[..., None], beta[..., None, None])
        carry = identity_weights(len(written), write)
        pool_query = self._pool_query()
        if pool_query is None:
            return MixingWeights(write, carry, carry)
        p = depth_scores(written, pool_query).softmax(-1)
        return MixingWeights(write, p[..., None, :, None], carry)

    def memory_traffic(self) -> float:
        # The paper's own fused kernel (section 4.4.1) moves 4n: it reads the streams three times.
        read = self.stream_count + self.gates_pending_write
        writes_streams = self.gates_pending_write and not self.is_readout
        written = self.stream_count if writes_streams else 0
        return read + written + len(self.ports)

    def backward_memory_traffic(self) -> float:
        if self.site.index == 0 or self.gates_pending_write:
            return super().backward_memory_traffic()
        # Each stream and its gradient so far are read, and the gradient is written.
        read_later = 0 if self.is_readout else self.stream_count
        return 2 * self.stream_count + read_later + len(self.ports)

    @torch.no_grad()
    def inversion_context(self, state: Gated) -> InversionContext:
        """What `invert` needs in addition to y (section 4.4.2).

        Args:
            state: the state that `write` is called with.

        Raises:
            ValueError: the streams are in half precision.
        """
        S, _, beta = state
        if not all(s.dtype in (torch.float32, torch.float64) for s in S):
            raise ValueError(
                "inversion needs the streams in float32; use mgr(stream_dtype='float32')"
            )
        if beta is None:
            return InversionContext()
        indices = beta.movedim(-1, 0).flatten().topk(math.ceil(_KEPT_SHARE * beta.numel())).indices
        tokens = beta.shape[:-1].numel()
        rows = [s.flatten(0, -2)[indices % tokens] for s in S]
        # Each index takes the row of the stream that it is in.
        s_kept = rows[0]
        for i, row in enumerate(rows):
            s_kept = torch.where((indices // tokens == i)[:, None], row, s_kept)
        return InversionContext(beta, indices, s_kept)

    @torch.no_grad()
    def invert(self, after: Gated, y: Tensor | None, context: InversionContext) -> Gated:
        """The state before the write of y was applied (Eq. 16): s = (s' − β y) / (1 − β).

        Args:
            after: the state that `read` returned after applying y.
            y: the write, [B T D]; None at the first site, where none is pending.
            context: of the state before, from `inversion_context`.
        """
        beta, indices, s_kept = context
        if y is None:
            return Gated(after.S)
        if beta is None or indices is None or s_kept is None:  # y was appended as a stream
            return Gated(after.S[:-1], y)
        S = torch.stack(after.S)
        b = beta.movedim(-1, 0)[..., None]
        S.addcmul_(b, y.to(S.dtype), value=-1).div_(1 - b)
        S.flatten(0, -2)[indices] = s_kept
        return Gated(S.unbind(), y, beta)


def competitive_gate(scores: Tensor, b: Tensor) -> Tensor:
    """β [B T n] of the scores q [B T n] and the biases b [n+1]. The forget gate has the score 0."""
    return (F.pad(scores, (1, 0)) + b).softmax(-1)[..., 1:]


def independent_gate(scores: Tensor, b: Tensor) -> Tensor:
    """β [B T n] of the scores q [B T n] and the biases b [n]."""
    return (scores + b).sigmoid()


def _eq14_bias(L: int, n: int) -> float:
    """b of Eq. 14 in a model with L gated sub-layers and n streams."""
    exponential = math.sqrt(L / 21) * (math.exp(3) + 1) - n
    if exponential <= 0:
        raise ValueError(
            f"mgr: Eq. 14 has no bias for {n} streams and {L} gated sub-layers: "
            "√(L/21)·(e³+1) must exceed n; take fewer streams or more layers, or set bias"
        )
    return math.log(exponential)
