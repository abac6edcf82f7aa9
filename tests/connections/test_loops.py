"""Every connection against a loop written from its paper's equations, in float64.

Outputs and every gradient are compared. A loop keeps its sources and streams in lists and adds them
with `+`. It shares with the library the parameters by their names, the norms of the sites and the
sub-layers, and no arithmetic: crosslayer.ops is not used here.

A new method needs one function here:

    @loop_of("laurel")
    def laurel(net: Network, x: Tensor) -> Tensor:
        for k, site in enumerate(net.sites[:-1]):
            x = ... net.F(k, x) ...
        return net.final(x)
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import crosslayer
from crosslayer.connections._dense import DepthAverages
from crosslayer.methods import find_method
from crosslayer.sites import plan_layers
from crosslayer.testing.laws import is_own
from crosslayer.testing.tiny_model import perturb_weights

few = settings(max_examples=20, deadline=None, derandomize=True, database=None)


class Case(NamedTuple):
    batch: int = 2
    tokens: int = 3
    dim: int = 6
    layers: int = 4
    parallel: bool = False
    normed: bool = True  # the sites' norms are RMSNorm, or nothing
    seed: int = 0


# hypothesis leans to what comes first
cases = st.builds(
    Case,
    batch=st.integers(1, 3),
    tokens=st.sampled_from([3, 1, 5]),
    dim=st.sampled_from([5, 6, 3, 7]),
    layers=st.sampled_from([4, 3, 5, 2, 1]),
    parallel=st.booleans(),
    normed=st.sampled_from([True, False]),
    seed=st.integers(0, 99),
)


class Network:
    """Connections with perturbed weights, and sub-layers that distinguish their inputs."""

    def __init__(self, spec: str, case: Case, perturbed: bool = True):
        torch.manual_seed(case.seed)
        make, self.case = crosslayer.make(spec), case

        def norm(port: str) -> nn.Module:
            return nn.RMSNorm(case.dim, eps=1e-6) if case.normed else nn.Identity()

        self.sites = [
            make(site, case.dim, norm).double()
            for site in crosslayer.plan(case.layers, case.parallel)
        ]
        for k, site in enumerate(self.sites if perturbed else ()):
            perturb_weights(site, 0.1 + 0.05 * k)  # no two sites alike
            for name in ("base", "static_alpha"):
                parameter = getattr(site, name, None)
                if case.seed % 2 and isinstance(parameter, nn.Parameter):
                    # far from R = I, where its orientation hardly shows
                    nn.init.normal_(parameter)
        self.depth = len(self.sites) - 1
        self.matrices = [
            {
                port: torch.randn(case.dim, case.dim, dtype=torch.float64)
                for port in ("attn", "mlp", *"qkv")
            }
            for _ in range(self.depth)
        ]

    def sublayer(self, k: int, *normed: Tensor) -> Tensor:
        """y_{k+1} of inputs that are normed already, one a port."""
        ports = zip(self.sites[k].ports, normed, strict=True)
        return sum(torch.tanh(x @ self.matrices[k][port]) for port, x in ports)

    def F(self, k: int, *xs: Tensor) -> Tensor:
        """y_{k+1} of what the ports read, one tensor for all or one each."""
        norms = self.sites[k].norms
        xs = xs if len(xs) > 1 else xs * len(norms)
        return self.sublayer(k, *(norm(x) for norm, x in zip(norms, xs, strict=True)))

    def final(self, x: Tensor) -> Tensor:
        return self.sites[-1].norms[0](x)

    def run(self, x: Tensor) -> Tensor:
        """What the library computes."""
        state = self.sites[0].init(x)
        for k, site in enumerate(self.sites[:-1]):
            inputs, state = site.read(state)
            state = site.write(state, self.sublayer(k, *inputs))
        return self.sites[-1].readout(state)


Loop = Callable[[Network, Tensor], Tensor]
LOOPS: dict[str, Loop] = {}  # the loop of each method with its default options


def loop_of(name: str) -> Callable[[Loop], Loop]:
    """Register the loop that the method `name` is compared with, with its default options."""

    def register(loop: Loop) -> Loop:
        LOOPS[name] = loop
        return loop

    return register


OWN_NAMES = [name for name in crosslayer.available() if is_own(find_method(name))]


@pytest.mark.parametrize("name", OWN_NAMES)
@settings(few, max_examples=6)
@given(case=cases)
def test_every_method_agrees_with_its_loop(name, case):
    assert name in LOOPS, (
        f"{name} is compared with nothing: write a function `{name}(net, x)` in this file, a loop "
        f"over its paper's equations, decorated with `@loop_of({name!r})`"
    )
    check(name, LOOPS[name], case._replace(dim=6))


def agree(net: Network, loop: Callable[[Tensor], Tensor]) -> None:
    """Both compute the same, and so do their backwards."""
    case = net.case
    x = torch.randn(case.batch, case.tokens, case.dim, dtype=torch.float64, requires_grad=True)
    weights = {
        f"site {k} {n}": p
        for k, s in enumerate(net.sites)
        for n, p in s.named_parameters()
        if p.requires_grad
    }
    ours, theirs = net.run(x), loop(x)
    cotangent = torch.randn_like(ours)
    leaves = (x, *weights.values())
    gradients = (
        torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)
        for out in (ours, theirs)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    for name, a, b in zip(("input", *weights), *gradients, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"gradient of {name}: {m}"
        )


def check(spec: str, loop: Loop, case: Case) -> None:
    net = Network(spec, case)
    agree(net, lambda x: loop(net, x))


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()


def softmax(scores: list[Tensor]) -> list[Tensor]:
    exps = [score.exp() for score in scores]
    return [e / sum(exps) for e in exps]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def dot(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum(-1, keepdim=True)


# ---- one stream


@loop_of("prenorm")
def prenorm(net: Network, x: Tensor) -> Tensor:
    for k in range(net.depth):
        x = x + net.F(k, x)
    return net.final(x)


@loop_of("postnorm")
def postnorm(net: Network, x: Tensor) -> Tensor:
    x, *inputs = (norm(x) for norm in net.sites[0].norms)
    for k in range(net.depth):
        total = x + net.sublayer(k, x, *inputs)
        x, *inputs = (norm(total) for norm in net.sites[k + 1].norms)
    return x


@loop_of("resi_dual")
def resi_dual(net: Network, x: Tensor) -> Tensor:
    dual = x
    x, *inputs = (norm(x) for norm in net.sites[0].norms)
    for k in range(net.depth):
        y = net.sublayer(k, x, *inputs)
        total, dual = x + y, dual + y
        norms = net.sites[k + 1].norms
        if k + 1 == net.depth:
            return norms[0](total) + norms[1](dual)
        x, *inputs = (norm(total) for norm in norms)
    raise AssertionError


@loop_of("skip_gain")
def skip_gain(net: Network, x: Tensor) -> Tensor:
    for k in range(net.depth):
        x = net.sites[k].gain * x + net.F(k, x)
    return net.final(x)


@loop_of("highway")
def highway(net: Network, x: Tensor) -> Tensor:
    for k, site in enumerate(net.sites[:-1]):
        g = sigmoid(x @ site.W + site.b)
        x = (1 - g) * x + g * net.F(k, x)
    return net.final(x)


@few
@given(case=cases, bias=st.sampled_from([-0.5, -3.0]))
def test_highway(case, bias):
    check(f"highway(bias={bias})", highway, case)


def test_the_gate_of_a_highway_starts_at_its_bias():
    for site in Network("highway(bias=-3.0)", Case(), perturbed=False).sites[:-1]:
        assert site.b.tolist() == [-3.0] * 6 and not site.W.any()


# ---- altup


def altup(K: int) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        per = 1 if net.case.parallel else 2
        X = [x] * K
        for layer in range(net.case.layers):
            site, j = net.sites[layer * per], layer % K
            predicted = [sum(site.P[i, k] * X[k] for k in range(K)) for i in range(K)]
            o = X[j]
            for k in range(layer * per, (layer + 1) * per):
                o = o + net.F(k, o)
            X = [predicted[i] + site.g[i] * (o - predicted[j]) for i in range(K)]
        return net.final(sum(X))

    return loop


loop_of("altup")(altup(K=2))


@few
@given(case=cases, K=st.sampled_from([3, 2, 4, 1]))
def test_altup(case, K):
    check(f"altup(streams={K})", altup(K), case)


# ---- sums over the blocks' outputs


def averaged(depth: int, k: int, p: int | str, last: int | None, layers: int) -> list[int]:
    """The blocks averaged after block `depth` (DenseFormer, section 3.2); none for no average."""
    if depth != layers if p == "last" else depth % p != 0:
        return []
    near = [j for j in range(depth + 1) if j % k == depth % k]
    return near if last is None else [j for j in near if j == 0 or depth - j < last]


def denseformer(k: int = 1, p: int | str = 1, last: int | None = None) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        per, L = (1 if net.case.parallel else 2), net.case.layers
        X, Y = [x], x
        for i in range(1, L + 1):
            for sub in range((i - 1) * per, i * per):
                Y = Y + net.F(sub, Y)
            X.append(Y)
            sources = averaged(i, k, p, last, L)
            if sources:
                alpha = net.sites[i * per].alpha
                assert len(alpha) == len(sources)
                Y = sum(alpha[a] * X[j] for a, j in enumerate(sources))
        return net.final(Y)

    return loop


loop_of("denseformer")(denseformer())


@few
@given(case=cases, dilation=st.integers(1, 4), period=st.one_of(st.integers(1, 4), st.just("last")))
@example(case=Case(layers=5), dilation=1, period="last")
@example(case=Case(layers=5, parallel=True), dilation=2, period=3)
def test_denseformer(case, dilation, period):
    check(
        f"denseformer(dilation={dilation}, period={period!r})", denseformer(dilation, period), case
    )


@few
@given(case=cases, last_k=st.integers(1, 6), period=st.sampled_from([1, 2, "last"]))
@example(case=Case(layers=5), last_k=2, period=1)
@example(case=Case(layers=5), last_k=1, period=1)
def test_denseformer_last_k(case, last_k, period):
    check(f"denseformer(last_k={last_k}, period={period!r})", denseformer(1, period, last_k), case)


class MuddOptions(NamedTuple):
    """MUDD's options."""

    ways: str = "q k v r"
    dynamic: bool = True
    dilation: int = 1
    period: int | str = 1
    window: int | None = None
    normed: bool | str = False
    round64: bool = False
    expand_last: bool = False
    gelu: str = "erf"
    eps: float = 1e-6

    @property
    def spec(self) -> str:
        return f"mudd({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})"


