"""A model's folder as `generate` and `eval` open it: complete, and without running its code."""

import io
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import crosslayer
from crosslayer.cli.main import main
from crosslayer.convert import open_model, open_tokenizer
from crosslayer.data.tokenizing import byte_tokenizer_json
from tests.hf.backbones import connected, llama
from tests.support.errors import assert_refused, change_weights

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def save(folder, spec=None, **options):
    model = connected("llama", spec, **options) if spec else llama(**options)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return folder


def configure(folder, **changes):
    """Change keys of config.json; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"are not this model's: missing '{UP}' \(1 in all\)"),
        (lambda t: t.pop("lm_head.weight"), "missing 'lm_head.weight'"),
        (lambda t: t.update({UP: torch.ones(2, 2)}), f"mismatched '{UP}'"),
        (
            lambda t: t.update({UP.replace("1", "7"): torch.ones(2, 2)}),
            "unexpected 'model.layers.7",
        ),
        (
            lambda t: t.update({"model.layers.0.connections.1.a": torch.ones(2)}),
            "tensors of a connection, like 'model.layers.0.connections.1.a' .* no key 'crosslayer'",
        ),
    ],
    ids=["missing", "no-head", "shape", "another-layer", "of-a-connection"],
)
def test_a_plain_model_is_complete(change, message, tmp_path):
    change_weights(save(tmp_path), change)
    assert_refused(open_model, tmp_path, message)


def test_what_a_plain_model_need_not_have(tmp_path):
    """A tied head is not in the file; a tower of another model may be."""
    save(tmp_path, tie_word_embeddings=True)
    change_weights(tmp_path, lambda t: t.update({"vision.proj.weight": torch.ones(2, 2)}))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert open_model(tmp_path).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crosslayer": ...}, "has lost the key 'crosslayer' that names its connection"),
        ({"crosslayer": ..., "model_type": "llama"}, "tensors of a connection, like 'model"),
        (
            {"crosslayer": ..., "model_type": "llama", "crosslayer_widths": [48] * 3},
            "has lost the key",
        ),
        ({"crosslayer": None}, "'crosslayer' must name a connection, like .* got None"),
        ({"crosslayer": ""}, "'crosslayer' must name a connection, like .* got ''"),
        ({"crosslayer_widths": 3}, "crosslayer_widths must be a list of one width a layer, got 3"),
        ({"crosslayer_widths": [3, "a"]}, r"crosslayer_widths\[1\] must be a whole number"),
        ({"architectures": ["pipeline"]}, "unknown class 'pipeline' .*known for this type"),
        ({"architectures": ["LlamaPreTrainedModel"]}, "unknown class 'LlamaPreTrainedModel'"),
        ({"architectures": ["LlamaForCausalM"]}, r"did you mean 'LlamaForCausalLM'\?"),
        ({"model_type": "crosslayer-lama"}, r"unknown model type 'lama' .did you mean 'llama'\?"),
        ({"model_type": "crosslayer-crosslayer-llama"}, "unknown model type 'crosslayer-llama'"),
        ({"hidden_act": "none"}, "KeyError: 'none'"),
        ({"crosslayer": ..., "model_type": ...}, "its config.json has no model_type"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_of_a_connected_model(changes, message, tmp_path):
    configure(save(tmp_path, "mudd"), **changes)
    assert_refused(open_model, tmp_path, message)


def test_a_lost_key_is_refused_by_transformers_too(tmp_path):
    configure(save(tmp_path, "prenorm"), crosslayer=...)
    for load in (AutoModelForCausalLM.from_pretrained, type(llama()).from_pretrained):
        assert_refused(load, tmp_path, "has lost the key 'crosslayer'")


def test_folders_of_other_kinds(tmp_path):
    crosslayer.connect(llama().model, "mudd").save_pretrained(tmp_path / "headless")
    assert_refused(open_model, tmp_path / "headless", "a LlamaModel is no language model")
    (save(tmp_path / "adapter") / "adapter_config.json").write_text("{}")
    assert_refused(open_model, tmp_path / "adapter", "holds an adapter of PEFT")


CODE = "import pathlib; pathlib.Path({marker!r}).touch()\n\nclass X: pass\n"
EVIL = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.X", "AutoProcessor": "evil.X"}


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("crosslayer-llama", "AutoProcessor"),
        pytest.param("crosslayer-llama", "X", marks=pytest.mark.slow),
        pytest.param("llama", "AutoProcessor", marks=pytest.mark.slow),
        pytest.param("llama", "X", marks=pytest.mark.slow),
        pytest.param("unknown", "AutoProcessor", marks=pytest.mark.slow),
    ],
)
def test_no_command_runs_code_of_a_folder(
    model_type, tokenizer_class, tmp_path, monkeypatch, capsys
):
    """Not even where standard input says yes."""
    spec = "mudd" if model_type == "crosslayer-llama" else None
    folder = save(tmp_path / "model", spec, vocab_size=256)
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(marker=str(marker)))
    configure(
        folder,
        model_type=model_type,
        auto_map=EVIL,
        tokenizer_class=tokenizer_class,
        attn_implementation="evil/kernel",
        _attn_implementation="evil/kernel",
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "eos_token": "a"})
    )
    generation = {"penalty_alpha": 0.6, "top_k": 4, "custom_generate": str(folder)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "text.txt").write_text("Some text. " * 9)
    text = str(tmp_path / "text.txt")
    commands = [
        ["generate", str(folder), "--max-new-tokens", "1"],
        ["generate", str(folder), "y", "--max-new-tokens", "1"],
        ["eval", str(folder), "--text", text, "--context", "8"],
        ["convert", str(folder), str(tmp_path / "out")],
        ["data", "prepare", text, "--out", str(tmp_path / "data"), "--tokenizer", str(folder)],
        ["train", "--data", text, "--tokenizer", str(folder), "--out", str(tmp_path / "run")],
        ["train", "--data", text, "--pretrained", str(folder), "--lr=1e-4", "--context=8"],
        ["inspect", str(folder), "--data", text, "--out", str(tmp_path / "inspection")],
    ]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        code = main(command)
        last_line = capsys.readouterr().err.strip().rpartition("\n")[2]
        assert not marker.exists(), command
        assert code == 0 or last_line.startswith("crosslayer: "), last_line
    if model_type != "unknown":
        # The connection is known and the weights are complete: no reason to refuse them.
        assert open_model(folder).config.model_type == "llama"


def test_a_model_has_the_dtype_that_is_asked_for(tmp_path, checkpoint):
    published = checkpoint("transformerpp_baseline_dense_false_L4_D64")
    plain, connected_one = save(tmp_path / "plain"), save(tmp_path / "connected", "prenorm")
    for folder in (plain, connected_one, published):
        assert open_model(folder).dtype == torch.float32
        assert open_model(folder, "bfloat16").dtype == torch.bfloat16


def test_the_separator_is_the_first_of_the_known_ones(tmp_path):
    """Where no file names an eos_token; [SEP] ends a sentence, not a text."""
    definition = json.loads(byte_tokenizer_json())
    names = ("[SEP]", "</s>", "<|im_end|>")
    definition["added_tokens"] = [
        {
            "id": 256 + i,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, name in enumerate(names)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert open_tokenizer(tmp_path / "tokenizer.json").eos_token == "</s>"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_tokenizer_of_a_class_that_is_none(file, tmp_path):
    save(tmp_path)
    (tmp_path / file).write_text('{"tokenizer_class": "LlamaConfig"}')
    assert_refused(open_tokenizer, tmp_path, f"{file} names 'LlamaConfig', which is no tokenizer")


def test_rope_is_of_published_checkpoints(tmp_path):
    with_rope = partial(open_model, rope="exact")
    assert_refused(with_rope, save(tmp_path), "rope is an option of published")


def test_a_tokenizer_of_a_class_of_the_folders_own_is_read_from_its_file(tmp_path):
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MyTokenizer"}')
    assert open_tokenizer(tmp_path).encode("ab") == [97, 98]
