"""What serving a connected model rests on: continuous batching, export, and what vLLM looks for."""

import inspect

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from crosslayer.connection import find_connections
from tests.hf.backbones import build, connected, ids
from tests.hf.test_generate import generator


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mudd", "hyper"])
@torch.no_grad()
def test_continuous_batching(spec):
    model = generator("llama", spec)
    prompts = [ids(1, length)[0].tolist() for length in (9, 5, 7)]
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, do_sample=False, min_new_tokens=6, max_new_tokens=6)
        expected.append(out[0, len(prompt) :].tolist())
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
    )
    assert sorted(out.generated_tokens for out in outputs.values()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the export
@pytest.mark.parametrize(("family", "spec"), [("phi3", "mudd"), ("llama", "mhc")])
def test_export(family, spec):
    model = connected(family, spec)
    model.config.use_cache = False
    exported = torch.export.export(model, (ids(),))
    assert torch.equal(exported.module()(ids()).logits, model(ids()).logits)


def test_what_vllm_looks_for():
    """The connections' float32 parameters by name, an attention with the host's source, no norm
    that it would replace by one without the host's weight, and a switch of its decorator.
    """
    plain = build("llama").model
    model = connected("llama", "mudd").model
    kept = model._keep_in_fp32_modules_strict
    for name, parameter in model.named_parameters():
        is_own = ".connection" in name and ".norms." not in name
        assert any(fragment in name for fragment in kept) == is_own, (name, parameter.shape)
    attention = model.layers[1].self_attn
    host_forward = type(plain.layers[1].self_attn).forward
    assert inspect.unwrap(type(attention).forward) is host_forward
    assert model.do_not_compile
    for connection in find_connections(model):
        for norm in connection.norms:
            inputs = list(inspect.signature(norm.forward).parameters.values())
            is_traced = len(inputs) == 1 and inputs[0].kind is inputs[0].POSITIONAL_OR_KEYWORD
            assert not is_traced or not hasattr(norm, "final")