GELU = {
    "erf": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
}


def mudd(options: MuddOptions) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        per, L = (1 if net.case.parallel else 2), net.case.layers
        X, P = [x], []
        S = dict.fromkeys("qkvr", x)
        if options.normed in (True, "pre", "every way"):
            P = [rms(x, options.eps) * net.sites[0].source_norm_weight]
        for l in range(1, L + 1):
            site = (l - 1) * per
            attention = (
                [S[c] for c in "qkv"] if len(net.sites[site].norms) > per_ports(net) else [S["q"]]
            )
            if len(attention) == 1:
                assert S["q"] is S["k"] is S["v"], "one norm of the attention's input, so one input"
            if net.case.parallel:
                X.append(S["r"] + net.F(site, *attention, S["r"]))
            else:
                h = S["r"] + net.F(site, *attention)
                X.append(h + net.F(site + 1, h))
            S = aggregated(net.sites[l * per], options, X, P, L)
        return net.final(S["r"])

    return loop


def per_ports(net: Network) -> int:
    return 2 if net.case.parallel else 1


def aggregated(
    site: crosslayer.Connection, options: MuddOptions, X: list[Tensor], P: list[Tensor], L: int
) -> dict:
    """The depth aggregation after block l: what each stream reads of X_0 .. X_l.

    P: the sources of PrePostDANorm, to which this block is added.
    """
    l = len(X) - 1
    groups = [group for group in options.ways.split() if l < L or "r" in group]
    sources = averaged(l, options.dilation, options.period, options.window, L) if groups else []
    norms_sources = options.normed in (True, "pre", "every way")
    adds_block = options.normed in (True, "post", "every way")
    if norms_sources and sources:
        P.append(rms(X[l], options.eps) * site.source_norm_weight)
    S = dict.fromkeys("qkvr", X[l])
    if not sources:
        assert site.a is None and site.W1 is None
        return S
    N = rms(X[l], options.eps)
    if norms_sources and options.dynamic:
        N = N * site.generator_norm_weight
    for c, group in enumerate(groups):
        mixed = 0
        for j, source in enumerate(sources):
            weight = site.a[c, j]
            if options.dynamic:
                hidden = GELU[options.gelu](N @ site.W1)
                weight = weight + dot(hidden, site.W2[:, c * len(sources) + j])
            mixed = mixed + weight * (P if norms_sources else X)[source]
        if options.normed == "every way":
            mixed = rms(mixed, options.eps) * site.post_norm_weight[c]
        S |= dict.fromkeys(group, X[l] + mixed if adds_block else mixed)
        if options.normed in (True, "post") and "r" in group:  # the authors norm r alone
            S["r"] = X[l] + rms(mixed, options.eps) * site.post_norm_weight
    return S


