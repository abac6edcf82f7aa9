"""The methods that transformers ships, against its own classes.

These classes cast everything to float32. Here their `.float()` gives float64, so that the tolerance
can be 1e-9. The decoder layers are theirs too, with their attention and MLP replaced.
"""

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import crosslayer
from crosslayer.connections.attnres import Values
from crosslayer.connections.mhc import Manifold
from crosslayer.ops import depth_scores, write_norm_project
from crosslayer.testing.tiny_model import perturb_weights
from tests import test_laws as laws
from tests.support.chain import sublayer

B, T, D, LAYERS = 2, 3, 10, 3


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


def shipped(model: str) -> types.ModuleType:
    return pytest.importorskip(
        f"transformers.models.{model}.modeling_{model}",
        reason=f"this version of transformers has no {model}",
    )


def config(n: int = 4, **own: object) -> types.SimpleNamespace:
    shared = {
        "hc_mult": n,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_size": D,
        "_attn_implementation": "sdpa",  # "eager" has a softmax in float32
    }
    return types.SimpleNamespace(**(shared | own))


def chain(spec: str) -> list[crosslayer.Connection]:
    make = crosslayer.make(spec)
    sites = [make(site, D, lambda port: nn.Identity()).double() for site in crosslayer.plan(LAYERS)]
    for k, site in enumerate(sites):
        perturb_weights(site, 0.3 + 0.05 * k)
        if getattr(site, "base", None) is not None:
            nn.init.normal_(
                site.base
            )  # R starts all but the identity, where its orientation would not show
    return sites


def given(module: nn.Module, **weights: Tensor) -> nn.Module:
    """The module with these weights, and all of its own among them."""
    module.double()  # some of their weights are float32 whatever the default is
    assert {n for n, _ in module.named_parameters()} == weights.keys()
    for name, w in weights.items():
        getattr(module, name).data.copy_(w.detach())
    return module


def mixers(module_class: Callable, site: crosslayer.Connection, **own: object) -> nn.Module:
    return given(module_class(config(site.n, **own)), fn=site.fn, base=site.base, scale=site.scale)


