"""Saved, loaded, copied and pickled: complete and to the last bit, or a clear error."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_connect import EXACT, connected, trained
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaModel,
)

import crosslayer
from crosslayer import Connection
from tests.hf.backbones import FAMILIES, LANGUAGE, build, ids, inputs, llama, output
from tests.support.tiny import shake

families = pytest.mark.parametrize("family", FAMILIES)
methods = pytest.mark.parametrize("arm", crosslayer.available())


@pytest.fixture(autouse=True)
def no_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()


def auto(family: str):
    if family == "dit":
        from diffusers import AutoModel

        return AutoModel
    return AutoModelForImageClassification if family == "vit" else AutoModelForCausalLM


@families
@methods
def test_save_and_load(family, arm, tmp_path):
    model = connected(family, arm)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["crosslayer"] == arm
    for loaded in (
        crosslayer.from_pretrained(tmp_path),
        auto(family).from_pretrained(str(tmp_path)),
    ):
        assert isinstance(loaded, type(build(family)))
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(output(loaded.eval(), family), output(model, family))


@families
@methods
def test_copies_and_pickles(family, arm):
    model = connected(family, arm)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(twin, family), output(model, family))
        shake(twin)
        assert not torch.equal(output(twin, family), output(model, family)), "a copy shares nothing"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "dit"])
@methods
def test_from_pretrained_initialises_what_a_host_checkpoint_lacks(family, arm, tmp_path):
    plain = trained(family)
    plain.save_pretrained(tmp_path)
    config = copy.deepcopy(plain.config)
    config.crosslayer = arm
    loaded, info = type(plain).from_pretrained(tmp_path, config=config, output_loading_info=True)
    expected = connected(family, arm, shaken=False).state_dict() | plain.state_dict()
    assert info["missing_keys"] == {k for k in expected if ".connection" in k}
    for key, value in loaded.state_dict().items():
        if not key.endswith("W1") and ".norms." not in key:
            assert torch.equal(value, expected[key]), key
    if arm in EXACT:
        assert torch.equal(output(loaded, family), output(plain, family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_sharded_tied_and_bf16(family, tmp_path):
    connected(family, "mudd", tie_word_embeddings=True).save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    tmp_path /= "bf16"
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for loaded in (
        crosslayer.from_pretrained(tmp_path, dtype=torch.bfloat16),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"),
    ):
        assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
        for module in loaded.modules():
            if isinstance(module, Connection):
                assert all(p.dtype == torch.float32 for p in module.parameters(recurse=False))
                assert all(p.dtype == torch.bfloat16 for p in module.norms.parameters())
        assert torch.equal(output(loaded, family), output(model, family))


def test_a_dit_in_bf16_keeps_its_connections_in_float32(tmp_path):
    model = connected("dit", "mhc")
    model.save_pretrained(tmp_path)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs("dit").items()}
    for word in ("dtype", "torch_dtype"):
        loaded = crosslayer.from_pretrained(tmp_path, **{word: torch.bfloat16})
        for module in loaded.modules():
            if isinstance(module, Connection):
                assert all(p.dtype == torch.float32 for p in module.parameters(recurse=False))
        assert loaded.proj_out_1.weight.dtype == torch.bfloat16
        assert loaded(**half).sample.dtype == torch.bfloat16
    # diffusers' own casts the connections too; they are used wide
    assert (
        type(model)
        .from_pretrained(tmp_path, torch_dtype=torch.bfloat16)(**half)
        .sample.isfinite()
        .all()
    )


@methods
def test_memory_that_is_initialised_later(arm):
    """The meta device, then empty memory, then the model's own initialisation."""
    with torch.device("meta"):
        model = connected("llama", arm, shaken=False, num_hidden_layers=6)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    model.init_weights()
    fresh = connected("llama", arm, shaken=False, num_hidden_layers=6).state_dict()
    for key, value in model.state_dict().items():
        if ".connection" in key and not key.endswith("W1"):
            assert torch.equal(value, fresh[key]), key
        assert not (value == 7).any(), key


def test_options_survive_saving(tmp_path):
    arm = "mudd(ways='k v r', dilation=2)"
    connected("llama", arm).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.crosslayer == arm


def test_a_body_without_a_head(tmp_path):
    body = crosslayer.connect(llama().model, "mudd")
    body.save_pretrained(tmp_path)
    for loaded in (LlamaModel.from_pretrained(tmp_path), crosslayer.from_pretrained(tmp_path)):
        assert torch.equal(loaded(ids()).last_hidden_state, body(ids()).last_hidden_state)


