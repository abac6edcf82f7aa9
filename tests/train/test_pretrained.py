"""Runs that start from a pretrained model: its weights, its tokenizer, its connection."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM

import crosslayer
from crosslayer.cli.main import main
from crosslayer.convert.pretrained import open_id_tokenizer, open_model, open_tokenizer
from crosslayer.data.tokenizing import load_tokenizer
from crosslayer.testing.tiny_model import equal_tensors
from crosslayer.train.compare import Comparison
from crosslayer.train.comparison_results import ComparisonResults
from crosslayer.train.export import _write_tokenizer
from crosslayer.train.parallel import launch_fabric
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.settings import NEW_BACKBONE_OPTIONS, Settings
from crosslayer.train.task import LANGUAGE_TASK, build_model, load_examples
from crosslayer.train.trainer import Trainer

SIZES = ["--layers=2", "--dim=16", "--heads=2"]
STEPS = ["--steps=3", "--evals=1", "--batch=2", "--eval-batches=2", "--context=32", "--lr=6e-3"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i}: the quick brown fox jumps over {i * i}.\n" for i in range(400)))
    return path


@pytest.fixture(scope="module")
def model(text_file, tmp_path_factory):
    """A small trained model with a tokenizer of its own."""
    out = tmp_path_factory.mktemp("base") / "out"
    command = ["train", "--data", str(text_file), "--tokenizer=bpe:300", *SIZES, *STEPS]
    assert main([*command, "--out", str(out)]) == 0
    return out / "model"


def train(text_file, out, *extra):
    return main(["train", "--data", str(text_file), "--out", str(out), *STEPS, *extra])


@pytest.mark.parametrize("connection", ["prenorm", "mudd"])
def test_a_run_starts_from_the_weights(model, connection):
    settings = Settings.from_options(pretrained=str(model), context=32, lr=1e-3)
    assert settings.data.tokenizer == str(model)
    expected = open_model(model)
    ids = torch.randint(300, (2, 9))
    assert torch.equal(build_model(settings, connection, 300, 5)(ids).logits, expected(ids).logits)
    engine = replace(settings.engine, precision="bf16-true")
    assert build_model(settings._replace(engine=engine), connection, 300, 5).dtype == torch.bfloat16


def test_activations_are_those_of_training(model, text_file):
    """A loaded model is in evaluation mode, where checkpointed layers keep everything."""
    measured = {}
    for recompute in ("none", "layers"):
        options = {"data": str(text_file), "context": 32, "batch": 2, "recompute": recompute}
        options |= {"pretrained": str(model), "lr": 1e-3, "steps": 1, "evals": 1}
        settings = Settings.from_options(**options)
        trainer = Trainer(
            launch_fabric(settings.engine),
            build_model(settings, "prenorm", 300, 0),
            load_examples(settings, LANGUAGE_TASK),
            settings,
            Arm.from_row("prenorm"),
        )
        trainer.fit()
        assert trainer.model.training, "dropout is used"
        measured[recompute] = trainer.activation_bytes
    assert measured["layers"] < 0.7 * measured["none"]


def test_an_encoder_is_refused(text_file, tmp_path, capsys):
    """It would be trained on tokens that it sees."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(num_hidden_layers=1, vocab_size=256, **sizes)).save_pretrained(
        tmp_path / "encoder"
    )
    encoder = ["--pretrained", str(tmp_path / "encoder"), "--tokenizer=bytes"]
    assert train(text_file, tmp_path / "out", *encoder) == 1
    assert "sees the tokens that it would be scored by" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_of_connections_on_a_pretrained_model(model, text_file, tmp_path):
    out = tmp_path / "out"
    command = ["compare", "--data", str(text_file), "--pretrained", str(model), *STEPS]
    command += ["--arms", "prenorm", "mgr", "--out", str(out)]
    assert main(command) == 0
    results = json.loads((out / "results.json").read_text())
    assert not NEW_BACKBONE_OPTIONS & results["settings"].keys()
    plain, mgr = results["runs"]
    base = json.loads((model.parent / "result.json").read_text())
    assert plain["metrics"]["loss before training"] == pytest.approx(base["valid_loss"], abs=1e-6)
    assert plain["curve"][0][0] == 0 and len(plain["curve"]) == 2
    assert mgr["metrics"]["loss before training"] != plain["metrics"]["loss before training"]
    assert f"pretrained backbone {model}" in (out / "report.md").read_text()
    assert main(command) == 0 and len(json.loads((out / "results.json").read_text())["runs"]) == 2


