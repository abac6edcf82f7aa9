"""What else a host returns and accepts: hidden states, attention weights, router logits, attention
kernels.
"""

import copy

import pytest
import torch
import transformers
from torch import nn

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.backbones import (
    LANGUAGE,
    build,
    checkpoint,
    connected,
    each_family,
    equal_lists,
    ids,
    inputs,
    llama,
    output,
    parametrize_cells,
    trained,
)

# Families that record hidden states.
RECORDING = (*LANGUAGE, "vit")


@pytest.mark.parametrize("family", RECORDING)
def test_hidden_states_are_the_hosts_under_prenorm(family):
    plain = trained(family)
    expected = plain(**inputs(family), output_hidden_states=True, output_attentions=False)
    model = crosslayer.connect(plain, "prenorm")
    out = model(**inputs(family), output_hidden_states=True)
    assert len(out.hidden_states) == len(expected.hidden_states) == 4
    assert all(map(torch.equal, out.hidden_states, expected.hidden_states))
    as_tuple = model(**inputs(family), output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[-1][1], expected.hidden_states[1])
    model.config.output_hidden_states = True
    assert torch.equal(model(**inputs(family)).hidden_states[2], expected.hidden_states[2])


@parametrize_cells(each_family(RECORDING))
def test_hidden_states_are_what_the_next_attention_reads(family, spec):
    """Or, where it reads mixtures for q, k and v, the stream that its output joins."""
    model = connected(family, spec)
    out = model(**inputs(family), output_hidden_states=True)
    assert torch.equal(out.logits, output(model, family))
    layers = next(
        m
        for m in model.modules()
        if isinstance(m, torch.nn.ModuleList) and hasattr(m[0], "connections")
    )
    for layer, hidden_state in zip(layers[1:], out.hidden_states[1:], strict=False):
        assert hidden_state.shape == out.hidden_states[0].shape
        read = []
        connection = layer.connections[0]
        if "q" in connection.ports:
            hook = connection.register_forward_hook(lambda _, args, out: read.append(out[1].h))
        else:
            norm = connection.norms[0]
            hook = norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        model(**inputs(family))
        hook.remove()
        assert torch.equal(read[0], hidden_state)


def test_hosts_that_take_a_part_of_recorded_hidden_states():
    config = transformers.LongformerConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, attention_window=[4, 4], max_position_embeddings=32,
    )  # fmt: skip
    longformer = transformers.LongformerModel(config).eval()
    config = transformers.CpmAntConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, dim_head=8,
        dim_ff=48, prompt_length=2, prompt_types=3, segment_types=3,
    )  # fmt: skip
    cpm_ant = transformers.CpmAntModel(config).eval()
    for plain, spec in ((longformer, "postnorm"), (cpm_ant, "prenorm"), (cpm_ant, "mudd")):
        model = crosslayer.connect(copy.deepcopy(plain), spec)
        actual, expected = (m(ids(), output_hidden_states=True) for m in (model, plain))
        assert len(actual.hidden_states) == len(expected.hidden_states)
        for own, host in zip(actual.hidden_states, expected.hidden_states, strict=True):
            assert torch.equal(own, host)


