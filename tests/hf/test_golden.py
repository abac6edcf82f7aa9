"""A whole MUDDFormer: the reference's numbers on transformers' Llama as the body."""

from pathlib import Path

import pytest
import torch
from bodies import llama
from safetensors.torch import load_file
from torch import nn

import crosslayer

CASE = Path(__file__).parent.parent / "golden" / "muddformer_llama_L4_D64_noqknorm_noround_noexpand"
WIDTHS = (128, 128, 256, 256)

PARTS = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj"}
MLP = {"w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj"}


def ours(theirs: str) -> str:
    """The name in a connected Llama of a parameter of the reference."""
    match theirs.split("."):
        case ["tok_embeddings", _]:
            return "model.embed_tokens.weight"
        case ["output", _]:
            return "lm_head.weight"
        case ["norm", _]:
            return "model.norm.weight"
        case ["layers", l, "attention", part, _]:
            return f"model.layers.{l}.{PARTS[part]}.weight"
        case ["layers", l, "feed_forward", part, _]:
            return f"model.layers.{l}.{MLP[part]}.weight"
        case ["layers", l, "ffn_norm", _]:
            return f"model.layers.{l}.post_attention_layernorm.weight"
        case ["layers", l, "attention_norm", _] | ["layers", l, "attention_norms", "0", _]:
            return f"model.layers.{l}.input_layernorm.weight"
        case ["layers", l, "attention_norms", way, _]:
            return f"model.layers.{l}.connections.0.norms.{way}.weight"
        case ["dense_bs", l]:
            return aggregation(int(l)) + ".a"
        case ["dynamic_dense", l, part, _]:
            return aggregation(int(l)) + f".{part.upper()}"
    raise AssertionError(theirs)


def aggregation(l: int) -> str:
    return "model.norm.connection" if l == 3 else f"model.layers.{l + 1}.connections.0"


def transposed(theirs: str, value: torch.Tensor) -> torch.Tensor:
    return value.T if theirs.startswith("dynamic_dense") else value


@pytest.fixture
def muddformer():
    weights = load_file(f"{CASE}.params.safetensors")
    model = llama(
        hidden_size=64, num_hidden_layers=4, num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False
    )
    for layer, width in zip(model.model.layers, WIDTHS, strict=True):
        layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(64, width, bias=False) for _ in range(2))
        layer.mlp.down_proj = nn.Linear(width, 64, bias=False)
    crosslayer.connect(model, "mudd")
    model.load_state_dict({ours(k): transposed(k, v) for k, v in weights.items()}, strict=True)
    return model


def test_logits_and_gradients(muddformer):
    golden = load_file(f"{CASE}.forward_float64_exactrope.safetensors")
    ids = golden["input_ids"]
    out = muddformer(ids, labels=ids)
    torch.testing.assert_close(out.logits.double(), golden["logits"], rtol=0, atol=1e-4)
    torch.testing.assert_close(out.loss.double().view(1), golden["loss"], rtol=0, atol=1e-6)
    out.loss.backward()
    expected, found = load_file(f"{CASE}.grads_from_float64.safetensors"), dict(muddformer.named_parameters())
    assert {ours(k) for k in expected} == found.keys()
    for theirs, gradient in expected.items():
        torch.testing.assert_close(found[ours(theirs)].grad, transposed(theirs, gradient), rtol=1e-4, atol=2e-5)


def test_greedy_tokens(muddformer):
    golden = load_file(f"{CASE}.greedy_generation_exactrope.safetensors")
    muddformer.generation_config.pad_token_id = None
    out = muddformer.generate(golden["prompt_ids"], max_new_tokens=12, do_sample=False)
    assert torch.equal(out, golden["generated_ids"])
