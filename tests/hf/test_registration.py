"""What importing crosslayer.hf teaches transformers and diffusers, and what fails without each part
of it.
"""

import json
import logging
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ColPaliConfig,
    ColPaliForRetrieval,
    GPTNeoXConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import crosslayer
from crosslayer import Connection
from crosslayer.hf.registration import register_with_diffusers
from tests.hf.backbones import build, connected, ids, llama


def is_connected(model: torch.nn.Module) -> bool:
    return any(isinstance(module, Connection) for module in model.modules())


def run_python(code: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=check)


@pytest.fixture
def folder(tmp_path):
    connected("llama", "mudd").save_pretrained(tmp_path)
    return tmp_path


class TestSavedConfig:
    def test_it_names_another_type_and_the_code_to_trust(self, folder):
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "crosslayer-llama"
        assert config["auto_map"] == {"AutoConfig": "crosslayer_model.SavedConfig"}
        assert (
            "from crosslayer.hf import SavedConfig" in (folder / "crosslayer_model.py").read_text()
        )

    def test_it_is_read_as_the_hosts(self, folder):
        config = AutoConfig.from_pretrained(folder)
        assert type(config) is type(llama().config)
        assert config.model_type == "llama"
        assert not hasattr(config, "auto_map")
        config.save_pretrained(folder / "again")
        again = AutoConfig.from_pretrained(folder / "again").to_dict()
        assert again == {**config.to_dict(), "_name_or_path": again["_name_or_path"]}

    def test_it_names_the_connection_of_a_part_of_a_part(self, tmp_path):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        text = {"model_type": "gemma", "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 8}
        vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 28}
        whole = {"model_type": "paligemma", "projection_dim": 16, "image_token_index": 63}
        whole["text_config"] = {**sizes, **text, "num_key_value_heads": 1}
        whole["vision_config"] = {**sizes, **vision, "patch_size": 14, "projection_dim": 16}
        model = ColPaliForRetrieval(ColPaliConfig(vlm_config=whole, embedding_dim=8))
        crosslayer.connect(model.vlm.language_model, "mudd")
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["model_type"] == "crosslayer-colpali"
        loaded = crosslayer.from_pretrained(tmp_path)
        assert is_connected(loaded.vlm.language_model)

    def test_a_host_class_called_by_name_reads_it(self, folder):
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert is_connected(loaded)
        assert loaded.config.model_type == "llama"
        assert not hasattr(loaded.config, "auto_map")

    def test_only_another_host_gets_a_warning_of_its_type(self, folder, caplog, monkeypatch):
        logger = logging.getLogger("transformers.configuration_utils")
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        monkeypatch.setattr(logger, "level", logging.WARNING)
        # where the variable CI is set, transformers passes its messages on, and each counts twice
        monkeypatch.setattr(logger, "propagate", False)
        LlamaForCausalLM.from_pretrained(folder)
        assert not caplog.messages
        GPTNeoXConfig.from_pretrained(folder)
        (message,) = caplog.messages
        assert "`crosslayer-llama` to instantiate a model of type `gpt_neox`" in message

    def test_a_host_config_called_by_name_is_saved_as_it_was_read(self, folder):
        type(llama().config).from_pretrained(folder).save_pretrained(folder / "again")
        config = json.loads((folder / "again" / "config.json").read_text())
        assert config["model_type"] == "crosslayer-llama"

    @pytest.mark.skipif("exaone" not in CONFIG_MAPPING, reason="a family of a later transformers")
    def test_a_class_that_is_several_types_hosts_reads_it(self, tmp_path):
        """Llama's class reads EXAONE 3.5 too. The names of its weights follow from its type."""
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model(
            "exaone",
            **sizes,
            num_key_value_heads=4,
            intermediate_size=48,
            vocab_size=97,
            eos_token_id=1,
        )
        plain = AutoModelForCausalLM.from_config(config).eval()
        assert isinstance(plain, LlamaForCausalLM)
        expected = plain(ids()).logits
        crosslayer.connect(plain, "mudd").save_pretrained(tmp_path)
        assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path)(ids()).logits, expected)

    def test_options_of_from_pretrained_reach_it(self, folder):
        loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert loaded.config._attn_implementation == "eager"

    @pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
    def test_a_plain_model_is_saved_as_without_crosslayer(self, family, tmp_path):
        build(family).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert not config["model_type"].startswith("crosslayer")
        assert not (tmp_path / "crosslayer_model.py").exists()