@pytest.mark.parametrize("first", ["crosslayer", "transformers"])
def test_loads_in_a_fresh_process(first, tmp_path):
    connected("llama", "mudd").save_pretrained(tmp_path)
    second = {"crosslayer": "transformers", "transformers": "crosslayer"}[first]
    code = f"""import {first}, {second}, torch
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(sum(isinstance(m, crosslayer.Connection) for m in model.modules()))"""
    assert python(code).stdout.strip() == "7"


def python(code: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=check)


class TestWhereCrosslayerIsNotImported:
    """The saved folder is never taken for the plain host's."""

    @pytest.fixture
    def saved(self, tmp_path):
        model = connected("llama", "mudd")
        model.save_pretrained(tmp_path)
        return tmp_path, model(ids()).logits.double().sum().item()

    LOAD = """import torch
{before}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({path!r}, trust_remote_code={trust})
ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(3))
print(model(ids).logits.double().sum().item())"""
    ABSENT = "import sys; sys.modules['crosslayer'] = None"

    def test_trusted_code_imports_it(self, saved):
        path, expected = saved
        run = python(self.LOAD.format(path=str(path), trust=True, before=""))
        assert float(run.stdout) == pytest.approx(expected, rel=1e-12)

    def test_without_trust_it_is_refused(self, saved):
        run = python(self.LOAD.format(path=str(saved[0]), trust=False, before=""), check=False)
        assert run.returncode and "trust_remote_code=True" in run.stderr

    def test_where_it_is_not_installed_the_error_says_so(self, saved):
        run = python(
            self.LOAD.format(path=str(saved[0]), trust=True, before=self.ABSENT), check=False
        )
        assert run.returncode and "crosslayer" in run.stderr.splitlines()[-1]


class TestBadFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        connected("llama", "mudd").save_pretrained(tmp_path)
        return tmp_path

    def refuses(self, folder, message):
        with pytest.raises(ValueError, match=message) as error:
            crosslayer.from_pretrained(folder)
        assert "\n" not in str(error.value)

    def test_truncated(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refuses(folder, "model.safetensors is truncated or not safetensors")

    def change(self, folder, change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def test_renamed(self, folder):
        key = "model.layers.1.connections.0.W1"
        self.change(folder, lambda tensors: tensors.update({key + "1": tensors.pop(key)}))
        self.refuses(folder, f"missing '{key}', unexpected '{key}1' .2 in all")

    def test_incomplete(self, folder):
        self.change(folder, lambda tensors: tensors.pop("model.norm.connection.a"))
        self.refuses(folder, "are not this model's: missing 'model.norm.connection.a'")

    def test_foreign(self, folder, tmp_path_factory):
        other = tmp_path_factory.mktemp("other")
        connected("llama", "hyper").save_pretrained(other)
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        self.refuses(folder, "are not this model's: missing ")

    def test_another_size(self, folder):
        key = "model.layers.1.connections.0.W1"
        self.change(folder, lambda tensors: tensors.update({key: tensors[key][:, :5].contiguous()}))
        self.refuses(folder, f"are not this model's: mismatched '{key}' .1 in all")

    def test_pickles(self, folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        self.refuses(folder, "is a pickle, which can run code and is never loaded")

    def test_a_missing_shard(self, folder):
        connected("llama", "mudd").save_pretrained(folder, max_shard_size="20KB")
        next(folder.glob("model-00002*")).unlink()
        self.refuses(folder, "lacks the shard model-00002")

    def test_no_connection(self, tmp_path):
        llama().save_pretrained(tmp_path)
        self.refuses(tmp_path, "names no connection; load the plain model")

    def test_no_folder(self, tmp_path):
        self.refuses(tmp_path / "nowhere", "nowhere: no such folder, and no such model on the hub")

    def test_no_config(self, tmp_path):
        self.refuses(tmp_path, "has no config.json")

    def test_a_damaged_config(self, folder):
        (folder / "config.json").write_text('{"crosslayer": ')
        self.refuses(folder, "config.json is not JSON")

    def test_an_unknown_arm(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "crosslayer": "mud"}))
        self.refuses(folder, "did you mean 'mudd'")


def test_the_saved_type_is_the_hosts_again(tmp_path):
    connected("qwen3", "mudd").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "crosslayer-qwen3"
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "qwen3" and not hasattr(config, "auto_map")
    config.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again").to_dict()
    assert again == {**config.to_dict(), "_name_or_path": again["_name_or_path"]}


@pytest.mark.parametrize("family", LANGUAGE)
def test_keys_of_a_plain_model_are_written_as_ever(family, tmp_path):
    build(family).save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["model_type"].startswith(
        "crosslayer"
    )
    assert not (tmp_path / "crosslayer_model.py").exists()
