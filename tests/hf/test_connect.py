"""`connect`: the function a connected model starts with, what of the host stays, and clear
errors.
"""

import copy
import gc
import inspect
import sys
import warnings
import weakref

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import crosslayer
from crosslayer import Connection
from crosslayer.class_swap import swap_class
from crosslayer.connection import PRENORM_FUNCTIONS
from crosslayer.hf.config import make_config, make_language_model
from crosslayer.testing.tiny_model import TESTED_SPECS, equal_tensors, perturb_weights
from tests.hf.backbones import (
    FAMILIES,
    METHODS,
    WIRINGS,
    attributes_of,
    build,
    checkpoint,
    connected,
    each_family,
    each_kind,
    equal_lists,
    gradients,
    ids,
    is_refused,
    llama,
    output,
    parametrize_cells,
    starts_bitwise,
    trained,
    without_eps,
)

# Each kind of wiring with every method, and every variant of a method on llama.
STARTS = list(dict.fromkeys([*each_kind(), *(("llama", spec) for spec in TESTED_SPECS)]))
DIFFERS = "changes the outputs of this pretrained model"


@parametrize_cells(STARTS)
def test_starts_with_the_function_of_the_host(family, spec):
    method = crosslayer.make(spec).method
    has_norms_before = family != "olmo2"
    if starts_bitwise(spec):
        plain = trained(family)
        model = crosslayer.connect(copy.deepcopy(plain), spec)
        assert torch.equal(output(model, family), output(plain, family))
    elif method.initial_function in PRENORM_FUNCTIONS and (
        has_norms_before or method.initial_function != "prenorm up to scales"
    ):
        # A mean over sources and a sum over streams are scaled copies of the residual stream: equal
        # as eps → 0.
        plain = without_eps(trained(family))
        model = crosslayer.connect(copy.deepcopy(plain), spec)
        torch.testing.assert_close(output(model, family), output(plain, family), rtol=0, atol=1e-4)
    else:
        # Six layers, so that mgr has gates: with fewer sub-layers than streams it is their mean,
        # like attnres.
        plain = trained(family, num_hidden_layers=6)
        if family == "dit":  # Its final norm has no weight that tells whether it is trained.
            plain.register_to_config(_name_or_path="a checkpoint")
        with pytest.warns(UserWarning, match=DIFFERS):
            model = crosslayer.connect(copy.deepcopy(plain), spec)
        differs = not torch.allclose(output(model, family), output(plain, family), atol=1e-2)
        assert differs, "the method starts as pre-norm, but its class does not say so"


@pytest.mark.parametrize("spec", [spec for spec in METHODS if is_refused("olmo2", spec)])
def test_a_method_that_needs_the_norms_before_sublayers_is_refused(spec):
    message = (
        "applies the norms before sub-layers to its streams, and this family has no such norms"
    )
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(build("olmo2"), spec)


def test_models_that_share_a_config_get_their_own(tmp_path):
    config = llama().config
    first, second, third = (type(llama())(config) for _ in range(3))
    crosslayer.connect(first, "mudd")
    crosslayer.connect(second, "hyper")
    crosslayer.disconnect(first)
    assert second.config.crosslayer == "hyper"
    assert not hasattr(first.config, "crosslayer")
    assert not hasattr(third.config, "crosslayer")
    assert third.config is config
    second.save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, second.eval()(ids()).logits)
    crosslayer.connect(type(llama())(config), "mudd")


def vision_language_config() -> transformers.Gemma3Config:
    vision = transformers.SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text_config = build("gemma3").config.to_dict()
    return transformers.Gemma3Config(text_config=text_config, vision_config=vision.to_dict())


def test_models_of_several_parts_that_share_a_config_get_their_own():
    config = vision_language_config()
    model = transformers.Gemma3ForConditionalGeneration(config)
    crosslayer.connect(model, "mudd")
    assert model.config.text_config is model.model.language_model.config
    assert model.config.text_config.crosslayer == "mudd"
    for part in (config, config.text_config, config.vision_config):
        assert not hasattr(part, "crosslayer")
    again = transformers.Gemma3ForConditionalGeneration(config)
    assert not any(isinstance(module, Connection) for module in again.modules())


