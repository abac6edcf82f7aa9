"""`connect` on every family with every method: the function it starts with, and what of the host stays."""

import copy
import warnings

import pytest
import torch

import crosslayer
from crosslayer import Connection
from tests.hf.backbones import FAMILIES, LANGUAGE, build, ids, llama, output, without_eps
from tests.support.tiny import ARMS, shake

families = pytest.mark.parametrize("family", FAMILIES)
methods = pytest.mark.parametrize("arm", crosslayer.available())
EXACT = {
    "prenorm",
    "skip_gain",
    "denseformer",
    "frac",
    "mudd",
}  # from the first bit; the others up to the eps of a norm
# every option of every method on a sequential and on a parallel body, every method on the others
STARTS = [
    (family, arm)
    for family in FAMILIES
    for arm in (ARMS if family in ("llama", "neox-parallel") else crosslayer.available())
]


def connected(family: str, arm: str, shaken: bool = True, **options) -> torch.nn.Module:
    if family == "olmo2" and crosslayer.make(arm).method.norms_its_stream:
        pytest.skip("refused, as the family has no norm before its sub-layers")
    model = crosslayer.connect(build(family, **options), arm)
    return shake(model, 0.05) if shaken else model


def trained(family: str, **options) -> torch.nn.Module:
    return shake(build(family, **options), 0.05)


@pytest.mark.parametrize(("family", "arm"), STARTS)
def test_starts_where_the_host_is(family, arm):
    factory = crosslayer.make(arm)
    normed = family != "olmo2"  # which norms what its sub-layers put out, not what they read
    if factory.name in EXACT:
        plain = trained(family)
        assert torch.equal(
            output(crosslayer.connect(copy.deepcopy(plain), arm), family), output(plain, family)
        )
    elif factory.method.starts_as_prenorm and (normed or not factory.method.prenorm_up_to_scale):
        # a mean over sources and a sum over streams are scaled copies of the residual stream: equal as eps → 0
        plain = without_eps(trained(family))
        found = output(crosslayer.connect(copy.deepcopy(plain), arm), family)
        torch.testing.assert_close(found, output(plain, family), rtol=0, atol=1e-4)
    elif not normed and factory.method.norms_its_stream:
        with pytest.raises(
            ValueError, match="by the norms before sub-layers, which this family does not have"
        ):
            crosslayer.connect(build(family), arm)
    else:
        # deep enough for mgr to gate: with fewer sub-layers than streams it is their mean, as attnres is
        plain = trained(family, num_hidden_layers=6)
        if family == "dit":  # whose norms have no weights to tell by, as olmo's
            plain.register_to_config(_name_or_path="a checkpoint")
        if family == "olmo":
            plain.config._name_or_path = "a checkpoint"
        with pytest.warns(
            UserWarning, match="what this model has learnt is changed until it is trained on"
        ):
            model = crosslayer.connect(copy.deepcopy(plain), arm)
        found = output(model, family)
        assert not torch.allclose(found, output(plain, family), atol=1e-2), (
            "starts as PreNorm but does not say so"
        )


def test_models_that_shared_a_config_do_not_afterwards(tmp_path):
    config = llama().config
    first, second, third = (type(llama())(config) for _ in range(3))
    crosslayer.connect(first, "mudd")
    crosslayer.connect(second, "hyper")
    crosslayer.disconnect(first)
    assert second.config.crosslayer == "hyper" and not hasattr(first.config, "crosslayer")
    assert not hasattr(third.config, "crosslayer") and third.config is config
    second.save_pretrained(tmp_path)
    assert torch.equal(
        crosslayer.from_pretrained(tmp_path)(ids()).logits, second.eval()(ids()).logits
    )
    crosslayer.connect(type(llama())(config), "mudd")


def test_the_language_model_of_another(tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = build("gemma3").config.to_dict()
    vision = SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    ).to_dict()
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision)
    ).eval()
    expected = whole(ids()).logits
    crosslayer.connect(whole.model.language_model, "mudd")
    assert torch.equal(whole(ids()).logits, expected)
    shake(whole, 0.05).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, whole(ids()).logits)


def test_only_a_trained_model_is_worth_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crosslayer.connect(build("llama", num_hidden_layers=6), "mgr").save_pretrained(
            tmp_path / "mgr"
        )
        crosslayer.from_pretrained(tmp_path / "mgr")
        crosslayer.connect(trained("llama"), "hyper")
        llama().save_pretrained(tmp_path / "plain")
    trained("llama").save_pretrained(tmp_path / "plain")
    loaded = type(llama()).from_pretrained(tmp_path / "plain")
    with pytest.warns(
        UserWarning,
        match="postnorm cannot start as the plain residual that the model was trained with",
    ):
        crosslayer.connect(loaded, "postnorm")


