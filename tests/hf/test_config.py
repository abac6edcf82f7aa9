"""`make_config`: a config of any family takes its sizes, or one line says why it does not."""

import re

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from crosslayer.hf.config import make_config, make_language_model

SIZES = {"layers": 4, "dim": 64, "heads": 4, "vocab": 97}


def make_small_config(family: str, **options):
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    return make_config(family, **SIZES | options)


@pytest.mark.parametrize(
    "family",
    [
        "got_ocr2",
        "qwen3_5",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("llama4", marks=pytest.mark.slow),
    ],
)
def test_a_family_with_a_text_model_is_refused_and_names_the_texts_family(family):
    """It would keep the sizes of billions of parameters."""
    with pytest.raises(ValueError, match=r"keeps num_hidden_layers .* got 4: its text") as error:
        make_small_config(family)
    text_family = re.search(r"use the family '(\w+)'$", str(error.value))[1]
    config = make_small_config(text_family)
    assert (config.num_hidden_layers, config.hidden_size) == (4, 64)


def test_a_size_that_follows_from_other_keys():
    assert make_small_config("nemotron_h").num_hidden_layers == 4
    with pytest.raises(ValueError, match="nemotron_h keeps num_hidden_layers 4, got 8: it follows"):
        make_small_config("nemotron_h", layers=8)


def test_a_size_by_the_familys_own_name():
    config = make_small_config("gpt2", overrides={"n_layer": 3, "n_embd": 32})
    assert (config.num_hidden_layers, config.hidden_size) == (3, 32)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "phi3", "opt", "xglm", "ctrl", "moshi", "recurrent_gemma"]
)
def test_an_mlp_has_as_many_parameters_in_every_family(family):
    """Whatever its config calls the width, and whether that counts the gate too."""
    with torch.device("meta"):
        model = make_language_model(make_small_config(family, dim=96))
    is_of_mlp = re.compile(r"\.(mlp|mlp_block|ffn|fc\d)\.").search
    matrices = [p for name, p in model.named_parameters() if is_of_mlp(name) and p.dim() == 2]
    assert sum(p.numel() for p in matrices) == SIZES["layers"] * 8 * 96**2


@pytest.mark.parametrize("family", ["bert", "electra", "gpt2"])
def test_a_language_model_does_not_see_later_tokens(family):
    """By default BERT and its like do, and would copy the token that they are to predict."""
    model = make_language_model(make_small_config(family, layers=2)).eval()
    ids = torch.arange(2, 10)[None]
    changed = ids.clone()
    changed[0, 5:] = 1
    logits = [model(each).logits[0] for each in (ids, changed)]
    torch.testing.assert_close(logits[0][:5], logits[1][:5])
    assert not torch.allclose(logits[0][5:], logits[1][5:])


@pytest.mark.parametrize("family", ["deepseek_v3", "youtu", "axk1", "falcon"])
def test_a_family_that_derives_head_dim_runs(family):
    model = make_language_model(make_small_config(family, layers=1))
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 97)


def test_a_head_dim_that_is_the_familys_own_is_set():
    for family in ("llama", "qwen3", "bailing_hybrid"):
        config = make_small_config(family)
        assert getattr(config, "linear_head_dim", config.head_dim) == 64 // 4
    assert make_small_config("jetmoe").kv_channels == 64 // 4


@pytest.mark.parametrize("family", ["ministral", "nemotron", "hunyuan_v1_dense", "olmo_hybrid"])
def test_a_family_whose_defaults_do_not_fit_one_layer(family):
    assert make_small_config(family).hidden_size == 64


@pytest.mark.parametrize(
    ("family", "message", "overrides"),
    [
        (
            "gpt_neo",
            "the config of gpt_neo refuses these values: .* It is required that",
            {"attention_types": [[["global", "local"], 2]]},
        ),
        (
            "cwm",
            "the config of cwm refuses these values: .* 'bos_token_id' expected int",
            {"bos_token_id": 1},
        ),
        ("dbrx", "no dbrx can be built .* 'rope_theta'", {"attn_config": {"rope_theta": 1e4}}),
    ],
)
def test_a_family_that_needs_other_keys_says_so(family, message, overrides):
    with pytest.raises(ValueError, match=message) as error:
        make_small_config(family)
    assert "\n" not in str(error.value)
    assert make_small_config(family, overrides=overrides).hidden_size == 64


def test_layers_whose_sizes_differ():
    with pytest.raises(ValueError, match="dots3_note_text keeps num_attention_heads"):
        make_small_config("dots3_note_text")