loop_of("mudd")(mudd(MuddOptions()))

WAYS = ("q k v r", "qkvr", "k v r", "q v r", "q k r", "q k v", "qk vr", "r", "qkv r", "q kvr", "v")

NORMED = st.sampled_from([False, True, "pre", "post", "every way"])


@few
@given(case=cases, ways=st.sampled_from(WAYS), dynamic=st.booleans(), normed=NORMED)
@example(case=Case(), ways="q k v r", dynamic=True, normed=False)
@example(case=Case(parallel=True), ways="q k v r", dynamic=True, normed=False)
@example(case=Case(parallel=True), ways="q k v r", dynamic=True, normed=True)
@example(case=Case(), ways="qkvr", dynamic=True, normed=False)  # DDFormer
@example(case=Case(), ways="q k v r", dynamic=False, normed=False)
@example(case=Case(layers=1), ways="q k v", dynamic=True, normed=True)
@example(case=Case(), ways="q k v r", dynamic=True, normed="pre")
@example(case=Case(), ways="q k v r", dynamic=True, normed="post")
@example(case=Case(), ways="q k v r", dynamic=True, normed="every way")
def test_mudd(case, ways, dynamic, normed):
    options = MuddOptions(ways, dynamic, normed=normed)
    check(options.spec, mudd(options), case)


@few
@given(
    case=cases,
    ways=st.sampled_from(WAYS),
    dilation=st.integers(1, 3),
    period=st.sampled_from([1, 2, 3, "last"]),
    expand_last=st.booleans(),
)
@example(case=Case(layers=5), ways="k v r", dilation=2, period=2, expand_last=True)
@example(case=Case(layers=4), ways="q k v r", dilation=1, period="last", expand_last=False)
def test_mudd_dilation_and_period(case, ways, dilation, period, expand_last):
    assume(period != "last" or "r" in ways)
    options = MuddOptions(ways, dilation=dilation, period=period, expand_last=expand_last)
    check(options.spec, mudd(options), case)


@few
@given(
    case=cases,
    ways=st.sampled_from(WAYS),
    window=st.integers(1, 5),
    normed=NORMED,
    round64=st.booleans(),
    gelu=st.sampled_from(["erf", "tanh"]),
    eps=st.sampled_from([1e-6, 1e-2]),
)
@example(
    case=Case(layers=5),
    ways="q k v r",
    window=2,
    normed=True,
    round64=False,
    gelu="tanh",
    eps=1e-2,
)
def test_mudd_window_rounding_and_generator(case, ways, window, normed, round64, gelu, eps):
    options = MuddOptions(ways, window=window, normed=normed, round64=round64, gelu=gelu, eps=eps)
    check(options.spec, mudd(options), case)


