"""What serving a connected model rests on: continuous batching, export, and what vLLM and SGLang
look for.
"""

import inspect
import io
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.export import Dim
from transformers import AutoConfig, AutoModel, ContinuousBatchingConfig, GenerationConfig

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.hf import register_with_transformers
from tests.hf.backbones import build, connected, ids
from tests.hf.test_generate import generator

# of an exported model: any number of sequences of any length
DYNAMIC_SHAPES = {
    "input_ids": {0: Dim("batch", max=64), 1: Dim("length", min=2, max=32)},
    "use_cache": None,
}


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
@pytest.mark.parametrize(("family", "spec"), [("phi3", "mudd"), ("llama", "hyper")])
def test_export(family, spec):
    """For batches of any size and length, saved and loaded."""
    model = connected(family, spec).eval()
    arguments = {"input_ids": ids(), "use_cache": False}
    exported = torch.export.export(model, (), arguments, dynamic_shapes=DYNAMIC_SHAPES)
    content = io.BytesIO()
    torch.export.save(exported, content)
    content.seek(0)
    loaded = torch.export.load(content).module()
    for batch, length in ((2, 9), (1, 2), (5, 17)):
        tokens = ids(batch, length)
        logits = loaded(input_ids=tokens, use_cache=False).logits
        assert torch.equal(logits, model(tokens, use_cache=False).logits)
    assert "autocast" in str(exported.graph)
    assert "autocast" not in str(exported.run_decompositions().graph)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the export
def test_ahead_of_time_compilation(tmp_path):
    model = connected("llama", "mudd").eval()
    arguments = {"input_ids": ids(), "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(model, (), arguments, dynamic_shapes=DYNAMIC_SHAPES)
        package = aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        compiled = aoti_load_package(package)
        for batch, length in ((2, 9), (1, 4), (5, 17)):
            tokens = ids(batch, length)
            logits = compiled(input_ids=tokens, use_cache=False).logits
            torch.testing.assert_close(logits, model(tokens).logits)


def test_what_vllm_looks_for():
    """The connections' float32 parameters by name, an attention with the host's source, no norm
    that it would replace by one without the host's weight, and a switch of its decorator.
    """
    plain = build("llama").model
    model = connected("llama", "mudd").model
    kept = model._keep_in_fp32_modules_strict
    assert type(plain)(model.config)._keep_in_fp32_modules_strict == kept
    for name, parameter in model.named_parameters():
        is_own = ".connection" in name and ".norms." not in name
        assert any(fragment in name for fragment in kept) == is_own, (name, parameter.shape)
    attention = model.layers[1].self_attn
    host_forward = inspect.unwrap(type(plain.layers[1].self_attn).forward)
    assert inspect.unwrap(type(attention).forward) is host_forward
    assert model.do_not_compile
    for connection in find_connections(model):
        for norm in connection.norms:
            inputs = list(inspect.signature(norm.forward).parameters.values())
            is_traced = len(inputs) == 1 and inputs[0].kind is inputs[0].POSITIONAL_OR_KEYWORD
            assert not is_traced or not hasattr(norm, "final")


class PlainNorm(nn.Module):
    """An RMSNorm of another library, which knows the weight and the eps of the host's alone."""

    def __init__(self, host: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(host.weight))
        self.eps = host.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def replace_parts(module: nn.Module) -> None:
    """Replace what SGLang's transformers backend replaces, found as it finds it."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            has_bias = child.bias is not None
            linear = nn.Linear(child.in_features, child.out_features, has_bias, device="meta")
            setattr(module, name, linear.to(child.weight.dtype))
        elif type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, PlainNorm(child))
        else:
            replace_parts(child)


@torch.no_grad()
def test_what_sglang_does(tmp_path):
    """It builds the model on meta, replaces linear layers and norms, makes empty weights of the
    same dtypes, and fills them by name.
    """
    connected("llama", "mudd").save_pretrained(tmp_path)
    expected = crosslayer.from_pretrained(tmp_path, dtype=torch.bfloat16).model
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(tmp_path)
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    replace_parts(model)
    model.rotary_emb = expected.rotary_emb
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    assert model.norm.connection.W1.dtype == torch.float32
    weights = expected.state_dict()
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.pop(name))
    assert not weights
    positions = torch.arange(9)[None]
    out = model(ids(), use_cache=False, position_ids=positions, return_dict=False, batch=object())
    assert torch.equal(out[0], expected(ids()).last_hidden_state)


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_servers_load_crosslayer_as_a_plugin(group):
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    plugins = tomllib.loads(pyproject.read_text())["project"]["entry-points"][group]
    plugin = EntryPoint("crosslayer", plugins["crosslayer"], group)
    assert plugin.load() is register_with_transformers