def test_the_language_model_of_a_larger_model(tmp_path):
    model = transformers.Gemma3ForConditionalGeneration(vision_language_config()).eval()
    expected = model(ids()).logits
    crosslayer.connect(model.model.language_model, "mudd")
    assert torch.equal(model(ids()).logits, expected)
    perturb_weights(model, 0.05).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


def test_a_model_with_a_connected_part_names_it():
    model = transformers.Gemma3ForConditionalGeneration(vision_language_config())
    crosslayer.connect(model.model.vision_tower, "mudd")
    with pytest.raises(
        ValueError, match=r"model.vision_tower.* is already .* like model.model.language_model, or"
    ):
        crosslayer.connect(model, "hyper")
    crosslayer.connect(model.model.language_model, "hyper")


def test_a_model_around_a_connected_one_changes_no_weights():
    """transformers initialises every module within a new model that is not initialised yet."""
    model = crosslayer.connect(llama(), "mudd", reallocate=True)
    perturb_weights(model, 0.05)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    class Around(transformers.PreTrainedModel):
        _supports_sdpa = True

        def __init__(self, config, inner):
            super().__init__(config)
            self.inner = inner
            self.post_init()

    Around(llama().config, model)
    model.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("training", [False, True])
def test_connections_are_in_the_mode_of_their_host(training):
    model = crosslayer.connect(llama().train(training), "mudd")
    assert {module.training for module in model.modules()} == {training}


def test_surplus_arguments_of_a_layer_are_an_error():
    layer = crosslayer.connect(llama(), "mudd").model.layers[0]
    surplus = [None] * len(layer.argument_names)
    with pytest.raises(TypeError, match=r"takes \d+ arguments, got \d+"):
        layer(torch.zeros(1, 2, 8), *surplus)


def test_only_a_pretrained_model_causes_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = crosslayer.connect(build("llama", num_hidden_layers=6), "mgr")
        model.save_pretrained(tmp_path / "mgr")
        crosslayer.from_pretrained(tmp_path / "mgr")
        crosslayer.connect(trained("llama"), "hyper")
    trained("llama").save_pretrained(tmp_path / "plain")
    loaded = type(llama()).from_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match=f"connecting postnorm {DIFFERS}"):
        crosslayer.connect(loaded, "postnorm")
    # Only the second of these matrices makes the streams differ.
    same, other = "[[0, 1, 1], [1, 1, 0], [0, 0, 1]]", "[[0, 1, 1], [1, 1, 0], [0, 3, 1]]"
    spec = "hyper(streams=2, dynamic=False, matrix=[" + same + ", {}])"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crosslayer.connect(trained("llama"), spec.format(same))
    with pytest.warns(UserWarning, match=DIFFERS):
        crosslayer.connect(trained("llama"), spec.format(other))
    olmo = trained("olmo")  # Its final norm has no weight.
    olmo.config._name_or_path = "a checkpoint"
    with pytest.warns(UserWarning, match=DIFFERS):
        crosslayer.connect(olmo, "postnorm")


def test_connect_within_inference_mode():
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0
    )
    with torch.inference_mode():
        model = transformers.GPT2LMHeadModel(config).eval()
        expected = model(ids()).logits
        assert torch.equal(crosslayer.connect(model, "mudd")(ids()).logits, expected)
    trainable = transformers.GPT2LMHeadModel(config)
    with torch.inference_mode():
        crosslayer.connect(trainable, "mudd")
    trainable(ids()).logits.sum().backward()


def test_a_model_that_skips_layers_in_training_causes_a_warning():
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, layerdrop=0.5,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="skips layers at random .config.layerdrop is 0.5"):
        crosslayer.connect(transformers.OPTModel(config), "prenorm")
    config = transformers.M2M100Config(
        vocab_size=97, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_layerdrop=0.0, decoder_layerdrop=0.5,
    )  # fmt: skip
    decoder = transformers.M2M100Model(config).get_decoder()
    with pytest.warns(UserWarning, match="at random .config.decoder_layerdrop is 0.5"):
        crosslayer.connect(decoder, "prenorm")