def test_a_window_leaves_blocks_out_and_adds_none():
    """Of what the dilation leaves, the embedding stays; a window of all blocks changes nothing."""
    cases = [(1, 1), (1, 2), (1, 3), *itertools.product((1, 2, 3), (None, 4, 5, 100))]
    for dilation, window in cases:
        averages = DepthAverages(dilation, 1, window)
        for site in crosslayer.plan(6):
            if site.opens_layer and site.layer > 0:
                expected = averaged(site.layer, dilation, 1, window, 6)
                assert averages.averaged_blocks(site) == tuple(expected)


def test_the_hidden_width_of_mudd():
    """K = C(l+1); four times that at the end, then rounded up: 64 becomes 128."""
    plain = [
        site.W1.shape[1]
        for site in Network("mudd", Case(layers=5)).sites
        if getattr(site, "W1", None) is not None
    ]
    assert plain == [8, 12, 16, 20, 6]
    wide = Network("mudd(expand_last=True, round64=True)", Case(layers=15, dim=3)).sites
    assert [site.W1.shape[1] for site in wide if site.W1 is not None] == [64] * 14 + [
        128
    ]  # 4 · 16 = 64


@few
@given(case=cases, dilation=st.integers(1, 4), period=st.integers(1, 4))
def test_static_one_way_mudd_is_denseformer(case, dilation, period):
    options = MuddOptions("qkvr", dynamic=False, dilation=dilation, period=period)
    ours, dense = (
        Network(options.spec, case),
        Network(f"denseformer(dilation={dilation}, period={period})", case),
    )
    for a, b in zip(ours.sites, dense.sites, strict=True):
        assert (a.a is None) == (b.alpha is None)
        if a.a is not None:
            b.alpha = nn.Parameter(a.a.detach()[0].clone())
        b.norms.load_state_dict(a.norms.state_dict())
    x = torch.randn(case.batch, case.tokens, case.dim, dtype=torch.float64)
    dense.matrices = ours.matrices
    torch.testing.assert_close(ours.run(x), dense.run(x), rtol=0, atol=0)


# ---- attention over depth


def attended(
    values: list[Tensor], w: Tensor, g: Tensor | float, scale: float, eps: float = 1e-6
) -> Tensor:
    p = softmax([dot(rms(v, eps) * g, w) * scale for v in values])
    return sum(p_i * v for p_i, v in zip(p, values, strict=True))


def attnres(block_size: int, eps: float = 1e-6) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        Y = []

        def read(k: int) -> Tensor:
            blocks = [sum(Y[i : i + block_size]) for i in range(0, len(Y), block_size)]
            site = net.sites[k]
            return attended([x, *blocks], site.query, site.key_norm, 1.0, eps) if k else x

        for k in range(net.depth):
            Y.append(net.F(k, read(k)))
        return net.final(read(net.depth))

    return loop


loop_of("attnres")(attnres(block_size=1))


@few
@given(
    case=cases,
    block_size=st.sampled_from([3, 2, 4, 1, 5, 6, 12]),
    eps=st.sampled_from([1e-6, 1e-2]),
)
@example(case=Case(layers=4), block_size=1, eps=1e-2)
@example(case=Case(layers=4), block_size=3, eps=1e-6)  # 3 + 3 + 2 sub-layers
@example(case=Case(layers=4, parallel=True), block_size=3, eps=1e-2)
@example(case=Case(layers=4), block_size=12, eps=1e-6)  # never completed
def test_attnres(case, block_size, eps):
    check(f"attnres(block_size={block_size}, eps={eps})", attnres(block_size, eps), case)


# ---- multi-gate residuals


def mgr(n: int, gate: str) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        scale = net.case.dim**-0.5
        S, h = [x], x
        for k in range(1, net.depth + 1):
            y, site = net.F(k - 1, h), net.sites[k - 1]
            if k < n:
                assert site.w1 is None and site.b is None
                S.append(y)
            else:
                q = [dot(rms(s), site.w1) * scale for s in S]
                if gate == "competitive":
                    _, *beta = softmax(
                        [
                            score + b
                            for score, b in zip([torch.zeros_like(q[0]), *q], site.b, strict=True)
                        ]
                    )
                else:
                    beta = [sigmoid(score + b) for score, b in zip(q, site.b, strict=True)]
                S = [s + b * (y - s) for s, b in zip(S, beta, strict=True)]
            h = attended(S, net.sites[k].w2, 1.0, scale)
        return net.final(h)

    return loop


loop_of("mgr")(mgr(4, "competitive"))


def exceeds(L: int, n: int) -> float:
    return math.sqrt(L / 21) * (math.exp(3) + 1) - n


@few
@given(
    case=cases,
    n=st.sampled_from([4, 3, 2, 5, 1, 6]),
    gate=st.sampled_from(["competitive", "independent"]),
    eq14=st.sampled_from(["text", "literal"]),
)
@example(case=Case(layers=1), n=4, gate="competitive", eq14="text")  # two sub-layers, four streams
@example(
    case=Case(layers=2), n=5, gate="independent", eq14="text"
)  # four sub-layers: all appended, none gated
@example(case=Case(layers=4), n=4, gate="competitive", eq14="text")
@example(case=Case(layers=4), n=1, gate="independent", eq14="literal")
def test_mgr(case, n, gate, eq14):
    assume(gate == "independent" or eq14 == "text")
    gated = case.layers * (1 if case.parallel else 2) - (n - 1)
    assume(gated < 1 or exceeds(gated, n) > 0)
    check(f"mgr(streams={n}, gate={gate!r}, eq14={eq14!r})", mgr(n, gate), case)


