"""Gemma 4: layers that multiply their stream, per-layer inputs, and a stream that is cut between
layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Gemma4TextModel

import crosslayer
from crosslayer.hf.hidden_states import StreamUseError, TravellingState
from crosslayer.hf.layers import _divide
from crosslayer.testing.tiny_model import perturb_weights, token_ids
from tests.hf.plain_models import DIM, make_ids

LAYERS = 6


def make_gemma(**options: Any) -> Any:
    """With a factor of its own in each layer, as a trained one has."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 64, "vocab_size_per_layer_input": 64, "pad_token_id": 0, "eos_token_id": None,
        "hidden_size": 32, "intermediate_size": 48, "hidden_size_per_layer_input": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 12,
        "num_hidden_layers": LAYERS, "num_kv_shared_layers": 2, "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    } | options  # fmt: skip
    model = perturb_weights(Gemma4ForCausalLM(Gemma4TextConfig(**config))).eval()
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.2 + 0.3 * number)
    return model


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("spec", ["prenorm", "mudd", "hyper"])
def test_a_trained_gemma_computes_the_same(spec):
    model = make_gemma().double()
    connected = crosslayer.connect(copy.deepcopy(model), spec)
    ids = token_ids(2, 9) % 64
    expected, actual = (m(ids, output_hidden_states=True) for m in (model, connected))
    assert relative_difference(actual.logits, expected.logits) < 1e-4  # of the norms' epsilon
    for own, host in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert relative_difference(own, host) < 1e-4
    names = ["lm_head.weight", "model.layers.1.per_layer_input_gate.weight"]
    names += ["model.layers.0.mlp.up_proj.weight", "model.layers.4.self_attn.q_proj.weight"]
    for m in (model, connected):
        m.train()(ids, labels=ids).loss.backward()
    for name in names:
        gradients = [m.get_parameter(name).grad for m in (connected, model)]
        assert relative_difference(*gradients) < 1e-3, name


def test_a_new_gemma_stays_bitwise_the_same():
    model = make_gemma()
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1)
    ids = token_ids(2, 9) % 64
    expected = model(ids).logits
    assert torch.equal(crosslayer.connect(model, "mudd")(ids).logits, expected)


@pytest.mark.parametrize("spec", ["mudd", "hyper"])
def test_generation_cuts_the_prompt_between_layers(spec):
    """Layers that share keys and values get the last token of the prompt alone."""
    kept = torch.cat([token_ids(1, 9), torch.zeros(1, 9, dtype=torch.long)]) % 64
    kept[1, 4:] = kept[0, 4:]
    mask = (kept != 0).long()
    mask[0] = 1
    connected = perturb_weights(crosslayer.connect(make_gemma().double(), spec))
    lengths = []
    connected.model.layers[-1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    ids = connected.generate(kept, **options)
    assert lengths[1:] == [1] * 4
    assert lengths[0] == (1 if hasattr(Gemma4TextModel, "_maybe_slice_kv_shared_inputs") else 9)
    for length in range(9, ids.shape[1]):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        logits = connected(ids[:, :length], attention_mask=mask[:, :length]).logits
        assert torch.equal(logits[:, -1].argmax(-1), ids[:, length])


@pytest.mark.slow
def test_factors_are_saved_and_loaded(tmp_path):
    connected = perturb_weights(crosslayer.connect(make_gemma(), "mudd"))
    connected.save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    ids = token_ids(2, 9) % 64
    assert torch.equal(loaded(ids).logits, connected(ids).logits)
    disconnected = crosslayer.disconnect(crosslayer.connect(make_gemma(), "prenorm"))
    assert torch.equal(disconnected(ids).logits, make_gemma()(ids).logits)


@pytest.mark.slow
def test_a_compiled_gemma_learns_the_same():
    ids = token_ids(2, 9) % 64
    options = {"num_hidden_layers": 2, "num_kv_shared_layers": 0}
    options["layer_types"] = ["sliding_attention", "full_attention"]
    gradients = []
    for compiles in (False, True):
        model = crosslayer.connect(make_gemma(**options), "mudd").train()
        if compiles:
            for layer in model.model.layers:
                layer.compile()
        else:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradients[1][name] is not None or gradient is None, name
        if gradient is not None:
            assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=1e-5), name