@pytest.mark.parametrize("lengths", [(7, 40, 7), (40, 7)])
def test_a_dynamic_rope_is_as_it_was(lengths):
    """It counts the longest input, and `connect` runs it on two tokens."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )  # fmt: skip
    plain = perturb_weights(transformers.LlamaForCausalLM(config).eval(), 0.3)
    plain(torch.arange(40)[None])
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    for length in lengths:
        tokens = torch.arange(length)[None]
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_disconnect_under_another_default_device():
    model = crosslayer.connect(build("llama"), "mudd")
    with torch.device("meta"):
        crosslayer.disconnect(model)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_disconnect_within_autocast():
    """Which would mix the streams in half precision."""
    model = crosslayer.connect(build("llama"), "frac")
    with torch.autocast("cpu", torch.bfloat16):
        crosslayer.disconnect(model)


@parametrize_cells(each_family())
def test_keys_classes_and_paths_of_the_host_stay(family, spec):
    with torch.device("meta"):
        plain = build(family)
        model = connected(family, spec, perturbed=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert plain.state_dict().keys() <= model.state_dict().keys()
    assert all(".connections." in key or ".connection." in key for key in added)
    for name, module in plain.named_modules():
        connected_module = model.get_submodule(name)
        assert isinstance(connected_module, type(module)), name
        assert type(module).__qualname__ == type(connected_module).__qualname__
        assert str(type(module)) == str(type(connected_module))
    for name in (
        "_no_split_modules",
        "_tp_plan",
        "_pp_plan",
        "_skip_keys_device_placement",
        "base_model_prefix",
    ):
        assert getattr(model, name, None) == getattr(plain, name, None), name


@parametrize_cells(each_family())
def test_a_host_checkpoint_loads(family, spec):
    plain = trained(family)
    model = connected(family, spec)
    for connection in model.modules():
        if isinstance(connection, Connection):
            connection.reset_parameters()
    result = model.load_state_dict(plain.state_dict(), strict=False)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert not result.unexpected_keys
    assert set(result.missing_keys) == {key for key in added if ".norms." not in key}
    if starts_bitwise(spec):  # The norms of k and v copy the host's.
        assert torch.equal(output(model, family), output(plain, family))


def test_an_assigned_host_checkpoint_shares_no_memory():
    model = connected("llama", "mudd")
    model.load_state_dict(trained("llama").state_dict(), strict=False, assign=True)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_a_partial_checkpoint_changes_nothing_else():
    model = connected("llama", "mudd")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    partial = {key: value + 1 for key, value in before.items() if "mlp" in key}
    model.load_state_dict(partial, strict=False)
    for key, value in model.state_dict().items():
        assert torch.equal(value, partial.get(key, before[key])), key


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_and_v_have_separate_inputs(family):
    """Each of MUDD's three ways moves the output when it alone is changed."""
    model = connected(family, "mudd")
    before = output(model, family)
    for way in range(3):
        for connection in model.modules():
            if isinstance(connection, Connection) and "q" in connection.ports:
                with torch.no_grad():
                    connection.a[way] += 1
        after = output(model, family)
        assert not torch.allclose(after, before, atol=1e-4)
        before = after


@pytest.mark.parametrize("family", ["phi3", "gpt2", "neox-parallel"])
def test_a_fused_projection_gives_each_port_its_outputs(family):
    from crosslayer.hf.qkv import FusedProjection, QKVInputs

    model = connected(family, "mudd")
    projection = next(m for m in model.modules() if isinstance(m, FusedProjection))
    groups = projection.fused.groups
    xs = [torch.randn(2, 5, 32) for _ in range(3)]
    mixed = projection(QKVInputs(xs)).unflatten(-1, (groups, -1))
    start = 0
    for x, size in zip(xs, projection.fused.sizes, strict=True):
        expected = projection(x).unflatten(-1, (groups, -1))
        share = slice(start, start + size)
        torch.testing.assert_close(mixed[..., share], expected[..., share], rtol=1e-5, atol=1e-5)
        start += size
    assert start == mixed.shape[-1]