TABLE = json.loads(
    (Path(__file__).parent.parent / "golden/mgr_competitive_n4_10sublayers.json").read_text()
)
STARTS = {
    tuple(int(p.split("=")[1]) for p in row.split(",")): v
    for row, v in TABLE["eq14_bias_init_table"].items()
}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("gate='competitive'", "competitive_beta_at_init"),
        ("gate='independent'", "independent_beta_with_n_eq_1"),
        ("gate='independent', eq14='literal'", "independent_beta_literal"),
    ],
    ids=["competitive", "independent-text", "independent-literal"],
)
@pytest.mark.parametrize(("L", "n"), STARTS, ids=[f"L{L}-n{n}" for L, n in STARTS])
def test_how_far_mgr_moves_at_first(options, key, L, n):
    """β at the start, whatever the streams are: σ(−3)·√(21/L) exactly when the gates compete."""
    site = plan_layers([[("mlp",)]] * (L + n - 1))[n - 1]
    connection = crosslayer.make(f"mgr(streams={n}, {options})")(
        site, 5, lambda port: nn.Identity()
    ).double()
    torch.manual_seed(3)
    S = tuple(torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(n))
    _, state = connection.read(
        type(connection.initial_state(S[0]))(S[:-1], S[-1])
        if n > 1
        else connection.initial_state(S[0])
    )
    # the biases are kept in float32
    torch.testing.assert_close(
        state.beta, torch.full_like(state.beta, STARTS[L, n][key]), rtol=1e-6, atol=0
    )
    if key == "competitive_beta_at_init":
        exact = math.sqrt(21 / L) / (1 + math.exp(3))
        assert STARTS[L, n][key] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("gate", "moved"),
    [("competitive", 1 / (math.exp(1.5) + 8)), ("independent", 1 / (1 + math.exp(1.5)))],
)
def test_mgr_with_a_bias_of_its_own(gate, moved):
    """Eight streams of ten sub-layers, of which three are gated: Eq. 14 has no bias there."""
    make = crosslayer.make(f"mgr(streams=8, gate={gate!r}, bias=1.5)")
    sites = [make(site, 5, lambda port: nn.Identity()) for site in crosslayer.plan(layers=5)]
    state = sites[0].init(torch.randn(2, 3, 5))
    for site in sites[:-1]:
        _, state = site.read(state)
        if site.site.index >= 7:
            torch.testing.assert_close(state.beta, torch.full((2, 3, 8), moved))
        state = site.write(state, torch.randn(2, 3, 5))


@pytest.mark.parametrize(("layers", "n", "inside"), [(3, 6, 5), (4, 7, 6), (4, 8, 6)])
def test_equation_14_has_a_domain(layers, n, inside):
    L = 2 * layers - (n - 1)
    assert exceeds(L, n) <= 0 < exceeds(2 * layers - (inside - 1), inside)
    for options in ("", ", gate='independent', eq14='literal'"):
        with pytest.raises(ValueError, match=rf"Eq. 14 .* {n} streams and {L} gated"):
            Network(f"mgr(streams={n}{options})", Case(layers=layers))
        Network(f"mgr(streams={inside}{options})", Case(layers=layers))
    Network(
        f"mgr(streams={n}, gate='independent')", Case(layers=layers)
    )  # the text's formula has n = 1


# ---- hyper-connections


def layernorm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + eps).sqrt()


def alpha_and_beta(
    site: crosslayer.Connection,
    H: list[Tensor],
    dynamic: bool,
    tanh: bool,
    stats: str,
    eps: float | None = None,
):
    """alpha[s][c] and beta[s] of stream s, each a number a token."""
    if eps is None:
        eps = 1e-6 if stats == "rmsnorm" else 1e-5
    alpha, beta = [], []
    for s, h in enumerate(H):
        row = [site.static_alpha[s, c] for c in range(site.static_alpha.shape[1])]
        b = site.static_beta[s]
        if dynamic:
            N = {
                "layernorm": lambda h: layernorm(h, eps) * site.norm_weight + site.norm_bias,
                "rmsnorm": lambda h: rms(h, eps) * site.norm_weight,
                "unweighted": lambda h: layernorm(h, eps),
            }[stats](h)
            bound = torch.tanh if tanh else lambda z: z
            row = [
                a + site.dynamic_alpha_scale * bound(dot(N, site.dynamic_alpha_fn[:, c]))
                for c, a in enumerate(row)
            ]
            b = b + site.dynamic_beta_scale * bound(dot(N, site.dynamic_beta_fn))
        alpha.append(row)
        beta.append(b)
    return alpha, beta


def hyper(
    n: int,
    dynamic: bool = True,
    tanh: bool = True,
    stats: str = "layernorm",
    eps: float | None = None,
) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        H = [x] * n
        for k, site in enumerate(net.sites[:-1]):
            alpha, beta = alpha_and_beta(site, H, dynamic, tanh, stats, eps)
            mix = [sum(alpha[s][c] * H[s] for s in range(n)) for c in range(n + 1)]
            y = net.F(k, mix[0])
            H = [beta[s] * y + mix[1 + s] for s in range(n)]
        return net.final(sum(H))

    return loop


loop_of("hyper")(hyper(4))


# dynamic, tanh, stats, eps
STATIC = (False, True, "layernorm", None)
DYNAMIC = st.tuples(
    st.just(True),
    st.booleans(),
    st.sampled_from(["layernorm", "rmsnorm", "unweighted"]),
    st.sampled_from([None, 1e-2]),
)