def hollow(layer_class: type, **parts: object) -> nn.Module:
    """A decoder layer of theirs whose parts are these."""
    layer = layer_class.__new__(layer_class)
    nn.Module.__init__(layer)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def run(sites: list[crosslayer.Connection], x: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden state and streams."""
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        (h,), state = site.read(state)
        state = site.write(state, sublayer(k, h))
    (out,), state = sites[-1].read(state)
    return out, state.H


def decoder(
    layer_class: type,
    hc_class: Callable,
    sites: list[crosslayer.Connection],
    l: int,
    attention: Callable,
) -> nn.Module:
    """A decoder layer of theirs, without its attention and MLP: the streams through layer l."""
    return hollow(
        layer_class,
        attn_hc=mixers(hc_class, sites[2 * l]),
        ffn_hc=mixers(hc_class, sites[2 * l + 1]),
        input_layernorm=nn.Identity(),
        post_attention_layernorm=nn.Identity(),
        self_attn=lambda x=None, hidden_states=None, **_: attention(
            sublayer(2 * l, hidden_states if x is None else x)
        ),
        mlp=lambda x, **_: sublayer(2 * l + 1, x),
        block_type="linear_attention",
    )


def compare_chain(
    sites: list[crosslayer.Connection], decoders: list, head: Callable[[Tensor], Tensor]
) -> None:
    """Streams, readout, and the gradients of the input and of every mixer."""
    ours, theirs = (
        torch.randn(B, T, D, generator=torch.Generator().manual_seed(4)).requires_grad_()
        for _ in range(2)
    )
    out, streams = run(sites, ours)
    H = theirs[:, :, None].expand(B, T, sites[0].n, D).contiguous()
    for layer in decoders:
        H = layer(H)
        H = H[0] if isinstance(H, tuple) else H
    close(streams, H)
    close(out, head(H))
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    head(H).backward(cotangent)
    close(ours.grad, theirs.grad)
    for l, layer in enumerate(decoders):
        for site, hc in ((sites[2 * l], layer.attn_hc), (sites[2 * l + 1], layer.ffn_hc)):
            for name in ("fn", "base", "scale"):
                close(getattr(site, name).grad, getattr(hc, name).grad)


def close(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype == torch.float64
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


MHC = {"deepseek_v4": "DeepseekV4HyperConnection", "glm5_next": "Glm5NextTextHyperConnection"}


@pytest.mark.parametrize("model", MHC)
@pytest.mark.parametrize("n", [2, 4])
def test_mhc_coefficients(model, n):
    hc = getattr(shipped(model), MHC[model])
    site = chain(f"mhc(streams={n})")[1]
    H = torch.randn(B, T, n, D)
    post, comb, collapsed = mixers(hc, site)(H)
    (h,), state = site.read(Manifold(H))
    close(h, collapsed)
    close(state.post, post)
    close(state.H, torch.einsum("btij,btid->btjd", comb, H))
    _, _, logits = site.logits(
        write_norm_project(H, None, None, site.fn.mT, site.norm_eps)[1][..., 0, :]
    )
    close(site.residual_matrix(logits), comb)
    if n == 2:
        return  # every doubly stochastic matrix of two streams is symmetric
    transposed = chain(f"mhc(streams={n}, orientation='dst src')")[1]
    assert (transposed.residual_matrix(logits) - comb).abs().max() > 1e-2, (
        "the orientation must show in these numbers"
    )


def test_mhc_of_deepseek_v4():
    """Two decoder layers' wiring and the learned head."""
    theirs, sites = shipped("deepseek_v4"), chain("mhc")
    head = given(
        theirs.DeepseekV4HyperHead(config()),
        hc_fn=sites[-1].fn,
        hc_base=sites[-1].base,
        hc_scale=sites[-1].scale,
    )
    layers = [
        decoder(
            theirs.DeepseekV4DecoderLayer,
            theirs.DeepseekV4HyperConnection,
            sites,
            l,
            lambda y: (y, None),
        )
        for l in range(LAYERS)
    ]
    compare_chain(sites, layers, head)
    for ours, name in (("fn", "hc_fn"), ("base", "hc_base"), ("scale", "hc_scale")):
        close(getattr(sites[-1], ours).grad, getattr(head, name).grad)


def test_mhc_of_glm_5():
    """As DeepSeek-V4's, but that the streams' mean is read out."""
    theirs, sites = shipped("glm5_next"), chain("mhc(readout='mean')")
    layers = [
        decoder(
            theirs.Glm5NextTextDecoderLayer,
            theirs.Glm5NextTextHyperConnection,
            sites,
            l,
            lambda y: y,
        )
        for l in range(LAYERS)
    ]
    compare_chain(sites, layers, theirs.Glm5NextTextHyperHead())


@pytest.mark.parametrize("model", ["glm5_next", "hy_v4"])
def test_released_models_have_two_eps(model):
    """The configurations' defaults: 1e-5 for the norm, 1e-6 for the gates.

    The difference shows where the streams are small.
    """
    hc = getattr(
        shipped(model),
        {"glm5_next": "Glm5NextTextHyperConnection", "hy_v4": "HYV4HyperConnection"}[model],
    )
    residual = "sinkhorn" if model == "glm5_next" else "identity"
    H = torch.randn(B, T, 4, D) * 3e-3
    for norm_eps in (1e-6, 1e-5):
        site = chain(f"mhc(residual={residual!r}, norm_eps={norm_eps})")[1]
        for rms_norm_eps in (1e-6, 1e-5):
            *_, collapsed = mixers(hc, site, rms_norm_eps=rms_norm_eps, hc_magnitude=2.0)(H)
            (h,), _ = site.read(Manifold(H))
            assert torch.allclose(h, collapsed, rtol=1e-9, atol=0) == (rms_norm_eps == norm_eps)


@pytest.mark.parametrize("magnitude", [2.0, 1.5])
def test_identity_mhc_of_hy_v4(magnitude):
    """R = I. Their post has a magnitude, 2 in the released configuration, and an eps."""
    theirs, sites = (
        shipped("hy_v4"),
        chain(f"mhc(residual='identity', magnitude={magnitude}, post_eps=1e-6)"),
    )
    site, H, y = sites[1], torch.randn(B, T, 4, D), torch.randn(B, T, D)
    hc = mixers(theirs.HYV4HyperConnection, site, hc_magnitude=magnitude)
    post, collapsed = hc(H)
    (h,), state = site.read(Manifold(H))
    close(h, collapsed)
    close(state.post, post)
    assert torch.equal(state.H, H), "the streams go on as they are"
    layer = hollow(
        theirs.HYV4DecoderLayer,
        attn_hc=lambda H: (post, collapsed),
        ffn_hc=lambda H: (0 * post, collapsed),
        input_layernorm=nn.Identity(),
        post_attention_layernorm=nn.Identity(),
        self_attn=lambda hidden_states, **_: (y, None, None),
        mlp=nn.Identity(),
    )
    written, _ = layer(H)
    _, after = sites[2].read(site.write(state._replace(post=post), y))
    close(after.H, written)

    end = sites[-1]
    head = given(theirs.HYV4HyperHead(config()), hc_fn=end.fn, hc_base=end.base, hc_scale=end.scale)
    close(end.readout(Manifold(H)), head(H))


def test_identity_mhc_of_hy_v4_over_depth():
    theirs, sites = shipped("hy_v4"), chain("mhc(residual='identity', post_eps=1e-6)")
    x = torch.randn(B, T, D)
    H = x[:, :, None].expand(B, T, 4, D)
    for k, site in enumerate(sites[:-1]):
        post, h = mixers(theirs.HYV4HyperConnection, site, hc_magnitude=2.0)(H)
        H = post[..., None] * sublayer(k, h)[:, :, None] + H
    out, streams = run(sites, x)
    close(streams, H)
    end = sites[-1]
    close(
        out,
        given(theirs.HYV4HyperHead(config()), hc_fn=end.fn, hc_base=end.base, hc_scale=end.scale)(
            H
        ),
    )


def test_attention_residual_of_inkling_2():
    """Their scores have 1/√D and no key norm weight, and their values are normalised."""
    theirs = shipped("inkling2")
    site = chain("attnres")[4]
    sources = tuple(torch.randn(B, T, D) * (1 + i) for i in range(4))
    pool = given(
        theirs.Inkling2BlockAttentionResidual(config()), query=site.query * D**0.5 * site.key_norm
    )
    (out,) = pool(torch.stack(sources[:-1], -2), sources[-1])
    unit = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in sources]
    p = depth_scores(sources, site.query * site.key_norm).softmax(-1)
    close(sum(p[..., i, None] * x for i, x in enumerate(unit)), out)

    # of sources that their norm leaves as they are, all of it is the same
    unit = [x * ((1 - 1e-6) / x.square().mean(-1, keepdim=True)).sqrt() for x in sources]
    (h,), _ = site.read(Values(tuple(unit[:-1]), y=unit[-1]))
    close(h, pool(torch.stack(unit[:-1], -2), unit[-1])[0])
    (raw,), _ = site.read(Values(sources[:-1], y=sources[-1]))
    assert (raw - out).abs().max() > 0.1, "raw values must show in these numbers"