class TestEachPartIsNeeded:
    """Undo one part of the registration; a folder is then not read, not connected or not marked."""

    def test_the_registered_types(self, folder, monkeypatch):
        monkeypatch.delitem(CONFIG_MAPPING._extra_content, "crosslayer-llama")
        with pytest.raises(ValueError, match="trust_remote_code"):
            AutoConfig.from_pretrained(folder)

    def test_post_init(self, folder, monkeypatch):
        monkeypatch.setattr(PreTrainedModel, "post_init", PreTrainedModel.post_init.__wrapped__)
        assert not is_connected(AutoModelForCausalLM.from_pretrained(folder))

    def test_to_json_file(self, tmp_path, monkeypatch):
        to_json_file = PreTrainedConfig.to_json_file.__wrapped__
        monkeypatch.setattr(PreTrainedConfig, "to_json_file", to_json_file)
        connected("llama", "mudd").save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"

    def test_from_config_of_diffusers(self, tmp_path, monkeypatch):
        from diffusers import AutoModel, ConfigMixin

        register_with_diffusers()
        connected("dit", "mudd").save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(str(tmp_path))
        assert is_connected(loaded)
        built, _ = loaded.from_config(loaded.config, return_unused_kwargs=True)
        assert is_connected(built)
        from_config = classmethod(ConfigMixin.from_config.__func__.__wrapped__)
        monkeypatch.setattr(ConfigMixin, "from_config", from_config)
        assert not is_connected(AutoModel.from_pretrained(str(tmp_path)))


class TestAFreshProcess:
    """Without crosslayer a saved folder is never taken for the plain host's."""

    SETUP = """import torch
from transformers import AutoModelForCausalLM
load = AutoModelForCausalLM.from_pretrained
ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(3))
"""

    @pytest.fixture
    def saved(self, tmp_path):
        model = connected("llama", "mudd")
        model.save_pretrained(tmp_path)
        return str(tmp_path), model(ids()).logits.double().sum().item()

    @pytest.mark.slow
    def test_refused_without_trust_and_loaded_with_it(self, saved):
        path, expected = saved
        run = run_python(f"""{self.SETUP}
try:
    load({path!r}, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
    print(load({path!r}, trust_remote_code=True)(ids).logits.double().sum().item())""")
        assert float(run.stdout) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.slow
    def test_loaded_after_importing_crosslayer(self, saved):
        path, expected = saved
        run = run_python(f"""import crosslayer.hf
{self.SETUP}
print(load({path!r})(ids).logits.double().sum().item())""")
        assert float(run.stdout) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.slow
    def test_without_crosslayer_the_error_names_it(self, saved):
        code = f"""import sys; sys.modules["crosslayer"] = None
{self.SETUP}
load({saved[0]!r}, trust_remote_code=True)"""
        run = run_python(code, check=False)
        assert run.returncode
        assert "import of crosslayer" in run.stderr.splitlines()[-1]


def test_a_family_of_ones_own_loads_with_trust(tmp_path):
    """Its model type is registered after crosslayer.hf is imported, so AutoConfig knows it through
    auto_map alone.
    """
    from transformers import LlamaConfig

    class MineConfig(LlamaConfig):
        model_type = "mine"

    class Mine(LlamaForCausalLM):
        config_class = MineConfig

    AutoConfig.register("mine", MineConfig)
    AutoModelForCausalLM.register(MineConfig, Mine)
    try:
        model = crosslayer.connect(Mine(MineConfig(**llama().config.to_diff_dict())), "mudd")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
        assert torch.equal(loaded(ids()).logits, model.eval()(ids()).logits)
    finally:
        del CONFIG_MAPPING._extra_content["mine"]
        del AutoModelForCausalLM._model_mapping._extra_content[MineConfig]