def compiled_cells(families: tuple[str, ...]) -> list[tuple[str, str]]:
    """Kinds of wiring × mudd, and llama × hyper; the laws compile every method."""
    return [
        *((family, "mudd") for family in families if family in WIRINGS),
        ("llama", "hyper"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spec"), compiled_cells(FAMILIES))
def test_compiles_to_one_graph(family, spec):
    model = connected(family, spec, num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        output(compiled, family), output(model, family), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_checkpointed_layers_compile_to_one_graph():
    model = connected("llama", "mudd", num_hidden_layers=2).train()
    expected = gradients(model, "llama")
    checkpoint(model, "llama")
    model.config.use_cache = False  # of which transformers would warn, and break the graph
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(model, "llama"), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("family", "spec"), [("llama", "hyper"), ("neox-parallel", "mudd")])
def test_inductor_gives_the_same_gradients(family, spec):
    model = connected(family, spec, num_hidden_layers=2)
    expected = gradients(model, family)
    model.forward = torch.compile(model.forward, fullgraph=True)
    torch.testing.assert_close(gradients(model, family), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mud", r"unknown connection 'mud' \(did you mean 'mudd'\?\)"),
        (
            "mudd(dilatation=2)",
            r"unknown option 'dilatation' of 'mudd' \(did you mean 'dilation'\?\); its options: w",
        ),
        ("mudd(dilation=0)", "dilation must be a whole number of at least 1, got 0"),
        ("mgr(streams=6)", r"Eq. 14 has no bias for 6 streams and 1 gated sub-layers"),
    ],
)
def test_a_wrong_spec_leaves_the_model_unchanged(spec, message):
    model = llama()
    attributes = {name: attributes_of(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    types = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, spec)
    assert keys == list(model.state_dict())
    assert types == [type(module) for module in model.modules()]
    assert attributes == {name: attributes_of(module) for name, module in model.named_modules()}
    assert not hasattr(model.config, "crosslayer")


@pytest.mark.parametrize("damage", ["a warning", "an error"])
def test_an_error_halfway_leaves_the_model_unchanged(damage, monkeypatch):
    model = trained("llama")
    if damage == "an error":
        monkeypatch.delattr(sys.modules["crosslayer.hf.connect"], "scale_output_weights")

    def snapshot() -> list:
        parts = [*model.modules(), model.config]
        return [[type(part) for part in parts], [attributes_of(part) for part in parts]]

    before = snapshot()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    error, spec = {
        "a warning": (UserWarning, "hyper(output_scale='1/n')"),
        "an error": (NameError, "mudd"),
    }[damage]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error):
            crosslayer.connect(model, spec)
    assert snapshot() == before
    assert equal_tensors(dict(model.named_parameters()), weights)


def test_the_signature_is_the_hosts():
    for family in ("llama", "vit"):
        plain, model = (m.base_model.forward for m in (build(family), connected(family, "mudd")))
        assert inspect.signature(model) == inspect.signature(plain)


@pytest.mark.parametrize("spec", filter(starts_bitwise, METHODS))
def test_fewer_layers_than_were_built(spec):
    """What assisted decoding with an early exit does."""
    plain = trained("llama")
    model = crosslayer.connect(copy.deepcopy(plain), spec)
    plain.config.num_hidden_layers = model.config.num_hidden_layers = 2
    assert torch.equal(output(model, "llama"), output(plain, "llama"))
    states = model(ids(), output_hidden_states=True).hidden_states
    expected = plain(ids(), output_hidden_states=True).hidden_states
    assert equal_lists(states, expected)


def test_a_model_without_layers_of_one_width_is_refused():
    from transformers import ResNetConfig, ResNetModel

    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    message = "cannot connect 'resnet': ResNetModel has no stream of one width"
    with pytest.raises(ValueError, match=message) as error:
        crosslayer.connect(model, "mudd")
    assert "write the loop (docs/concepts.md)" in str(error.value)


def test_models_that_cannot_be_connected():
    with pytest.raises(ValueError, match="cannot read the connection None"):
        crosslayer.connect(llama(), None)
    with pytest.raises(ValueError, match=r"'Linear': it has no list of layers; build it with"):
        crosslayer.connect(torch.nn.Linear(2, 2), "mudd")
    model = crosslayer.connect(llama(), "mudd(dilation=2)")
    with pytest.raises(ValueError, match=r"already connected, with 'mudd\(dilation=2\)'"):
        crosslayer.connect(model, "hyper")
    with pytest.raises(ValueError, match="cannot widen this model's MLPs"):
        crosslayer.connect(build("mixtral"), "mudd", reallocate=True)


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.self_attn"])
def test_a_part_of_another_connected_model_is_left_as_it_is(part):
    first, second = llama(), llama()
    second.set_submodule(part, first.get_submodule(part))
    crosslayer.connect(first, "mudd")
    before = first(ids()).logits
    with pytest.raises(ValueError, match=r"layers\.1\S* belongs to another model, which is conn"):
        crosslayer.connect(second, "hyper")
    assert torch.equal(first(ids()).logits, before)


def test_an_epsilon_beside_small_embeddings():
    """The numbers of docs/concepts.md."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(512, (2, 64))
    expected = plain(tokens).logits
    for spec, most in [("attnres", 1e-2), *((name, 4e-4) for name in ("hyper", "mhc", "altup"))]:
        logits = crosslayer.connect(copy.deepcopy(plain), spec)(tokens).logits
        assert 0 < (logits - expected).std() / expected.std() < most


@torch.no_grad()
def test_a_bfloat16_model_changes_by_its_rounding():
    """As docs/concepts.md says. The tolerance is twice the model's own error in bfloat16."""
    exact = llama()
    torch.manual_seed(0)
    for parameter in exact.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    plain = copy.deepcopy(exact).bfloat16()
    expected = plain(ids()).logits.float()
    rounding = (expected - exact(ids()).logits).abs().max()
    changes = {}
    for spec in ("mudd", "denseformer", "mhc", "attnres", "altup"):
        logits = crosslayer.connect(copy.deepcopy(plain), spec)(ids()).logits.float()
        changes[spec] = (logits - expected).abs().max()
    assert changes["mudd"] == changes["denseformer"] == 0
    assert 0 < max(changes.values()) < 2 * rounding


def test_a_spec_object_connects_like_its_string():
    spec = crosslayer.make("mudd", dilation=2)
    model = crosslayer.connect(llama(), spec)
    assert model.config.crosslayer == model.model.connection_spec == "mudd(dilation=2)"
    same = crosslayer.connect(llama(), "mudd(dilation=2)")
    assert torch.equal(model(ids()).logits, same(ids()).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox-parallel", "gemma3"])
def test_the_config_alone_builds_a_connected_model(family):
    model = connected(family, "hyper(streams=2)", perturbed=False)
    again = type(build(family))(model.config)
    assert any(isinstance(m, Connection) for m in again.modules())


class TestDisconnect:
    @parametrize_cells([pair for pair in each_family() if starts_bitwise(pair[1])])
    def test_an_untrained_connection(self, family, spec):
        plain = trained(family)
        model = crosslayer.disconnect(crosslayer.connect(copy.deepcopy(plain), spec))
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        attributes = {name: vars(module).keys() for name, module in model.named_modules()}
        assert attributes == {name: vars(module).keys() for name, module in plain.named_modules()}
        assert model.state_dict().keys() == plain.state_dict().keys()
        bodies = [getattr(m, "base_model", m) for m in (model, plain)]
        for part, plain_part in ((model, plain), bodies):
            kept, plain_kept = (
                set(getattr(p, "_keep_in_fp32_modules_strict", None) or ())
                for p in (part, plain_part)
            )
            assert kept == plain_kept
            plans = [getattr(p, "_fsdp_plan", None) for p in (part, plain_part)]
            assert plans[0] == plans[1]
        assert "crosslayer" not in dict(vars(model.config) if family != "dit" else model.config)
        assert torch.equal(output(model, family), output(plain, family))
        crosslayer.connect(model, "hyper")

    @pytest.mark.parametrize(
        "spec", [m for m in METHODS if m not in ("prenorm", "postnorm", "resi_dual")]
    )
    def test_a_trained_connection_is_refused(self, spec):
        model = connected("llama", spec, num_hidden_layers=6)
        expected = output(model, "llama")
        message = "does not compute the plain residual: a sub-layer's input"
        with pytest.raises(ValueError, match=message):
            crosslayer.disconnect(model)
        assert torch.equal(output(model, "llama"), expected)

    def test_one_changed_weight_of_a_norm_is_refused(self):
        model = crosslayer.connect(llama(), "mudd")
        with torch.no_grad():
            model.model.layers[1].connections[0].norms[2].weight[3] += 1e-3
        with pytest.raises(ValueError, match="does not compute the plain"):
            crosslayer.disconnect(model)

    def test_nan_is_refused(self):
        model = crosslayer.connect(llama(), "mudd")
        model.model.layers[1].connections[0].W2.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="does not compute the plain"):
            crosslayer.disconnect(model)

    def test_a_difference_within_the_tolerance_is_accepted(self):
        model = crosslayer.connect(llama(), "hyper")
        expected = output(model, "llama")
        with pytest.raises(ValueError, match=r"differs by up to .*, and the tolerance is 0"):
            crosslayer.disconnect(model)
        plain = crosslayer.disconnect(model, 1e-4)
        torch.testing.assert_close(output(plain, "llama"), expected, rtol=0, atol=1e-3)

    def test_the_language_model_of_a_larger_model(self):
        model = transformers.Gemma3ForConditionalGeneration(vision_language_config())
        crosslayer.disconnect(crosslayer.connect(model, "mudd"))
        assert not hasattr(model.config.text_config, "crosslayer")

    @pytest.mark.parametrize(
        ("family", "key", "message"),
        [
            ("llama", {"crosslayer_rope": "bfloat16"}, "RoPE table is rounded"),
            ("neox-parallel", {"crosslayer_qk_norm": True}, "attention norms q and k"),
        ],
    )
    def test_what_a_plain_config_cannot_express(self, family, key, message):
        config = build(family).config
        config.update({"crosslayer": "prenorm", **key})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=f"{message}, which the plain model's config cannot"):
            crosslayer.disconnect(model)

    def test_models_that_cannot_be_disconnected(self):
        with pytest.raises(ValueError, match="is not connected"):
            crosslayer.disconnect(llama())
        stack = crosslayer.Stack("prenorm", [torch.nn.Linear(8, 8)] * 4, dim=8)
        with pytest.raises(ValueError, match="this Stack is not connected"):
            crosslayer.disconnect(stack)
        wrapped = torch.nn.DataParallel(crosslayer.connect(llama(), "prenorm"))
        with pytest.raises(ValueError, match="disconnect before DataParallel wraps the model"):
            crosslayer.disconnect(wrapped)
        with pytest.raises(ValueError, match="tolerance must be a number of at least 0, got -1"):
            crosslayer.disconnect(crosslayer.connect(llama(), "prenorm"), tolerance=-1)
        with pytest.raises(ValueError, match="MLP widths differ between layers"):
            crosslayer.disconnect(crosslayer.connect(llama(), "prenorm", reallocate=True))
        with torch.device("meta"):
            model = crosslayer.connect(llama(), "mudd")
        with pytest.raises(ValueError, match="no weights yet"):
            crosslayer.disconnect(model)


