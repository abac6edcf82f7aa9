"""Saved, loaded, copied and pickled: complete and bitwise equal, or a clear error."""

import copy
import io
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    GPT2Config,
    GPT2DoubleHeadsModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import crosslayer
from crosslayer import Connection
from crosslayer.hf.loading import read_config
from crosslayer.testing.tiny_model import equal_tensors, perturb_weights
from tests.hf.backbones import (
    METHODS,
    WIRINGS,
    build,
    connected,
    each_family,
    ids,
    inputs,
    llama,
    output,
    parametrize_cells,
    starts_bitwise,
    trained,
)
from tests.support.errors import assert_refused, change_weights
from tests.support.hub import snapshot_folder

pytestmark = pytest.mark.usefixtures("no_progress_bars")


def test_an_uploaded_model_is_what_was_saved(tmp_path, monkeypatch):
    """The Hub is replaced; what transformers gives it is kept."""
    uploaded: dict[str, bytes] = {}

    def create_commit(self, repo_id, operations, **_):
        for operation in operations:
            with operation.as_file() as file:
                uploaded[operation.path_in_repo] = file.read()

    repository = SimpleNamespace(repo_id="owner/name")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *_, **options: repository)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    card = ModelCard("---\nlibrary_name: transformers\n---\n")
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: card)
    model = perturb_weights(crosslayer.connect(llama(), "mudd"))
    model.push_to_hub("owner/name")
    assert {"config.json", "model.safetensors", "crosslayer_model.py", "README.md"} <= {*uploaded}
    snapshot = snapshot_folder(tmp_path, "owner/name")
    for name, content in uploaded.items():
        (snapshot / name).write_bytes(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = crosslayer.from_pretrained("owner/name")
    assert equal_tensors(loaded.state_dict(), model.state_dict())


def auto_class(family: str):
    if family == "dit":
        from diffusers import AutoModel

        return AutoModel
    return AutoModelForImageClassification if family == "vit" else AutoModelForCausalLM


@parametrize_cells(each_family())
def test_save_and_load(family, spec, tmp_path):
    model = connected(family, spec)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["crosslayer"] == spec
    for from_pretrained in (crosslayer.from_pretrained, auto_class(family).from_pretrained):
        loaded = from_pretrained(str(tmp_path)).eval()
        assert isinstance(loaded, type(build(family)))
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(output(loaded, family), output(model, family))


@pytest.mark.parametrize("family", WIRINGS)
def test_copies_and_pickles(family):
    model = connected(family, "mudd")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(twin, family), output(model, family))
        perturb_weights(twin)
        assert not torch.equal(output(twin, family), output(model, family)), "a copy shares nothing"