@pytest.mark.parametrize(("is_pre_norm", "spec"), [(True, "prenorm"), (False, "postnorm")])
def test_a_model_that_records_the_layers_of_a_connected_part(is_pre_norm, spec):
    config = transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        conv_dim=(8,), conv_stride=(2,), conv_kernel=(3,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, vocab_size=30,
        do_stable_layer_norm=is_pre_norm, layerdrop=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = perturb_weights(transformers.Wav2Vec2Model(config).eval(), 0.05)
    waves = torch.randn(2, 50)
    expected = model(waves, output_hidden_states=True).hidden_states
    # transformers 5.17 reports all of them for a list too
    expected_selection = model(waves, output_hidden_states=[1]).hidden_states
    crosslayer.connect(model.encoder, spec)
    hidden_states = model(waves, output_hidden_states=True).hidden_states
    assert len(hidden_states) == len(expected) == 4
    assert all(map(torch.equal, hidden_states, expected))
    selection = model(waves, output_hidden_states=[1]).hidden_states
    assert len(selection) == len(expected_selection)
    for state, expected_state in zip(selection, expected_selection, strict=True):
        assert state is expected_state is None or torch.equal(state, expected_state)


def test_a_head_that_asks_for_hidden_states_which_no_layer_can_report_is_told_so():
    config = transformers.DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
    )  # fmt: skip
    model = crosslayer.connect(transformers.DPTForDepthEstimation(config).eval(), "prenorm")
    images = torch.randn(1, 3, 16, 16)
    assert model.base_model(images).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=r"which you or the model's head asks for: .* from DPTMod"):
        model(images)


def test_a_host_that_returns_no_hidden_states_is_told_so():
    class Bare(transformers.LlamaModel):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids, **kwargs).last_hidden_state

    model = crosslayer.connect(Bare(llama().config), "mudd")
    assert model(ids()).shape == (*ids().shape, 32)
    with pytest.raises(ValueError, match="output_hidden_states: Bare returns none"):
        model(ids(), output_hidden_states=True)


def selected_places(model) -> list[int]:
    """Which of all hidden states a model returns when it is asked for the numbers 1 and 2."""
    all_states = model(ids(), output_hidden_states=True).hidden_states
    selection = model(ids(), output_hidden_states=[1, 2]).hidden_states
    selected = [state for state in selection if state is not None]
    return [[torch.equal(state, other) for other in all_states].index(True) for state in selected]


def test_selected_hidden_states():
    """Versions of transformers count them differently."""
    expected = selected_places(build("llama"))
    assert len(expected) == 2
    assert selected_places(connected("llama", "mudd")) == expected


def test_hidden_states_have_gradients_and_survive_checkpointing():
    model = connected("llama", "mudd").train()
    expected = model(ids(), output_hidden_states=True).hidden_states
    checkpoint(model, "llama")
    hidden_states = model(ids(), output_hidden_states=True).hidden_states
    assert equal_lists(hidden_states, expected)
    hidden_states[2].sum().backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
    assert model.model.layers[2].mlp.down_proj.weight.grad is None