@pytest.mark.parametrize(
    ("family", "key", "message"),
    [
        ("llama", "tie_word_embedding", r"did you mean 'tie_word_embeddings'\?"),
        ("gpt_neox", "rope_theta", "gpt_neox has no config key 'rope_theta'"),
        ("llama", "crosslayer", "llama has no config key 'crosslayer'"),
        ("llama", "return_dict", "return_dict must be true"),
    ],
)
def test_an_unknown_key_of_a_config(family, key, message):
    """transformers would keep it and do nothing with it."""
    with pytest.raises(ValueError, match=message) as error:
        make_config(family, 2, 32, 2, 97, {key: 1})
    assert "\n" not in str(error.value)
    assert (
        make_config("llama", 2, 32, 2, 97, {"rope_theta": 5.0}).rope_parameters["rope_theta"] == 5
    )


def test_granite_of_sizes_is_llama_with_multiplied_embeddings():
    """Its own factors of 1 neither scale attention nor multiply embeddings."""
    llama = make_language_model(make_config("llama", 2, 32, 2, 97))
    granite = make_language_model(make_config("granite", 2, 32, 2, 97))
    granite.load_state_dict(llama.state_dict())
    with torch.no_grad():
        llama.get_input_embeddings().weight.mul_(50)
        assert 0.9 < llama.get_input_embeddings().weight.std() < 1.1
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(granite(tokens).logits, llama(tokens).logits, rtol=0, atol=0)
    factors = {"attention_multiplier": 0.5, "embedding_multiplier": 12.0}
    given = make_config("granite", 2, 32, 2, 97, factors)
    assert factors == {name: getattr(given, name) for name in factors}
    wide = make_config("granite", 2, 32, 2, 97, {"initializer_range": 0.04})
    assert wide.embedding_multiplier == 25
    assert not hasattr(make_config("llama", 2, 32, 2, 97), "attention_multiplier")