@pytest.mark.parametrize(
    ("family", "spec", "layers"),
    [
        ("llama", "prenorm", 60),
        pytest.param("llama", "hyper", 120, marks=pytest.mark.slow),
        pytest.param("llama", "mudd", 120, marks=pytest.mark.slow),
        pytest.param("neox-parallel", "hyper", 120, marks=pytest.mark.slow),
        pytest.param("neox-parallel", "mudd", 120, marks=pytest.mark.slow),
    ],
)
def test_copies_and_pickles_of_many_layers(family, spec, layers):
    """Their depth of recursion does not grow with the number of layers."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = connected(family, spec, num_hidden_layers=layers, **sizes)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    perturb_weights(model)
    for twin in twins:
        for key, value in twin.state_dict().items():
            assert torch.equal(value, expected[key]), key


@parametrize_cells(
    [(f, spec) for f, spec in each_family() if f == "llama" or (spec == "mudd" and f != "dit")]
)
def test_from_pretrained_initialises_what_a_host_checkpoint_lacks(family, spec, tmp_path):
    plain = trained(family)
    plain.save_pretrained(tmp_path)
    config = copy.deepcopy(plain.config)
    config.crosslayer = spec
    loaded, info = type(plain).from_pretrained(tmp_path, config=config, output_loading_info=True)
    expected = connected(family, spec, perturbed=False).state_dict() | plain.state_dict()
    assert info["missing_keys"] == {key for key in expected if ".connection" in key}
    for key, value in loaded.state_dict().items():
        if not key.endswith("W1") and ".norms." not in key:
            assert torch.equal(value, expected[key]), key
    if starts_bitwise(spec):
        assert torch.equal(output(loaded, family), output(plain, family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_sharded_tied_and_bf16(family, tmp_path):
    connected(family, "mudd", tie_word_embeddings=True).save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    folder = tmp_path / "bf16"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for loaded in (
        crosslayer.from_pretrained(folder, dtype=torch.bfloat16),
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
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
    for option in ("dtype", "torch_dtype"):
        loaded = crosslayer.from_pretrained(tmp_path, **{option: torch.bfloat16})
        for module in loaded.modules():
            if isinstance(module, Connection):
                assert all(p.dtype == torch.float32 for p in module.parameters(recurse=False))
        assert loaded.proj_out_1.weight.dtype == torch.bfloat16
        assert loaded(**half).sample.dtype == torch.bfloat16
    model.bfloat16().save_pretrained(tmp_path / "half")
    model.save_pretrained(tmp_path, variant="half")
    for folder, options in ((tmp_path / "half", {}), (tmp_path, {"variant": "half"})):
        as_saved = crosslayer.from_pretrained(folder, dtype="auto", **options)
        assert as_saved.proj_out_1.weight.dtype == torch.bfloat16
    # The class's own from_pretrained casts the connections too; they are used in float32.
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert loaded(**half).sample.isfinite().all()


@pytest.mark.parametrize("spec", METHODS)
def test_memory_that_is_initialised_later(spec):
    """The meta device, then empty memory, then the model's own initialisation."""
    with torch.device("meta"):
        model = connected("llama", spec, perturbed=False, num_hidden_layers=6)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.init_weights()
    fresh = connected("llama", spec, perturbed=False, num_hidden_layers=6).state_dict()
    for key, value in model.state_dict().items():
        if ".connection" in key and not key.endswith("W1"):
            assert torch.equal(value, fresh[key]), key
        assert not (value == 7).any(), key


def part_without_a_saved_config():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=97, **sizes))
    crosslayer.connect(model.encoder, "mudd")
    return model


def part_with_the_config_of_another():
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = BartForConditionalGeneration(BartConfig(vocab_size=97, **sizes, **layers, **heads))
    crosslayer.connect(model.model.encoder, "postnorm")
    return model


def model_with_the_config_of_another_connection():
    """A backbone's config object is its own, and names the connection that came last."""
    model = llama().model
    other = LlamaModel(model.config)
    crosslayer.connect(model, "prenorm")
    crosslayer.connect(other, "postnorm")
    return model


def plain_model_with_the_config_of_another():
    model = llama().model
    crosslayer.connect(LlamaModel(model.config), "mudd")
    return model


def model_without_its_last_layer():
    model = connected("llama", "mudd")
    del model.model.layers[-1]
    model.config.num_hidden_layers = 2
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (
            part_without_a_saved_config,
            "no config that is saved .* connection of encoder, 'mudd'; connect the ",
        ),
        (part_with_the_config_of_another, "model.decoder is not connected, .* save its state_dict"),
        (
            model_with_the_config_of_another_connection,
            "the config of LlamaModel names 'postnorm', and it is connected with 'prenorm'",
        ),
        (plain_model_with_the_config_of_another, "LlamaModel is not connected, .*copy.deepcopy"),
        (model_without_its_last_layer, "model has 2 of the 3 layers .* remove layers before"),
    ],
)
def test_what_a_folder_cannot_express_is_not_saved(make_model, message, tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match=f"cannot save the model: {message}"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_shorter_model_is_saved_where_the_readout_does_not_depend_on_it(tmp_path):
    model = connected("llama", "hyper")
    del model.model.layers[-1]
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path)
    assert torch.equal(crosslayer.from_pretrained(tmp_path)(ids()).logits, model(ids()).logits)