@few
@given(
    case=cases,
    n=st.sampled_from([4, 3, 2, 5, 1]),
    how=DYNAMIC | st.just(STATIC),
    beta=st.sampled_from([1.0, 0.5, 2**0.5]),
)
@example(case=Case(), n=4, how=(True, True, "layernorm", None), beta=1.0)
@example(case=Case(), n=4, how=(True, True, "rmsnorm", 1e-2), beta=1.0)
@example(case=Case(), n=2, how=(True, False, "unweighted", None), beta=1.0)
@example(case=Case(), n=3, how=STATIC, beta=1.0)
def test_hyper(case, n, how, beta):
    dynamic, tanh, stats, eps = how
    spec = (
        f"hyper(streams={n}, dynamic={dynamic}, tanh={tanh}, stats={stats!r}, beta={beta!r}, "
        f"eps={eps})"
    )
    check(spec, hyper(n, dynamic, tanh, stats, eps), case)
    for site in Network(spec, case, perturbed=False).sites[:-1]:
        assert site.static_beta.tolist() == pytest.approx([beta] * n, rel=1e-6)


@pytest.mark.parametrize("frozen", ["B", "WC", "B WC"])
@few
@given(case=cases, n=st.sampled_from([4, 3, 2, 1]))
def test_frozen_hyper(frozen, case, n):
    spec = f"hyper(streams={n}, frozen={frozen!r})"
    check(spec, hyper(n), case)
    parts = {"B": "_beta", "WC": "_alpha"}
    for site in Network(spec, case).sites[:-1]:
        for name, p in site.named_parameters(recurse=False):
            assert p.requires_grad == (
                not any(parts[f] in name for f in frozen.split()) and len(frozen) < 4
            )


def sequential(n: int) -> list:
    """Eq. 42: n equal networks with a residual around every sub-layer."""
    return [[0, *[1] * n], *([int(s == 0), *[int(s == c) for c in range(n)]] for s in range(n))]


def in_parallel(n: int) -> list:
    """Eq. 54 and 55 in turn: every n sub-layers side by side.

    Slot i of Eq. 55 counts from 0, as in Eq. 19.
    """
    first = [[0, *[int(c == 0) for c in range(n)]], *([1] * (n + 1) for _ in range(n))]
    others = [
        [
            [0, *[int(c == i) for c in range(n)]],
            *([int(s == i), *[int(s == c) for c in range(n)]] for s in range(n)),
        ]
        for i in range(1, n)
    ]
    return [first, *others]


def test_the_papers_matrices():
    assert sequential(2) == [[0, 1, 1], [1, 1, 0], [0, 0, 1]]  # Eq. 17
    odd, even = in_parallel(2)
    assert odd == [[0, 1, 0], [1, 1, 1], [1, 1, 1]]  # Eq. 18
    assert even == [[0, 0, 1], [0, 1, 0], [1, 0, 1]]  # Eq. 19


@few
@given(case=cases, n=st.sampled_from([4, 3, 2, 1]))
@example(case=Case(), n=2)
def test_hyper_arranged_one_after_the_other(case, n):
    """Section 3.2: n copies of the plain residual stack, whose sum the final norm reads."""
    net = Network(
        f"hyper(streams={n}, dynamic=False, matrix={sequential(n)})", case, perturbed=False
    )

    def plain(x: Tensor) -> Tensor:
        for k in range(net.depth):
            x = x + net.F(k, x)
        return net.final(n * x)

    x = torch.randn(case.batch, case.tokens, case.dim, dtype=torch.float64)
    torch.testing.assert_close(net.run(x), plain(x), rtol=1e-9, atol=1e-10)


@few
@given(case=cases, n=st.integers(1, 3), groups=st.integers(1, 3))
@example(case=Case(), n=2, groups=2)
def test_hyper_arranged_side_by_side(case, n, groups):
    """Eq. 53: h ← Σ_i (T_i(h) + h) over each n sub-layers.

    The first group reads the sum of the n copies.
    """
    case = case._replace(parallel=True, layers=n * groups)
    net = Network(
        f"hyper(streams={n}, dynamic=False, matrix={in_parallel(n)})", case, perturbed=False
    )

    def side_by_side(x: Tensor) -> Tensor:
        h = n * x
        for group in range(groups):
            h = sum(net.F(group * n + i, h) + h for i in range(n))
        return net.final(h)

    x = torch.randn(case.batch, case.tokens, case.dim, dtype=torch.float64)
    torch.testing.assert_close(net.run(x), side_by_side(x), rtol=1e-9, atol=1e-10)


@few
@given(case=cases, n=st.sampled_from([3, 2, 1]))
def test_hyper_from_a_matrix(case, n):
    """A perturbed start is not special: the matrix says where the static part begins, no more."""
    check(f"hyper(streams={n}, matrix={in_parallel(n)})", hyper(n), case)


def frac(m: int, dynamic: bool, tanh: bool) -> Loop:
    def loop(net: Network, x: Tensor) -> Tensor:
        D = net.case.dim // m
        H = [x[..., s * D : (s + 1) * D] for s in range(m)]
        for k, site in enumerate(net.sites[:-1]):
            alpha, beta = alpha_and_beta(site, H, dynamic, tanh, "layernorm")
            mix = [sum(alpha[s][c] * H[s] for s in range(m)) for c in range(2 * m)]
            y = net.F(k, torch.cat(mix[:m], -1))
            H = [beta[s] * y[..., s * D : (s + 1) * D] + mix[m + s] for s in range(m)]
        return net.final(torch.cat(H, -1))

    return loop