@families
@methods
def test_keys_classes_and_paths_stay(family, arm):
    plain, model = build(family), connected(family, arm, shaken=False)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert plain.state_dict().keys() <= model.state_dict().keys()
    assert all(".connections." in key or ".connection." in key for key in added)
    for name, module in plain.named_modules():
        now = model.get_submodule(name)
        assert isinstance(now, type(module)), name
        assert type(module).__qualname__ == type(now).__qualname__ and str(type(module)) == str(
            type(now)
        )
    for name in (
        "_no_split_modules",
        "_tp_plan",
        "_pp_plan",
        "_skip_keys_device_placement",
        "base_model_prefix",
    ):
        assert getattr(model, name, None) == getattr(plain, name, None), name


@families
@methods
def test_a_host_checkpoint_loads(family, arm):
    plain, model = trained(family), connected(family, arm)
    for connection in model.modules():
        if isinstance(connection, Connection):
            connection.reset_parameters()
    result = model.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert set(result.missing_keys) == {key for key in added if ".norms." not in key}
    if arm in EXACT:  # k's and v's own norms follow the host's
        assert torch.equal(output(model, family), output(plain, family))


def test_a_part_of_a_checkpoint_changes_nothing_else():
    model = connected("llama", "mudd")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    part = {k: v + 1 for k, v in before.items() if "mlp" in k}
    model.load_state_dict(part, strict=False)
    assert all(torch.equal(v, part.get(k, before[k])) for k, v in model.state_dict().items())


@families
@methods
def test_connects_on_the_meta_device(family, arm):
    with torch.device("meta"):
        model = connected(family, arm, shaken=False)
    assert all(p.is_meta for p in model.parameters())


@families
def test_q_k_and_v_are_fed_apart(family):
    """Each of three ways moves the output when it alone is changed."""
    model = connected(family, "mudd")
    before = output(model, family)
    for way in range(3):
        changed = copy.deepcopy(model)
        for connection in changed.modules():
            if isinstance(connection, Connection) and "q" in connection.ports:
                with torch.no_grad():
                    connection.a[way] += 1
        after = output(changed, family)
        assert not torch.allclose(after, before, atol=1e-4)
        before = after


@pytest.mark.parametrize("family", ["phi3", "gpt2", "neox-parallel"])
def test_a_fused_projection_gives_each_port_its_rows(family):
    from crosslayer.hf.qkv import FusedProjection, QKVInputs

    model = connected(family, "mudd")
    projection = next(m for m in model.modules() if isinstance(m, FusedProjection))
    xs = [torch.randn(2, 5, 32) for _ in range(3)]
    wholes = [projection(x).unflatten(-1, (projection.fused.groups, -1)) for x in xs]
    found = projection(QKVInputs(xs)).unflatten(-1, (projection.fused.groups, -1))
    at = 0
    for whole, size in zip(wholes, projection.fused.sizes, strict=True):
        torch.testing.assert_close(
            found[..., at : at + size], whole[..., at : at + size], rtol=1e-5, atol=1e-5
        )
        at += size
    assert at == found.shape[-1]


def compiled_cells(families) -> list:
    """A compile takes seconds: the fast suite has every method on one body, and one method on each kind of body."""
    kinds = ("gemma2", "gpt2", "mixtral", "neox-parallel", "phi3", "dit")
    return [
        pytest.param(
            family,
            arm,
            marks=()
            if family == "llama" or (arm == "mudd" and family in kinds)
            else pytest.mark.slow,
        )
        for family in families
        for arm in crosslayer.available()
    ]


@pytest.mark.parametrize(("family", "arm"), compiled_cells(FAMILIES))
def test_one_graph(family, arm):
    model = connected(family, arm)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        output(compiled, family), output(model, family), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("arm", ["mudd", "hyper"])
@pytest.mark.parametrize("family", ["llama", "neox-parallel", "gpt2"])
def test_inductor(family, arm):
    from test_training import gradients

    model = connected(family, arm)
    expected = gradients(model, family)
    model.forward = torch.compile(model.forward, fullgraph=True)
    torch.testing.assert_close(gradients(model, family), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("mud", r"unknown connection 'mud' \(did you mean 'mudd'\?\)"),
        (
            "mudd(dilatation=2)",
            r"unknown option 'dilatation' of 'mudd' \(did you mean 'dilation'\?\); its options: ways=",
        ),
        ("mudd(dilation=0)", "dilation must be a whole number of at least 1, got 0"),
        ("mgr(streams=6)", r"Eq. 14 has no bias for 6 streams and 1 gated sub-layers"),
    ],
)
def test_a_bad_arm_leaves_the_model_alone(arm, message):
    model = llama()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, arm)
    assert keys == list(model.state_dict()) and types == [type(m) for m in model.modules()]
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert not hasattr(model.config, "crosslayer")


def test_an_unknown_family_is_shown_its_row():
    from transformers import BertConfig, BertModel

    with pytest.raises(
        ValueError, match="does not know the family 'bert'; it knows llama, mistral"
    ) as error:
        crosslayer.connect(
            BertModel(BertConfig(num_hidden_layers=1, vocab_size=9, intermediate_size=9)), "mudd"
        )
    assert 'FAMILIES["bert"] = Family(' in str(error.value)


