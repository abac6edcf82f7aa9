"""MUDD: multiway dynamic dense connections, a mixture of the blocks' outputs for each of q, k, v
and the residual.

Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, equations 4-8 and 10.

    X_0 the embedding, X_l the output of block l
    the mixtures after block l, with C ways (q, k, v, r) and K = C(l+1):
    A   = GELU(RMSNorm(X_l) W1) W2 + a   [B T C l+1]                             (Eq. 6)
          W1 [D, K], W2 [K, C(l+1)], a [C, l+1]
    S_c = Σ_{j ≤ l} A_{c,j} ⊙ X_j        c = q, k, v, r; the paper's X̄_l^c      (Eq. 5, 8)
    block l + 1:  h = S_r + MHA(n_q(S_q), n_k(S_k), n_v(S_v));   X_{l+1} = h + FFN(n(h))   (Eq. 7)
    parallel:     X_{l+1} = S_r + MHA(…) + FFN(n(S_r))
    readout:      S_r after the last block; the readout has no other way

    PrePostDANorm:        P_j = n_j(X_j);   m_c = Σ_j A_{c,j} ⊙ P_j
    normed=True:          S_c = X_l + m_c for q, k, v;   S_r = X_l + n_post(m_r)
    normed="every way":   S_c = X_l + n_post,c(m_c) for q, k, v, r

`normed=True` is PrePostDANorm as in the authors' code, "every way" as in the text of section 2.5,
which adds X_l after n_post. Eq. 10 prints it inside.
The first term of A is called the generator. Its RMSNorm has no weight, as in the released code, but
it has one where PrePostDANorm norms the sources. At initialisation W1 ~ N(0, 1/D), W2 = 0 and a is
one-hot on X_l, so that training starts exactly as the plain Transformer; with PrePostDANorm a = 0
and n_post's weight is 1e-3. Where q, k and v are mixed separately, each has a norm.
State: the outputs of all blocks so far, normed by n_j where there is one, and the stream inside the
block.
Learned parameters: KD + KC(l+1) + C(l+1) after block l, and the two further norms of q, k and v.
With PrePostDANorm also 2D after block l (n_j, and the generator's norm), D for the embedding's n_j,
and n_post's D, or C·D with "every way".
Names: source_norm_weight is the weight of n_j, generator_norm_weight that of the generator's norm,
post_norm_weight that of n_post.
Traffic: (l + 7)D elements per token after block l; (3l + 7)D backward.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import InitialFunction, NormFactory
from ..float32_parameters import assign_normal, assign_value, float32_parameter
from ..fused_norms import FusedNormConnection
from ..mixing import MixingWeights, join_rows
from ..norms import NormSpec, add_write, apply_norm, inverse_rms
from ..ops import add_norm, depth_mix, project_tall, write_norm_project
from ..sites import SPLIT_PORT_NAMES, Site, split_attention_ports
from ..validation import check_idle_options, check_non_negative, check_positive
from ._dense import (
    DepthAverages,
    History,
    check_block_count,
    dense_backward_traffic,
    dense_memory_traffic,
    exits_early,
    replace_blocks,
    weights_inside_block,
)
from ._streams import shared_write

Gelu = Literal["erf", "tanh"]
Normed = bool | Literal["pre", "post", "every way"]
WAYS = "qkvr"
# The way that each port of a sub-layer reads. An attention with one port reads S_q = S_k = S_v.
# A sub-layer that mixes tokens without separate q, k and v, like Mamba's, has one input, which is
# what it moves between them: S_v. So does the latent of MLA, which is all that an attention moves,
# its keys too.
_WAY_OF_PORT = {
    "attn": "q", "latent_attn": "q", "q": "q", "k": "k", "v": "v", "kv": "v", "mixer": "v",
    "mlp": "r", "out": "r",
}  # fmt: skip


class NormedForm(NamedTuple):
    """What PrePostDANorm does to the mixtures of a site."""

    norms_sources: bool  # X_j are normed by n_j
    adds_block: bool  # X_l is added to every mixture
    post_ways: str  # the ways whose mixture is normed before X_l is added


_NORMED_FORMS: dict[Normed, NormedForm] = {
    False: NormedForm(norms_sources=False, adds_block=False, post_ways=""),
    True: NormedForm(norms_sources=True, adds_block=True, post_ways="r"),
    "pre": NormedForm(norms_sources=True, adds_block=False, post_ways=""),
    "post": NormedForm(norms_sources=False, adds_block=True, post_ways="r"),
    "every way": NormedForm(norms_sources=True, adds_block=True, post_ways=WAYS),
}


class Mudd(FusedNormConnection[History]):
    """MUDD: multiway dynamic dense connections, for each of q, k, v and the residual stream r.

    Paper: MUDDFormer (Xiao et al., 2025), arXiv 2502.12170, equations 4-8 and 10. The letters are
    those of the equations in `help("crosslayer.connections.mudd")`. The paper's MUDDFormer has
    MLPs that grow with depth too (Eq. 9): `connect(model, "mudd", reallocate=True)`.

    Args:
        ways: the mixtures, separated by spaces, each named by the ways q, k, v and r that it feeds.
            "q k v r" is the paper's method. "qkvr" feeds all ways one mixture (DDFormer, section
            2.2). "k v r" is the ablation −Q: a way without a mixture reads X_l, as in a plain
            residual.
        dynamic: the weights A depend on the token; False for the static part `a` alone. Static
            weights with one way are DenseFormer's averages (section 2.1), without its weight decay.
        dilation: only every `dilation`-th block is mixed, as in DenseFormer.
        period: only every `period`-th block is followed by mixtures, or "last" for the last
            block alone, as in DenseFormer. A model of fewer blocks than `period` has none.
        window: only the last `window` blocks and the embedding are mixed (SW-n, section 3.6); None
            for all blocks. With a dilation k, every k-th of these.
        normed: PrePostDANorm (Eq. 10), which the paper uses for models of a large depth/width
            ratio, to stabilize their training (section 2.5). True norms the mixture of r alone, as
            the authors' JAX trainer does; "every way" norms each mixture, each with another weight,
            as the text does. "pre" and "post" are the trainer's two switches alone: S_c = m_c of
            normed sources, or X_l added to mixtures of raw sources. These two do not start as
            pre-norm, unless r has no mixture.
        round64: rounds K up to (K//64 + 1)·64, as the released checkpoints do.
        expand_last: makes K four times as large after the last block, where only r is read. The
            released checkpoints do this, with the way r alone there. So does the paper's Appendix
            B, with all four ways. `round64` is applied after it.
        gelu: the generator's GELU: "erf" as in the released checkpoints, or its "tanh"
            approximation as in the authors' JAX trainer.
        eps: eps of the generator's RMSNorm, and of n_j and n_post. 1e-5 in MUDDPythia.
    """

    part_label = "X_{}"
    initial_function: InitialFunction = "bitwise prenorm"
    weight_decay_params = frozenset({"W1", "W2"})
    test_variants = (
        "mudd(ways='qkvr')",
        "mudd(ways='qkvr', dynamic=False)",
        "mudd(dynamic=False)",
        "mudd(ways='k v r', dilation=2)",
        "mudd(ways='qk v', period=2)",
        "mudd(window=2, round64=True, expand_last=True)",
        "mudd(normed=True)",
        "mudd(normed=True, ways='q kvr', dynamic=False)",
        "mudd(normed='every way')",
    )

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
        normed: Normed = False,
        round64: bool = False,
        expand_last: bool = False,
        gelu: Gelu = "erf",
        eps: float = 1e-6,
    ):
        if window is not None:
            check_positive(window=window)
        check_non_negative(eps=eps)
        if not dynamic:
            idle = {"round64": round64, "expand_last": expand_last, "gelu": gelu}
            check_idle_options(Mudd, "dynamic=False", **idle)
        form = _NORMED_FORMS[normed]
        _check_all_blocks_are_normed(site, ways, normed, dilation, period)
        if period == "last" and not any("r" in mixture for mixture in _parse_ways(ways)):
            raise ValueError(
                f"period='last' needs the way r, got ways={ways!r}: what follows the last block "
                "reads no other"
            )
        mixtures = _mixtures_at_site(ways, site)
        mixture_of_way = _mixture_of_way(mixtures)
        averages = DepthAverages(dilation, period, window)
        sources = averages.averaged_blocks(site) if mixtures else ()
        ports = _ports_mixed_apart(site, mixture_of_way) if sources else site.ports
        super().__init__(site, dim, norm, ports)
        self.averages = averages
        self.sources = sources
        self.weighs_channels = bool(normed)
        self.mixture_of_way = mixture_of_way
        self.port_ways = tuple(_WAY_OF_PORT[port] for port in ports)
        self.gelu_approximation = "tanh" if gelu == "tanh" else "none"
        self.eps = eps
        self.normed_form = form
        if form.norms_sources != form.adds_block:
            # Where r is X_l, a norm follows every mixture, which is X_l or P_l times a constant.
            mixes_stream = mixture_of_way["r"] is not None
            self.initial_function = "other" if mixes_stream else "prenorm up to scales"
        # The op that mixes makes every port's input, unless X_l is added after it.
        all_ports_mixed = all(mixture_of_way[s] is not None for s in self.port_ways)
        self.can_fuse_norms = not sources or (all_ports_mixed and not form.adds_block)

        C = len(mixtures)
        L = len(sources)
        K = _generator_width(C * L, expand_last and self.is_readout, round64)
        generates = bool(sources) and dynamic
        self.a = float32_parameter(C, L) if sources else None
        self.W1 = float32_parameter(dim, K) if generates else None
        self.W2 = float32_parameter(K, C * L) if generates else None
        self._add_norm_weights()
        self.reset_parameters()

    def _add_norm_weights(self) -> None:
        """Register the weights of PrePostDANorm, if any."""
        form = self.normed_form
        ends_block = self.a is not None or self.site.index == 0
        generates = self.W1 is not None
        # of n_j for the block that ends here, and of the generator's norm
        self.source_norm_weight = None
        if form.norms_sources and ends_block:
            self.source_norm_weight = float32_parameter(self.dim)
        self.generator_norm_weight = None
        if form.norms_sources and generates:
            self.generator_norm_weight = float32_parameter(self.dim)
        # of n_post, one for r or one for each mixture
        self.post_norm_weight = None
        if self.a is not None and form.post_ways == WAYS:
            self.post_norm_weight = float32_parameter(len(self.a), self.dim)
        elif self.a is not None and form.post_ways and self.mixture_of_way["r"] is not None:
            self.post_norm_weight = float32_parameter(self.dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.a is not None:
            a = torch.zeros(self.a.shape, device=self.a.device)
            if not (self.normed_form.norms_sources and self.normed_form.adds_block):
                a[:, -1] = 1
            assign_value(self.a, a)
        if self.W1 is not None and self.W2 is not None:
            assign_normal(self.W1, self.dim**-0.5, self.site)
            nn.init.zeros_(self.W2)
        if self.source_norm_weight is not None:
            nn.init.ones_(self.source_norm_weight)
        if self.generator_norm_weight is not None:
            nn.init.ones_(self.generator_norm_weight)
        if self.post_norm_weight is not None:
            nn.init.constant_(self.post_norm_weight, 1e-3)

    def initial_state(self, x: Tensor) -> History:
        return History((), x)

    def fused_read(
        self, state: History, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], History]:
        if self.a is None or (self.is_readout and exits_early(state, self.sources)):
            h, x = add_norm(state.h, state.y, *norms)
            return (x,), History(self._finished_blocks(state, h), h)
        # A block ends here, and h is its output X_l.
        h, A = self.write_and_weigh(state.h, state.y)
        X = self._finished_blocks(state, h)
        check_block_count(X, self.site)
        mixed = tuple(X[j] for j in self.sources)
        if norms:
            inputs, h, mixed = self._mix_and_norm(mixed, A, h, norms)
        else:
            S, mixed = depth_mix(mixed, A)
            inputs = tuple(self._way(way, h, S) for way in self.port_ways)
            h = self._way("r", h, S)
        return inputs, History(replace_blocks(X, self.sources, mixed), h)

    def _mix_and_norm(
        self, X: tuple[Tensor, ...], A: Tensor, h: Tensor, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
        """The normed S_c of every port, S_r, and the sources X for their next reader.

        A mixture that only feeds a norm is not returned, so a kernel need not store it.
        """
        outputs: list[tuple[int, NormSpec | None]] = []
        for way, norm in zip(self.port_ways, norms, strict=True):
            c = self.mixture_of_way[way]
            assert c is not None, "can_fuse_norms: every port reads a mixture"
            outputs.append((c, norm))
        r = self.mixture_of_way["r"]
        if r is None:
            inputs, X = depth_mix(X, A, tuple(outputs))
            return inputs, h, X
        (*normed, h), X = depth_mix(X, A, (*outputs, (r, None)))
        return tuple(normed), h, X

    def _finished_blocks(self, state: History, h: Tensor) -> tuple[Tensor, ...]:
        """The sources so far: with the block that ends here, normed by n_j for PrePostDANorm."""
        if not self.opens_layer:
            return state.X
        if self.source_norm_weight is not None:
            h = apply_norm(h, NormSpec(self.source_norm_weight, None, self.eps, centred=False))
        return (*state.X, h)

    def write_and_weigh(self, h: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """X_l = h + y, [B T D], and A of Eq. 6: [C L] where it is static, or [B T C L]."""
        assert self.a is not None
        if self.W1 is None or self.W2 is None:
            h, _ = add_norm(h, y)
            return h, self.a
        W1: Tensor = self.W1
        if self.generator_norm_weight is not None:
            W1 = self.generator_norm_weight[:, None] * W1
        # h is one stream.
        H, z = write_norm_project(h[..., None, :], shared_write(y), None, W1, self.eps)
        hidden = F.gelu(z[..., 0, :], approximate=self.gelu_approximation)
        generated = project_tall(hidden, self.W2)
        return H[..., 0, :], generated.unflatten(-1, self.a.shape) + self.a

    def _post_weight(self, way: str, c: int) -> Tensor | None:
        """The weight of n_post for mixture c, if this way is normed by it."""
        weight = self.post_norm_weight
        if weight is None or way not in self.normed_form.post_ways:
            return None
        return weight if weight.dim() == 1 else weight[c]

    def _way(self, way: str, h: Tensor, mixtures: tuple[Tensor, ...]) -> Tensor:
        """S_c of one way, where h is X_l."""
        c = self.mixture_of_way[way]
        if c is None:
            return h
        m = mixtures[c]
        if not self.normed_form.adds_block:
            return m
        weight = self._post_weight(way, c)
        if weight is not None:
            m = apply_norm(m, NormSpec(weight, None, self.eps, centred=False))
        return h + m

    def state_parts(self, state: History) -> tuple[Tensor, ...]:
        return (*state.X, state.h)

    def mixing_weights(self, state: History) -> MixingWeights:
        inside_block = weights_inside_block(state)
        if not self.opens_layer:
            return inside_block
        write, h, finished, _ = inside_block
        # A block ends here.
        X_l = add_write(state.h, state.y)
        # What joins the history when this block ends: X_l, or P_l for PrePostDANorm.
        joins = h
        if self.source_norm_weight is not None:
            factors = inverse_rms(X_l, self.eps)[..., None] * self.source_norm_weight
            joins = h * factors[..., None, None, :]
        X = join_rows(finished[:-1], joins)
        if self.a is None:
            return MixingWeights(write, h, join_rows(X, h))
        _, A = self.write_and_weigh(state.h, state.y)
        written = torch.stack((*state.X, X_l), -2)
        S = {way: self._way_weights(way, h, A, X, written) for way in WAYS}
        read = join_rows(*(S[way] for way in self.port_ways))
        return MixingWeights(write, read, join_rows(X, S["r"]))

    def _way_weights(self, way: str, h: Tensor, A: Tensor, X: Tensor, written: Tensor) -> Tensor:
        """The weights of S_c of one way over the written parts, [.. 1 parts K].

        h: the weights of X_l.  A: [.. C L].  X: the weights of the finished blocks.
        written: the written parts themselves, [B T parts D].
        """
        c = self.mixture_of_way[way]
        if c is None:
            return h
        sources = X[..., list(self.sources), :, :]
        m = (A[..., c, :, None, None] * sources).sum(-3, keepdim=True)
        if not self.normed_form.adds_block:
            return m
        weight = self._post_weight(way, c)
        if weight is not None:
            value = (m.squeeze(-3) * written).sum(-2)
            m = m * (inverse_rms(value, self.eps)[..., None] * weight)[..., None, None, :]
        return h + m

    def memory_traffic(self) -> float:
        averages_stream = self.mixture_of_way["r"] is not None
        return dense_memory_traffic(self, self.averages, self.sources, averages_stream)

    def backward_memory_traffic(self) -> float:
        return dense_backward_traffic(self, self.averages, self.sources)


def _parse_ways(ways: str) -> list[str]:
    """The ways that each mixture feeds: "qk v" -> ["qk", "v"]."""
    mixtures = ways.split() if isinstance(ways, str) else []
    named = "".join(mixtures)
    is_named_twice = len(set(named)) < len(named)
    if not named or is_named_twice or not set(named) <= set(WAYS):
        raise ValueError(
            "mudd: ways must name each of q, k, v, r at most once, with spaces between "
            f"mixtures, like 'q k v r' or 'qkvr', got {ways!r}"
        )
    return mixtures


def _mixtures_at_site(ways: str, site: Site) -> list[str]:
    """The ways that each mixture which this site reads feeds.

    The readout, and a layer without an attention, read fewer mixtures than there are.
    """
    read = {"r", *(_WAY_OF_PORT[port] for port in split_attention_ports(site.ports))}
    return [mixture for mixture in _parse_ways(ways) if read & set(mixture)]


def _check_all_blocks_are_normed(
    site: Site, ways: str, normed: Normed, dilation: int, period: int | Literal["last"]
) -> None:
    """Raise a ValueError where n_j of PrePostDANorm would be idle, or missing, at a block."""
    if not _NORMED_FORMS[normed].norms_sources:
        return
    if (dilation, period) != (1, 1):
        raise ValueError(
            f"normed={normed!r} excludes dilation and period: the norm n_j of a block that is "
            "never mixed would be idle"
        )
    opens_later_layer = site.opens_layer and site.index > 0 and not site.is_readout
    if opens_later_layer and not _mixtures_at_site(ways, site):
        raise ValueError(
            f"normed={normed!r} needs the way r where a layer has no attention, as at "
            f"{site.place}, got ways={ways!r}: the block before it would not be normed"
        )


def _mixture_of_way(mixtures: list[str]) -> dict[str, int | None]:
    """c for each way that mixture c feeds; None for a way that reads X_l itself."""
    mixture_of_way: dict[str, int | None] = dict.fromkeys(WAYS)
    for c, ways in enumerate(mixtures):
        for way in ways:
            mixture_of_way[way] = c
    return mixture_of_way


def _ports_mixed_apart(site: Site, mixture_of_way: dict[str, int | None]) -> tuple[str, ...]:
    """The ports of a site that averages.

    Where q, k and v are mixed separately, each is a port of the attention with another norm.
    """
    split_ports = split_attention_ports(site.ports)
    qkv = [port for port in split_ports if port in SPLIT_PORT_NAMES]
    mixtures = {mixture_of_way[_WAY_OF_PORT[port]] for port in qkv}
    return split_ports if len(mixtures) > 1 else site.ports


def _generator_width(weights: int, is_expanded: bool, round64: bool) -> int:
    """K, for a generator of `weights` = C(l+1) numbers a token."""
    K = 4 * weights if is_expanded else weights
    return (K // 64 + 1) * 64 if round64 else K