@pytest.mark.parametrize("per", [1, 2])
def test_attention_residual_blocks_of_inkling_2(per):
    """Which sums are attended to: their decoder layers, with our pooling and sub-layers."""
    theirs, sites = shipped("inkling2"), chain(f"attnres(block_size={2 * per})")

    def pooling(k: int) -> Callable:
        def pool(blocks: Tensor, partial: Tensor) -> tuple[Tensor]:
            values = (*blocks.unbind(-2), partial)
            return (sites[k].read(Values(values[:-1], y=values[-1]))[0][0],)

        return pool

    def layer(l: int) -> nn.Module:
        return hollow(
            theirs.Inkling2SlidingDecoderLayer,
            is_block_boundary=l % per == 0,
            attention_input=pooling(2 * l) if l else None,
            mlp_input=pooling(2 * l + 1),
            self_attn=lambda hidden_states, **_: (sublayer(2 * l, hidden_states), None),
            mlp=lambda x: sublayer(2 * l + 1, x),
            input_layernorm=nn.Identity(),
            post_attention_layernorm=nn.Identity(),
            post_attention_convolution=lambda x, **_: x,
            post_mlp_convolution=lambda x, **_: x,
        )

    x = torch.randn(B, T, D)
    hidden, blocks = x, x.new_zeros(B, T, 0, D)
    for l in range(LAYERS):
        new = layer(l)(hidden, blocks)
        if l % per == 0:  # as Inkling2TextModel does
            blocks = torch.cat([blocks, hidden.unsqueeze(-2)], -2)
        hidden = new
    out = pooling(2 * LAYERS)(blocks, hidden)[0]

    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        (h,), state = site.read(state)
        state = site.write(state, sublayer(k, h))
    close(sites[-1].readout(state), out)


@pytest.mark.parametrize(
    ("spec", "function"),
    [
        ("mudd(normed='pre', ways='qk v')", "prenorm up to scales"),  # an input is rms(X_l)
        ("mudd(normed='post', ways='qk v')", "prenorm up to scales"),  # an input is 2 X_l
        ("mudd(normed='pre', ways='qk v r')", "other"),
        ("mudd(normed='post', ways='qk v r')", "other"),
        ("hyper(streams=1)", "prenorm"),
        ("hyper(beta=0.5)", "other"),
        ("mgr(streams=9)", "prenorm up to scales"),  # no gates: an input is the mean of all outputs
    ],
)
def test_options_decide_whether_it_starts_as_prenorm(spec, function):
    assert laws.initial_function(spec) == function
    laws.test_starts_as_prenorm_where_it_says_so(spec, False)