def test_a_row_adds_a_family():
    """The lines that the error shows, on a model of nobody's library."""
    from crosslayer.hf.connect import FAMILY_TEMPLATE
    from crosslayer.hf.families import FAMILIES as rows

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            host = llama().model
            self.config, self.embed, self.layers, self.norm = (
                host.config,
                host.embed_tokens,
                host.layers,
                host.norm,
            )
            self.config.model_type = "Mine"
            self.rotary = host.rotary_emb

        def forward(self, ids):
            x = self.embed(ids)
            rope = self.rotary(x, torch.arange(ids.shape[1])[None])
            for layer in self.layers:
                x = layer(x, attention_mask=None, position_embeddings=rope)
            return self.norm(x)

    mine = shake(Mine(), 0.05)
    expected = mine(ids())
    with pytest.raises(ValueError, match="does not know the family 'Mine'"):
        crosslayer.connect(mine, "mudd")
    try:
        exec(FAMILY_TEMPLATE.format(name="Mine").replace("\n    ", "\n"))
        assert torch.equal(crosslayer.connect(mine, "mudd")(ids()), expected)
        assert torch.equal(crosslayer.disconnect(mine)(ids()), expected)
    finally:
        rows.pop("Mine", None)


def test_bad_models():
    for nothing in (None, 5):
        with pytest.raises(ValueError, match=f"cannot read the connection {nothing}"):
            crosslayer.connect(llama(), nothing)
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(
        ValueError, match=r"does not know the family 'Linear'; .* call the four verbs"
    ):
        crosslayer.connect(torch.nn.Linear(2, 2), "mudd")
    model = crosslayer.connect(llama(), "mudd(dilation=2)")
    with pytest.raises(ValueError, match=r"connected already, with 'mudd\(dilation=2\)'"):
        crosslayer.connect(model, "hyper")
    cross = GPT2LMHeadModel(
        GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, add_cross_attention=True)
    )
    with pytest.raises(ValueError, match="this model's have cross-attention too"):
        crosslayer.connect(cross, "mudd")
    with pytest.raises(ValueError, match="does not know how to widen this family's MLP"):
        crosslayer.connect(build("mixtral"), "mudd", reallocate=True)


@pytest.mark.parametrize("family", LANGUAGE)
def test_the_config_alone_builds_a_connected_model(family):
    model = connected(family, "hyper(streams=2)", shaken=False)
    again = type(build(family))(model.config)
    assert any(isinstance(m, Connection) for m in again.modules())


class TestDisconnect:
    @families
    @pytest.mark.parametrize("arm", sorted(EXACT))
    def test_at_its_start(self, family, arm):
        plain = trained(family)
        model = crosslayer.disconnect(crosslayer.connect(copy.deepcopy(plain), arm))
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        assert {n: vars(m).keys() for n, m in model.named_modules()} == {
            n: vars(m).keys() for n, m in plain.named_modules()
        }
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert "crosslayer" not in dict(vars(model.config) if family != "dit" else model.config)
        assert torch.equal(output(model, family), output(plain, family))
        crosslayer.connect(model, "hyper")

    def test_what_has_learnt_is_refused(self):
        for arm in crosslayer.available():
            if arm not in ("prenorm", "postnorm", "resi_dual"):
                model = connected("llama", arm, num_hidden_layers=6)
                expected = output(model, "llama")
                with pytest.raises(
                    ValueError,
                    match="another function than the plain residual: a sub-layer's input",
                ):
                    crosslayer.disconnect(model)
                assert torch.equal(output(model, "llama"), expected)

    def test_one_weight_of_a_norm_is_enough(self):
        model = crosslayer.connect(llama(), "mudd")
        with torch.no_grad():
            model.model.layers[1].connections[0].norms[2].weight[3] += 1e-3
        with pytest.raises(ValueError, match="another function"):
            crosslayer.disconnect(model)

    def test_nan_is_another_function(self):
        model = crosslayer.connect(llama(), "mudd")
        model.model.layers[1].connections[0].W2.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="another function"):
            crosslayer.disconnect(model)

    def test_a_tolerance_is_the_callers(self):
        model = crosslayer.connect(llama(), "hyper")
        expected = output(model, "llama")
        with pytest.raises(ValueError, match=r"differs by up to .*, and the tolerance is 0"):
            crosslayer.disconnect(model)
        torch.testing.assert_close(
            output(crosslayer.disconnect(model, 1e-4), "llama"), expected, rtol=0, atol=1e-3
        )

    def test_what_cannot_be_undone(self):
        with pytest.raises(ValueError, match="is not connected"):
            crosslayer.disconnect(llama())
        with pytest.raises(ValueError, match="MLPs have widths of their own"):
            crosslayer.disconnect(crosslayer.connect(llama(), "prenorm", reallocate=True))
        with torch.device("meta"):
            model = crosslayer.connect(llama(), "mudd")
        with pytest.raises(ValueError, match="no weights yet"):
            crosslayer.disconnect(model)