def test_a_connected_model_goes_on_with_its_connection(model, text_file, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(text_file, first, "--pretrained", str(model), "--arm=mudd") == 0
    spelled_out = "--arm=mudd(dilation=1)"  # the default
    assert train(text_file, second, "--pretrained", str(first / "model"), spelled_out) == 0
    losses = [json.loads((run / "result.json").read_text()) for run in (first, second)]
    before = losses[1]["metrics"]["loss before training"]
    assert before == pytest.approx(losses[0]["valid_loss"], abs=1e-6)
    capsys.readouterr()
    assert train(text_file, tmp_path / "x", "--pretrained", str(first / "model")) == 1
    assert "is connected with mudd, got the connection prenorm" in capsys.readouterr().err


def test_a_resumed_run_does_not_start_again(model, text_file, tmp_path):
    """It goes on from its checkpoint, and the loss before training is evaluated once."""
    out, options = tmp_path / "out", ["--pretrained", str(model), "--arm=mudd", "--save-every=1"]
    assert train(text_file, out, *options) == 0
    once = crosslayer.from_pretrained(out / "model").state_dict()
    result = json.loads((out / "result.json").read_text())
    shutil.rmtree(out / "step-00000003")
    assert train(text_file, out, *options) == 0
    assert equal_tensors(once, crosslayer.from_pretrained(out / "model").state_dict())
    assert json.loads((out / "result.json").read_text())["curve"] == result["curve"]


def test_a_model_trained_on_bytes_goes_on_with_bytes(text_file, tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    assert train(text_file, base, *SIZES) == 0
    assert train(text_file, tuned, "--pretrained", str(base / "model"), "--arm=hyper") == 0
    assert load_tokenizer(str(tuned / "model")) == load_tokenizer("bytes")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--layers=3"], "layers describes another backbone than the pretrained one"),
        (["--reallocate=true"], "reallocate describes another backbone"),
        (["--context=64"], "context must be at most 32, the positions of"),
        (["--tokenizer=bpe:400"], "the data's tokenizer has 400 tokens and the embedding of"),
    ],
)
def test_what_does_not_fit_is_one_line(model, text_file, tmp_path, capsys, extra, message):
    assert train(text_file, tmp_path / "out", "--pretrained", str(model), *extra) == 1
    *_, error = capsys.readouterr().err.splitlines()
    assert message in error


def test_a_pretrained_model_needs_its_own_rate(model):
    """The default is many times that of a model that is trained further."""
    with pytest.raises(ValueError, match=r"lr is missing: .* try 1e-4 \(0\.006 is the default"):
        Settings.from_options(pretrained=str(model))


def test_options_of_a_new_backbone_are_refused(model):
    with pytest.raises(ValueError, match="router_z_loss describes another backbone"):
        Settings.from_options(pretrained=str(model), lr=1e-3, router_z_loss=0.1)
    with pytest.raises(ValueError, match="--scale tiny builds a small model with random weights"):
        Recipe(
            [Arm.from_row("mudd")], {}, "tiny", {"pretrained": str(model), "lr": 1e-3}
        ).settings()


def test_an_arm_of_a_recipe_may_be_pretrained(model, text_file, tmp_path):
    """It has its tokenizer, also where its results are read again."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "layers: 1\ndim: 16\nheads: 2\nlr: 0.001\narms: [prenorm, "
        f"{{name: P, connection: prenorm, pretrained: {model}}}]"
    )
    out = tmp_path / "out"
    command = ["compare", str(recipe), "--data", str(text_file), *STEPS, "--out", str(out)]
    assert main(command) == 0
    report = (out / "report.md").read_text()
    assert f"width 16, 2 heads and pretrained backbone {model}; 3 steps" in report
    results = ComparisonResults.from_json(json.loads((out / "results.json").read_text()))
    comparison = Comparison.from_results(results, out)
    tokenizers = [comparison.recipe.settings(arm).data.tokenizer for arm in comparison.arms]
    assert tokenizers == ["bytes", str(model)]
    replaced = load_recipe(recipe, pretrained=str(model), lr=1e-3).settings()
    assert replaced.model.layers == Settings.from_options().model.layers


def test_a_runs_folder_is_not_its_model(model, text_file, tmp_path, capsys):
    assert train(text_file, tmp_path / "out", "--pretrained", str(model.parent)) == 1
    assert f"its model is {model}" in capsys.readouterr().err


def test_the_model_keeps_its_tokenizer_and_its_ends(model, text_file, tmp_path):
    """A chat model has a template, further special tokens and a second token that ends a text."""
    chat = shutil.copytree(model, tmp_path / "chat")
    tokenizer = open_tokenizer(chat)
    tokenizer.bos_token, tokenizer.chat_template = "a", "{{ messages[0].content }}"
    tokenizer.save_pretrained(chat)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((chat / name).read_text())
        (chat / name).write_text(json.dumps(content | {"eos_token_id": [299, 298]}))
    assert train(text_file, tmp_path / "out", "--pretrained", str(chat), "--keep-models=1") == 0
    for saved in (tmp_path / "out" / "model", tmp_path / "out" / "models" / "step-000003"):
        again = open_tokenizer(saved)
        assert again.bos_token == "a" and again.chat_template == tokenizer.chat_template
        trained = open_model(saved)
        assert trained.config.eos_token_id == trained.generation_config.eos_token_id == [299, 298]
    # with a tokenizer of the data, that one is written
    assert train(text_file, tmp_path / "bytes", f"--pretrained={chat}", "--tokenizer=bytes") == 0
    assert open_tokenizer(tmp_path / "bytes" / "model").chat_template is None
    assert open_model(tmp_path / "bytes" / "model").config.eos_token_id == 0


def test_a_tokenizer_whose_end_is_an_ordinary_token(tmp_path):
    """A tokenizer.json may have no added tokens at all."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    definition = json.loads(backend.to_str())
    del definition["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    out.mkdir()
    _write_tokenizer(tokenizer, out)
    assert open_tokenizer(out).eos_token_id == open_id_tokenizer(out).end == tokenizer.end == 2