loop_of("frac")(frac(2, dynamic=True, tanh=True))


FRAC_KINDS = st.sampled_from([(True, True), (True, False), (False, True)])  # dynamic, tanh


@few
@given(case=cases, m=st.sampled_from([2, 3, 4, 1]), width=st.integers(1, 3), how=FRAC_KINDS)
@example(case=Case(), m=2, width=3, how=(True, True))
@example(case=Case(), m=4, width=2, how=(False, True))
def test_frac(case, m, width, how):
    check(
        f"frac(fractions={m}, dynamic={how[0]}, tanh={how[1]})",
        frac(m, *how),
        case._replace(dim=m * width),
    )


def test_frac_starts_with_every_fraction_on_its_own():
    for site in Network("frac(fractions=3)", Case(), perturbed=False).sites[:-1]:
        assert torch.equal(site.static_alpha, torch.eye(3).double().repeat(1, 2))
        assert site.static_beta.tolist() == [1.0] * 3 and not site.dynamic_alpha_fn.any()


# ---- manifold-constrained


class MHCOptions(NamedTuple):
    """mHC's options."""

    streams: int = 4
    iterations: int = 20
    orientation: str = "src dst"
    order: str = "src last"
    readout: str = "head"
    residual: str = "sinkhorn"
    single_pass: bool = False
    eps: float = 1e-6
    norm_eps: float = 1e-6
    magnitude: float = 2.0
    post_eps: float = 0.0

    @property
    def spec(self) -> str:
        return f"mhc({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})"


def doubly(logits: list[list[Tensor]], iterations: int, eps: float) -> list[list[Tensor]]:
    """Sinkhorn of logits[row][column]: softmax over the columns, then over rows, columns, rows …"""
    n = range(len(logits))
    M = [[e + eps for e in softmax(row)] for row in logits]
    for turn in range(iterations):
        if turn:
            M = [[M[r][c] / (sum(M[r]) + eps) for c in n] for r in n]
        M = [[M[r][c] / (sum(M[i][c] for i in n) + eps) for c in n] for r in n]
    return M


def mhc(o: MHCOptions) -> Loop:
    n = o.streams

    def logits(site: crosslayer.Connection, H: list[Tensor]) -> list[Tensor]:
        """Every row of fn, with its scale and base."""
        v = torch.cat(H, -1)
        norm = 1 / ((v * v).mean(-1, keepdim=True) + o.norm_eps).sqrt()
        part = [i for i, size in enumerate((n, n, n * n)) for _ in range(size)]
        return [
            dot(v, row) * norm * site.scale[part[i]] + site.base[i] for i, row in enumerate(site.fn)
        ]

    def residual(z: list[Tensor]) -> list[list[Tensor]]:
        """R[src][dst]."""
        if o.residual == "identity":
            return [[float(s == d) for d in range(n)] for s in range(n)]
        laid = {"src dst": lambda s, d: z[s * n + d], "dst src": lambda s, d: z[d * n + s]}[
            o.orientation
        ]
        if o.order == "src last":
            return doubly([[laid(s, d) for d in range(n)] for s in range(n)], o.iterations, o.eps)
        M = doubly([[laid(s, d) for s in range(n)] for d in range(n)], o.iterations, o.eps)
        return [[M[d][s] for d in range(n)] for s in range(n)]

    def collapse(H: list[Tensor], pre: list[Tensor]) -> Tensor:
        return sum(p * h for p, h in zip(pre, H, strict=True))

    def loop(net: Network, x: Tensor) -> Tensor:
        H, before = [x] * n, [1.0] + [0.0] * (n - 1)
        for k, site in enumerate(net.sites[:-1]):
            z = logits(site, H)
            pre = [sigmoid(z[s]) + o.eps for s in range(n)]
            post = [o.magnitude * sigmoid(z[n + s]) + o.post_eps for s in range(n)]
            R = residual(z[2 * n :])
            y = net.F(k, collapse(H, before if o.single_pass else pre))
            H = [post[d] * y + sum(R[s][d] * H[s] for s in range(n)) for d in range(n)]
            before = pre
        if o.single_pass:
            return net.final(collapse(H, before))
        if o.readout == "head":
            z = logits(net.sites[-1], H)
            return net.final(collapse(H, [sigmoid(z[s]) + o.eps for s in range(n)]))
        return net.final(sum(H) if o.readout == "sum" else sum(H) / n)

    return loop


loop_of("mhc")(mhc(MHCOptions()))


def without_idle_options(options: MHCOptions) -> MHCOptions:
    if options.residual == "sinkhorn":
        return options
    return options._replace(iterations=20, orientation="src dst", order="src last")


mhc_options = st.builds(
    MHCOptions,
    streams=st.sampled_from([4, 3, 2, 1]),
    iterations=st.sampled_from([3, 2, 5, 1]),
    orientation=st.sampled_from(["src dst", "dst src"]),
    order=st.sampled_from(["src last", "dst last"]),
    readout=st.sampled_from(["head", "sum", "mean"]),
    residual=st.sampled_from(["sinkhorn", "identity"]),
    single_pass=st.just(False),
    eps=st.sampled_from([1e-6, 1e-3]),
    norm_eps=st.sampled_from([1e-6, 1e-3]),
    magnitude=st.sampled_from([2.0, 1.5]),
    post_eps=st.sampled_from([0.0, 0.1]),
).map(without_idle_options)