@pytest.mark.slow
def test_hidden_states_in_one_graph():
    model = connected("llama", "mudd")
    # The host registers its hooks under a lock, which cannot be compiled: call it once before.
    expected = model(ids(), output_hidden_states=True).hidden_states
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    hidden_states = compiled(ids(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden_states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_layers_compiled_one_by_one():
    model = connected("llama", "mudd")
    expected = model(ids()).logits
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(ids()).logits, expected)
    assert len(graphs) == 3


@pytest.mark.parametrize("family", RECORDING)
def test_attention_weights(family):
    model = trained(family, attn_implementation="eager")
    expected = model(**inputs(family), output_attentions=True).attentions
    crosslayer.connect(model, "mudd")
    found = model(**inputs(family), output_attentions=True).attentions
    assert len(found) == 3
    torch.testing.assert_close(found, expected)


def small_encoder(config_class, encoder_class):
    """An encoder whose layers contain their attention in a module of their own."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    config = config_class(vocab_size=97, attn_implementation="eager", **sizes)
    torch.manual_seed(0)
    return encoder_class(config).eval()


def test_all_outputs_of_an_attention_that_a_layer_returns():
    """LongT5's layers return `(hidden_states,) + attention_output[1:]`, three or two outputs."""
    encoder = small_encoder(transformers.LongT5Config, transformers.LongT5EncoderModel)
    expected = encoder(ids(), output_attentions=True)
    out = crosslayer.connect(encoder, "prenorm")(ids(), output_attentions=True)
    assert len(out.attentions) == 3
    torch.testing.assert_close(out.attentions, expected.attentions)


def test_attentions_that_hooks_of_transformers_do_not_see():
    """T5's hooks are on the module around the attention, which a connected layer does not call."""
    encoder = crosslayer.connect(
        small_encoder(transformers.T5Config, transformers.T5EncoderModel), "mudd"
    )
    with pytest.raises(ValueError, match="records what T5LayerSelfAttention returns"):
        encoder(ids(), output_attentions=True)
    assert encoder(ids(), output_attentions=False).attentions is None
    encoder.set_attn_implementation("sdpa")  # which has no weights to record, connected or not
    assert encoder(ids(), output_attentions=True).attentions == ()


class SeveralOutputs(nn.Linear):
    """A sub-layer that returns its tensor and `count - 1` further ones."""

    count = 2

    def forward(self, x):
        return tuple(super(SeveralOutputs, self).forward(x) * (i + 1) for i in range(self.count))


FURTHER_OUTPUTS = {
    "slice": lambda h, a, m: (h,) + a[1:],  # noqa: RUF005
    "two slices": lambda h, a, m: (h,) + (a[1:] + m[1:]),
    "from the third": lambda h, a, m: (h, *a[2:]),
    "to the third": lambda h, a, m: (h, *a[1:3], None),
    "backwards": lambda h, a, m: (h,) + a[1:][::-1],  # noqa: RUF005
    "starred": lambda h, a, m: (h, *(lambda first, *rest: rest)(*m)),
    "from the last": lambda h, a, m: (h, a[-1]),
}


@pytest.mark.parametrize("form", FURTHER_OUTPUTS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_further_outputs_that_a_layer_returns(form, count, monkeypatch):
    monkeypatch.setattr(SeveralOutputs, "count", count)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_norm, self.mlp_norm = nn.RMSNorm(8), nn.RMSNorm(8)
            self.attn, self.mlp = SeveralOutputs(8, 8), SeveralOutputs(8, 8)

        def forward(self, x):
            a = self.attn(self.attn_norm(x))
            h = x + a[0]
            m = self.mlp(self.mlp_norm(h))
            return FURTHER_OUTPUTS[form](h + m[0], a, m)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.norm = nn.RMSNorm(8)

        def forward(self, x):
            others = []
            for layer in self.layers:
                x, *further = layer(x)
                others += further
            return self.norm(x), others

    model = Model()
    x = torch.randn(2, 5, 8)
    expected, expected_others = model(x)
    if form == "from the last":
        with pytest.raises(ValueError, match="counts the outputs of attn from the last one"):
            crosslayer.connect(model, "prenorm")
        return
    out, others = crosslayer.connect(model, "prenorm")(x)
    torch.testing.assert_close(out, expected)
    assert len(others) == len(expected_others)
    assert all(a is b or torch.allclose(a, b) for a, b in zip(others, expected_others, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_router_logits(family):
    model = trained(family)
    expected = model(ids(), labels=ids(), output_router_logits=True)
    crosslayer.connect(model, "mudd")
    out = model(ids(), labels=ids(), output_router_logits=True)
    assert len(out.router_logits) == 3
    torch.testing.assert_close(out.router_logits, expected.router_logits)
    torch.testing.assert_close(out.aux_loss, expected.aux_loss)


def check_attention(family: str, implementation: str) -> None:
    model = connected(family, "mudd", attn_implementation="eager")
    expected = output(model, family)
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(output(model, family), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [f for f in RECORDING if f != "gemma2"])
@torch.no_grad()
def test_sdpa(family):
    """Not gemma2, whose soft-capped scores sdpa does not have."""
    check_attention(family, "sdpa")


@pytest.mark.slow  # flex_attention is compiled.
@pytest.mark.filterwarnings("ignore")  # It warns on a CPU.
@pytest.mark.parametrize("family", ["llama", "neox-parallel"])
@torch.no_grad()
def test_flex_attention(family):
    """Of projections of their own for q, k and v, and of one for all three."""
    check_attention(family, "flex_attention")