def test_factors_of_a_trained_model_stay():
    """They are the defaults of Granite's text model of documents, not 1."""
    family = "granite_docling_text"
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    docling = make_config(family, 2, 32, 2, 97)
    assert docling.embedding_multiplier == type(docling)().embedding_multiplier != 1


@pytest.mark.parametrize("change", ["added", "removed"])
def test_layers_that_change_after_connect(change):
    model = connected("llama", "hyper")
    if change == "added":
        model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    else:
        del model.model.layers[1]
    model.config.num_hidden_layers = len(model.model.layers)
    with pytest.raises(ValueError, match="connect a model once its layers are final"):
        model(ids(), use_cache=False)


def test_an_argument_given_twice_is_refused():
    model = crosslayer.connect(llama(), "hyper")
    with pytest.raises(TypeError, match="got the argument 'input_ids' by its position and by its"):
        model.model(ids(), input_ids=ids())
    layer, hidden = model.model.layers[0], model.get_input_embeddings()(ids())
    with pytest.raises(TypeError, match="got the argument 'attention_mask' by its position and"):
        layer(hidden, None, attention_mask=None)


def test_a_class_of_a_cell_is_freed():
    """A notebook defines a class again whenever its cell runs."""

    def connect_in_a_cell() -> weakref.ref:
        model = transformers.LlamaModel(make_config("llama", layers=1, dim=16, heads=2, vocab=32))

        class Backbone(transformers.LlamaModel):
            pass

        model.__class__ = Backbone
        crosslayer.connect(model, "mudd")
        return weakref.ref(Backbone)

    known = connect_in_a_cell()
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("spec", ["hyper", "mgr", "denseformer"])
def test_parameters_do_not_depend_on_torchs_default_dtype(spec):
    config = make_config("llama", layers=2, dim=16, heads=2, vocab=97)
    plain = transformers.LlamaModel(config).eval()
    expected = crosslayer.connect(copy.deepcopy(plain), spec)(ids())
    torch.set_default_dtype(torch.float64)
    try:
        model = crosslayer.connect(plain, spec)
        dtypes = {p.dtype for p in model.parameters()}
        found = model(ids())
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes == {torch.float32}
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)


def test_modules_whose_first_base_is_no_module():
    """As optimum-quanto's are. Python cannot give them a class with another first base."""

    class Quantised:
        __slots__ = ()

    class QuantisedLinear(Quantised, torch.nn.Linear):
        pass

    class Mixin:
        pass

    modules = [QuantisedLinear(2, 2) for _ in range(2)]
    for module in modules:
        swap_class(module, Mixin)
    assert isinstance(modules[0], Mixin) and type(modules[0]) is type(modules[1])