def test_options_survive_saving(tmp_path):
    spec = "mudd(ways='k v r', dilation=2)"
    connected("llama", spec).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.crosslayer == spec


def test_frozen_parameters_stay_frozen(tmp_path):
    """transformers replaces the parameters that it loads by ones that learn."""
    model = connected("llama", "hyper(frozen='B')")
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert any("static_beta" in name for name in names)
    model.save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM, crosslayer):
        loaded = load.from_pretrained(tmp_path)
        assert {name for name, p in loaded.named_parameters() if not p.requires_grad} == names


def test_a_backbone_without_a_head(tmp_path):
    backbone = crosslayer.connect(llama().model, "mudd")
    backbone.save_pretrained(tmp_path)
    for loaded in (LlamaModel.from_pretrained(tmp_path), crosslayer.from_pretrained(tmp_path)):
        assert torch.equal(loaded(ids()).last_hidden_state, backbone(ids()).last_hidden_state)


def test_configs_whose_sizes_are_not_those_of_every_layer(tmp_path):
    """DeepSeek-V3 does not use its num_key_value_heads; others have sizes of single layers."""
    unused = DeepseekV3Config(num_attention_heads=4, num_key_value_heads=128)
    single = LlamaConfig(per_layer_config={1: {"intermediate_size": 96}})
    for config in (unused, single):
        config.save_pretrained(tmp_path)
        loaded, _ = read_config(tmp_path)
        assert type(loaded) is type(config)
    single.per_layer_config = {1: {"intermediate_size": 0}}
    single.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="intermediate_size must be from 1 to"):
        read_config(tmp_path)