@few
@given(case=cases, options=mhc_options)
@example(case=Case(layers=2, seed=1), options=MHCOptions())
@example(
    case=Case(layers=2, seed=1), options=MHCOptions(orientation="dst src", iterations=2, eps=1e-3)
)
@example(case=Case(layers=2, seed=1), options=MHCOptions(order="dst last", iterations=2, eps=1e-3))
@example(case=Case(layers=3, seed=1), options=MHCOptions(residual="identity", readout="mean"))
@example(case=Case(layers=3, seed=1), options=MHCOptions(iterations=1, readout="sum"))
def test_mhc(case, options):
    check(options.spec, mhc(options), case)


@few
@given(case=cases, options=mhc_options)
@example(case=Case(layers=3, seed=1), options=MHCOptions(single_pass=True))
def test_single_pass_mhc(case, options):
    options = options._replace(single_pass=True, readout="head")
    check(options.spec, mhc(options), case)


def mhc_lite(n: int) -> Loop:
    orders = sorted(itertools.permutations(range(n)))

    def loop(net: Network, x: Tensor) -> Tensor:
        H = [x] * n
        for k, site in enumerate(net.sites[:-1]):
            v = torch.cat(H, -1)
            v = v / (v * v).sum(-1, keepdim=True).sqrt() * math.sqrt(v.shape[-1]) * (1 + site.gamma)
            z = [dot(v, column) for column in site.dynamic_alpha_fn.T]
            pre = [sigmoid(site.pre_branch_scale * z[s] + site.static_alpha[s]) for s in range(n)]
            share = softmax(
                [
                    site.residual_scale * z[n + r] + site.static_alpha[n + r]
                    for r in range(len(orders))
                ],
            )
            post = [
                2
                * sigmoid(
                    site.h_post_scale * dot(v, site.dynamic_beta_fn[:, s]) + site.static_beta[s]
                )
                for s in range(n)
            ]
            y = net.F(k, sum(p * h for p, h in zip(pre, H, strict=True)))
            carried = [0.0] * n
            for a, order in zip(share, orders, strict=True):
                for src, dst in enumerate(order):
                    carried[dst] = carried[dst] + a * H[src]
            H = [post[d] * y + carried[d] for d in range(n)]
        return net.final(sum(H))

    return loop


loop_of("mhc_lite")(mhc_lite(4))


@few
@given(case=cases, n=st.sampled_from([3, 2, 1]))
@example(case=Case(layers=2, seed=1), n=4)
def test_mhc_lite(case, n):
    check(f"mhc_lite(streams={n})", mhc_lite(n), case)


# ---- where the streams' methods start


def starts_on_its_own_stream(spec: str) -> None:
    """Sub-layer k, counted from 0, reads stream k mod n at initialisation; nothing is random."""
    for k, site in enumerate(Network(spec, Case(layers=5), perturbed=False).sites[:-1]):
        if spec.startswith("hyper"):
            assert site.static_alpha[:, 0].tolist() == [
                float(s == k % site.n) for s in range(site.n)
            ]
            assert torch.equal(site.static_alpha[:, 1:], torch.eye(site.n).double())
        else:
            pre = (site.base if spec.startswith("mhc(") or spec == "mhc" else site.static_alpha)[
                : site.n
            ]
            assert pre.tolist() == [1.0 if s == k % site.n else -1.0 for s in range(site.n)]
        if spec.startswith("mhc_lite"):
            assert site.static_alpha[site.n :].tolist() == [0.0] + [-8.0] * (
                math.factorial(site.n) - 1
            )
        elif spec.startswith("mhc"):
            assert torch.equal(
                site.base[2 * site.n :].view(site.n, -1), 8 * torch.eye(site.n).double() - 8
            )
            assert site.scale.tolist() == pytest.approx([0.01] * 3)


@pytest.mark.parametrize(
    "spec", ["hyper", "hyper(streams=3)", "mhc", "mhc(streams=3)", "mhc_lite(streams=3)"]
)
def test_each_sublayer_starts_on_its_own_stream(spec):
    starts_on_its_own_stream(spec)


def test_initial_values_of_the_papers():
    norm = lambda port: nn.RMSNorm(256)  # noqa: E731
    site = crosslayer.plan(8)[-1]
    hyper = crosslayer.make("hyper")(crosslayer.plan(8)[3], 256, norm)
    assert hyper.dynamic_alpha_scale.tolist() == pytest.approx([0.01])
    assert hyper.dynamic_beta_scale.tolist() == pytest.approx([0.01])
    mudd = crosslayer.make("mudd(normed=True)")(site, 256, norm)
    assert mudd.W1.std().item() == pytest.approx(256**-0.5, rel=0.1)
    assert mudd.post_norm_weight.tolist() == pytest.approx([1e-3] * 256)


@pytest.mark.parametrize("spec", ["denseformer", "mudd"])
def test_sites_out_of_order_are_refused(spec):
    """A layer is left out of a loop: its output would be missing among the blocks."""
    sites = [crosslayer.make(spec)(site, 6, lambda _: nn.RMSNorm(6)) for site in crosslayer.plan(3)]
    state = sites[0].init(torch.randn(1, 2, 6))
    with pytest.raises(ValueError, match="a connection of layer 2 runs after 1 layers"):
        for site in [*sites[:2], *sites[4:6]]:
            inputs, state = site.read(state)
            state = site.write(state, inputs[0])