class FactorBlock(nn.Module):
    """Multiplies its stream by a parameter, and an output by an argument."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm(DIM)
        self.up = nn.Linear(DIM, 8)
        self.down = nn.Linear(8, DIM)
        self.keep = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x + self.down(gate * self.up(self.norm(x)).tanh())) * self.keep


class FactorHost(nn.Module):
    """Cuts its stream before the last layer."""

    def __init__(self, norm: Any = nn.LayerNorm):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(FactorBlock(norm) for _ in range(4))
        self.norm = norm(DIM)
        self.tokens = slice(None)

    def forward(self, ids: Tensor, gate: Tensor | None = None) -> Any:
        gate = torch.linspace(0, 2, 8) if gate is None else gate
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            if number == 3:
                x = x[:, self.tokens]
            x = layer(x, gate)
        assert x.shape[2] == DIM
        return self.norm(x)


@pytest.mark.parametrize("spec", ["prenorm", "denseformer", "mudd"])
def test_learned_factors(spec):
    """Their gradients pass through the scale of all later outputs."""
    host = FactorHost().double()
    connected = crosslayer.connect(copy.deepcopy(host), spec)
    ids = make_ids()
    for model in (host, connected):
        model.tokens = slice(-3, None)
    expected, actual = host(ids), connected(ids)
    assert actual.shape == (ids.shape[0], 3, DIM)
    assert relative_difference(actual, expected) < 1e-4
    for outputs in (expected, actual):
        (outputs * torch.linspace(-1, 1, DIM)).sum().backward()
    for own, theirs in zip(connected.layers, host.layers, strict=True):
        difference = (own.keep.grad - theirs.keep.grad).abs()
        assert difference < 1e-3 * max(layer.keep.grad.abs() for layer in host.layers)


def test_a_layer_is_called_with_what_it_multiplies_by():
    connected = crosslayer.connect(FactorHost(), "mudd")
    hidden = connected.layers[0](torch.zeros(2, 5, DIM), torch.ones(8))
    with pytest.raises(ValueError, match=r"layer 1 \(FactorBlock\) is called without gate"):
        connected.layers[1](hidden)
    for index in (hidden.shape[:1], (slice(1), slice(2)), (slice(None), slice(2), slice(3))):
        with pytest.raises(StreamUseError, match="but a slice of the tokens"):
            hidden[index]


def test_a_cut_keeps_what_has_no_axis_of_tokens():
    stream, table = torch.zeros(2, 5, DIM), torch.ones(2, 5)
    hidden = TravellingState((stream, table), stream.new_empty(0), 1, stream.shape)[:, -1:]
    assert [leaf.shape for leaf in hidden.state] == [(2, 1, DIM), (2, 5)]


def test_factors_that_streams_have_no_range_for():
    host = FactorHost()
    with torch.no_grad():
        host.layers[1].keep.fill_(-0.5)
    with pytest.raises(ValueError, match=r"layer 1 multiplies .* by keep, which is -0.5"):
        crosslayer.connect(host, "mudd")
    with torch.no_grad():
        for layer in host.layers:
            layer.keep.fill_(0.03)
    assert "mudd" in str(crosslayer.connect(copy.deepcopy(host), "mudd").connection_spec)
    half = copy.deepcopy(host).half()
    with pytest.raises(
        ValueError, match=r"up to layer 1 .* float16 has no range for its inverse; try"
    ):
        crosslayer.connect(copy.deepcopy(half), "mudd")
    connected = crosslayer.connect(copy.deepcopy(half), "mudd(stream_dtype='float32')")
    gate = torch.linspace(0, 2, 8).half()
    actual, expected = connected(make_ids(), gate), half(make_ids(), gate)
    assert actual.isfinite().all() and actual.dtype == torch.float16
    assert relative_difference(actual.float(), expected.float()) < 0.1


class InPlaceHost(FactorHost):
    """Changes an output in place, which another name has too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(InPlaceBlock(nn.LayerNorm) for _ in range(2))


class InPlaceBlock(FactorBlock):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)))
        z = y
        z *= gate.mean() if isinstance(gate, Tensor) else gate
        return x + y


def test_what_joins_a_float32_stream_is_not_rounded_to_the_hosts_dtype():
    """1000 over 0.001 is beyond float16."""
    y, scale = torch.full((1,), 1000.0).half(), torch.tensor(1e-3)
    site = crosslayer.plan(1)[0]
    for spec, expected in (("prenorm(stream_dtype='float32')", 1e6), ("prenorm", float("inf"))):
        connection = crosslayer.make(spec)(site, 8, lambda port: nn.RMSNorm(8))
        assert _divide(y, scale, connection).item() == pytest.approx(expected)


def test_connections_that_norm_their_streams_are_refused():
    with pytest.raises(ValueError, match=r"by keep, and resi_dual norms its streams itself"):
        crosslayer.connect(FactorHost(), "resi_dual")


def test_a_product_in_place_is_refused():
    with pytest.raises(ValueError, match="its own code computes with its arguments"):
        crosslayer.connect(InPlaceHost(), "mudd")


class DyTNorm(nn.Module):
    """Its output grows with its input."""

    def __init__(self, dim: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x)


def test_a_norm_that_keeps_the_factor_is_refused():
    host = FactorHost(DyTNorm)
    with pytest.raises(ValueError, match="by keep, and its final norm, norm, does not remove"):
        crosslayer.connect(host, "mudd")