def test_a_config_chooses_neither_code_nor_other_weights(tmp_path):
    model = connected("llama", "mudd")
    perturb_weights(connected("llama", "mudd")).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}
    config |= {"experts_implementation": "evil/kernel", "transformers_weights": "other.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(output(loaded, "llama"), output(model, "llama"))
    assert not hasattr(loaded.config, "auto_map")
    assert loaded.config._experts_implementation != "evil/kernel"


def test_a_class_that_no_auto_class_has(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
    model = crosslayer.connect(GPT2DoubleHeadsModel(GPT2Config(**sizes)).eval(), "mudd")
    perturb_weights(model, 0.05).save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert isinstance(loaded, GPT2DoubleHeadsModel)
    candidates = ids()[None]
    torch.testing.assert_close(loaded(candidates).mc_logits, model(candidates).mc_logits)


@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
def test_a_variant_beside_the_other_weights(max_shard_size, tmp_path):
    model = connected("llama", "mudd")
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    variant = perturb_weights(connected("llama", "mudd"))
    variant.save_pretrained(tmp_path, variant="fp16", max_shard_size=max_shard_size)
    for expected, options in ((model, {}), (variant, {"variant": "fp16"})):
        loaded = crosslayer.from_pretrained(tmp_path, **options)
        assert torch.equal(output(loaded, "llama"), output(expected, "llama"))


def test_one_file_beside_the_index_of_former_shards(tmp_path):
    """transformers leaves the index behind, and loads the file."""
    model = connected("llama", "mudd")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    model.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.index.json"))
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(output(loaded.eval(), "llama"), output(model, "llama"))


def test_a_revision_and_a_subfolder_on_the_hub(tmp_path):
    main = snapshot_folder(tmp_path, "org/net")
    connected("llama", "mudd").save_pretrained(main)
    branch = main.with_name("1" * 40)
    (main.parents[1] / "refs" / "branch").write_text(branch.name)
    connected("llama", "hyper").save_pretrained(branch / "part")
    place = {"revision": "branch", "subfolder": "part"}
    loaded = crosslayer.from_pretrained("org/net", cache_dir=tmp_path, **place)
    assert loaded.config.crosslayer == "hyper"
    loaded = crosslayer.from_pretrained(branch, subfolder="part", revision="not looked up")
    assert loaded.config.crosslayer == "hyper"
    with pytest.raises(ValueError, match="not in the local cache"):
        crosslayer.from_pretrained("org/net", cache_dir=tmp_path / "empty", local_files_only=True)


class TestBadFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        connected("llama", "mudd").save_pretrained(tmp_path)
        return tmp_path

    def refuses(self, folder, message):
        assert_refused(crosslayer.from_pretrained, folder, message)

    def test_options(self, folder):
        """Those that agree with what it does are accepted."""
        crosslayer.from_pretrained(folder, use_safetensors=True, trust_remote_code=None)
        with pytest.raises(ValueError, match="takes only trust_remote_code=False, got True"):
            crosslayer.from_pretrained(folder, trust_remote_code=True)

    def test_truncated(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refuses(folder, "model.safetensors is truncated or not safetensors")

    def test_renamed(self, folder):
        key = "model.layers.1.connections.0.W1"
        change_weights(folder, lambda tensors: tensors.update({key + "1": tensors.pop(key)}))
        self.refuses(folder, f"missing '{key}', unexpected '{key}1' .2 in all")

    def test_incomplete(self, folder):
        change_weights(folder, lambda tensors: tensors.pop("model.norm.connection.a"))
        self.refuses(folder, "are not this model's: missing 'model.norm.connection.a'")

    def test_another_connection(self, folder, tmp_path_factory):
        other = tmp_path_factory.mktemp("other")
        connected("llama", "hyper").save_pretrained(other)
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        self.refuses(folder, "are not this model's: missing ")

    def test_another_size(self, folder):
        key = "model.layers.1.connections.0.W1"
        change_weights(
            folder, lambda tensors: tensors.update({key: tensors[key][:, :5].contiguous()})
        )
        self.refuses(folder, f"are not this model's: mismatched '{key}' .1 in all")

    def test_pickles(self, folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        self.refuses(folder, "is a pickle, which can run code and is never loaded")

    def test_a_tensor_in_two_shards(self, folder):
        (folder / "model.safetensors").unlink()
        connected("llama", "mudd").save_pretrained(folder, max_shard_size="20KB")
        first, *_, last = sorted(folder.glob("*.safetensors"))
        save_file(load_file(last) | load_file(first), last, {"format": "pt"})
        self.refuses(folder, "is in model-00001-of-.*, too")

    def test_a_missing_shard(self, folder):
        (folder / "model.safetensors").unlink()
        connected("llama", "mudd").save_pretrained(folder, max_shard_size="20KB")
        next(folder.glob("model-00002*")).unlink()
        self.refuses(folder, "lacks the shard model-00002")

    def test_no_connection(self, tmp_path):
        llama().save_pretrained(tmp_path)
        self.refuses(tmp_path, "names no connection; load the plain model")

    def test_no_folder(self, tmp_path):
        self.refuses(tmp_path / "nowhere", "nowhere: no such folder$")

    def test_no_config(self, tmp_path):
        self.refuses(tmp_path, "config.json: no such file")

    def test_a_damaged_config(self, folder):
        (folder / "config.json").write_text('{"crosslayer": ')
        self.refuses(folder, "config.json: not JSON")

    def test_an_unknown_connection(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "crosslayer": "mud"}))
        self.refuses(folder, "did you mean 'mudd'")

    def test_an_unknown_class_of_diffusers(self, tmp_path):
        connected("dit", "mudd").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        for name in ("StableDiffusionPipeline", "loaders", 5):
            (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": name}))
            self.refuses(tmp_path, f"unknown class {name!r}.* known .*: DiTTransformer2DModel")
