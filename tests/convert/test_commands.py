"""`crosslayer convert` and `crosslayer generate` from the command line."""

import errno
import io
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import crosslayer
from crosslayer.cli.generate import parser as generate_parser
from crosslayer.cli.main import main
from crosslayer.convert import load_published, open_tokenizer
from tests.hf.backbones import build, llama

CASE = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
# A process of its own silences transformers before its import.
pytestmark = pytest.mark.usefixtures("no_progress_bars")


def letter_tokenizer(size: int = 97) -> Tokenizer:
    """One token for each letter, and words up to the size of the vocabulary."""
    names = [*"abcdefghijklmnopqrstuvwxyz.,", "Ġ", *(f"Ġword{i}" for i in range(size))][:size]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def folder(checkpoint):
    """A published checkpoint with a tokenizer.json alone, as `crosslayer train` writes it too."""
    path = checkpoint(CASE)
    letter_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def connected(tmp_path):
    """A saved connected model without a tokenizer."""
    torch.manual_seed(1)
    crosslayer.connect(llama(), "mudd").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def generate(capsys, *arguments: object) -> str:
    code, printed, error = run_command(capsys, "generate", *arguments)
    assert (code, error) == (0, "")
    return printed


def greedy_text(model, tokenizer, prompt: str, length: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :]) + "\n"


def test_convert_and_generate(folder, tmp_path, capsys):
    out = tmp_path / "converted"
    code, printed, error = run_command(capsys, "convert", folder, out, "--rope", "bfloat16")
    expected = r"\S+converted: Qwen3ForCausalLM with mudd\(round64=True, expand_last=True\), [\d,]+"
    assert (code, error) == (0, "") and re.fullmatch(expected + " parameters\n", printed)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, load_published(folder, rope="bfloat16")(ids).logits)
    text = greedy_text(model, open_tokenizer(folder), "hello", 12)
    assert generate(capsys, out, "hello", "--max-new-tokens", 12) == text
    # the published checkpoint itself, converted on the fly
    options = ["--max-new-tokens", 12, "--rope", "bfloat16"]
    assert generate(capsys, folder, "hello", *options) == text


@pytest.mark.slow
def test_only_the_text_is_printed(folder):
    """In a process of its own, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-m", "crosslayer", "generate", str(folder), "hi"]
    done = subprocess.run([*command, "--max-new-tokens", "3"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1


def test_dtype(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_command(capsys, "convert", folder, out, "--dtype", "bfloat16")[0] == 0
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    model = crosslayer.from_pretrained(out, dtype=torch.float32)
    text = greedy_text(model, open_tokenizer(out), "hello", 12)
    assert generate(capsys, out, "hello", "--dtype", "float32", "--max-new-tokens", 12) == text


def test_sampling_depends_on_the_seed(folder, capsys):
    def sample(*more):
        options = ["--temperature", 1.5, "--max-new-tokens", 20, *more]
        return generate(capsys, folder, "hello", *options)

    assert sample() == sample() != sample("--seed", 1)
    greedy = generate(capsys, folder, "hello", "--max-new-tokens", 20)
    assert sample("--top-p", 1e-6) == sample("--temperature", 1e-6) == greedy


def test_a_prompt_on_each_line_of_stdin(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nworld\n"))
    printed = generate(capsys, folder, "--max-new-tokens", 6)
    each = [generate(capsys, folder, word, "--max-new-tokens", 6) for word in ("hello", "world")]
    assert printed == "".join(each)


def test_the_text_ends_with_the_context(tmp_path, capsys):
    """GPT-2 has no position after its last one."""
    model = crosslayer.connect(build("gpt2", max_position_embeddings=16), "hyper")
    model.save_pretrained(tmp_path)
    letter_tokenizer().save(str(tmp_path / "tokenizer.json"))
    code, printed, error = run_command(capsys, "generate", tmp_path, "hello")
    assert (code, error) == (0, "crosslayer: at most 11 new tokens fit the context of 16\n")
    assert printed == greedy_text(model, open_tokenizer(tmp_path), "hello", 11)
    code, _, error = run_command(capsys, "generate", tmp_path, "a" * 16)
    assert code == 1 and "the prompt has 16 tokens, but the model's context of 16 must" in error


def test_a_prompt_that_is_no_text(folder, capsys):
    code, _, error = run_command(capsys, "generate", folder, "\udcff")
    assert (code, error) == (1, "crosslayer: the prompt is not UTF-8 text\n")


def test_text_is_printed_while_it_is_generated(folder, monkeypatch):
    class Terminal(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += bool(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["generate", str(folder), "hello", "--max-new-tokens", "9"]) == 0
    assert sys.stdout.flushes >= 5  # a word is printed when the next one begins


def test_generation_ends_at_the_tokenizers_end(folder, capsys):
    """A published config's eos_token_id may be a default of its class."""
    ids = open_tokenizer(folder)("hello", return_tensors="pt")["input_ids"]
    first = letter_tokenizer().id_to_token(load_published(folder)(ids).logits[0, -1].argmax())
    assert generate(capsys, folder, "hello", "--max-new-tokens", 12) != "\n"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letter_tokenizer(), eos_token=first)
    tokenizer.save_pretrained(folder)
    assert generate(capsys, folder, "hello", "--max-new-tokens", 12) == "\n"


def test_an_end_that_the_tokenizer_appends_is_no_part_of_the_prompt(folder, capsys):
    expected = generate(capsys, folder, "hello", "--max-new-tokens", 12)
    letters = letter_tokenizer()
    end = "z"
    letters.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, letters.token_to_id(end))]
    )
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    assert generate(capsys, folder, "hello", "--max-new-tokens", 12) == expected


def test_another_tokenizer(connected, folder, capsys):
    code, _, error = run_command(capsys, "generate", connected, "hello")
    assert (
        code == 1
        and "has no tokenizer; copy that of the original" in error
        and "--tokenizer" in error
    )
    model = crosslayer.from_pretrained(connected)
    expected = greedy_text(model, open_tokenizer(folder), "hello", 3)
    for tokenizer in (folder, folder / "tokenizer.json"):
        options = ["--tokenizer", tokenizer, "--max-new-tokens", 3]
        assert generate(capsys, connected, "hello", *options) == expected


def test_an_empty_tokenizer_of_the_models_type_is_none(tmp_path, capsys):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    code, _, error = run_command(capsys, "generate", tmp_path / "model", "hello")
    assert code == 1 and "model has no tokenizer; copy that of the original model" in error


def test_an_empty_prompt_begins_a_text(folder, capsys):
    """With the token that begins texts, where the tokenizer has one."""
    (folder / "tokenizer_config.json").write_text('{"bos_token": "a"}')
    tokens = ("--max-new-tokens", "4")
    begun = generate(capsys, folder, "", *tokens)
    assert begun.strip() and begun == generate(capsys, folder, "a", *tokens)
    assert begun != generate(capsys, folder, "b", *tokens)


def test_a_tokenizer_of_another_model(folder, capsys):
    letter_tokenizer(300).save(str(folder / "tokenizer.json"))
    code, _, error = run_command(capsys, "generate", folder, "hello")
    assert code == 1 and "the tokenizer has 300 tokens and the model's embedding 97" in error


def test_no_pickle_is_loaded(folder, connected, capsys):
    (connected / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    for path in (folder, connected):
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        torch.save(tensors, path / "pytorch_model.bin")
        code, _, error = run_command(capsys, "generate", path, "x")
        assert code == 1 and "pytorch_model.bin is a pickle, which can run code" in error


def test_no_code_of_a_checkpoint_is_run(connected, folder, capsys):
    """A folder of a class that only its own code knows is refused, without a question."""
    (connected / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (connected / "code.py").write_text("raise AssertionError('this code must not run')\n")
    config = '{"model_type": "own-code", "auto_map": {"AutoConfig": "code.Config"}}'
    (connected / "config.json").write_text(config)
    code, _, error = run_command(capsys, "generate", connected, "x")
    assert code == 1 and "code that comes with a checkpoint (auto_map) is never run" in error


ERRORS = [
    (["generate", "FOLDER/no", "x"], "no: no such folder or file"),
    (
        ["generate", "FOLDER", "x", "--temperature", "-1"],
        "temperature must be a number of at least",
    ),
    (["generate", "FOLDER", "x", "--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
    (["generate", "FOLDER", "x", "--top-p", "0.9"], "top_p needs a temperature: without one, no "),
    (
        ["generate", "FOLDER", "x", "--temperature", "1e-30"],
        "temperature must be 0 or at least 1e-06, got 1e-30",
    ),
    (["generate", "FOLDER", "x", "--seed", "-1"], "seed must be from 0 to 9223372036854775807"),
    (["generate", "FOLDER", "x", "--max-new-tokens", "0"], "max_new_tokens must be a whole number"),
    (
        ["generate", "FOLDER", "x", "--max-new-token", "3"],
        "unknown option --max-new-token (did you",
    ),
    (["generate", "FOLDER", "x", "--dtype", "half"], "dtype must be one of float32, bfloat16"),
    (["generate", "FOLDER", "x", "--device", "gpu"], "cannot use the device 'gpu'"),
    (["generate", "FOLDER", "x", "--rope", "half"], "rope must be one of exact, bfloat16, float16"),
    (["generate", "FOLDER", "x", "--tokenizer", "FOLDER/config.json"], "no tokenizer can be read"),
    (["generate", "FOLDER", ""], "the prompt has no tokens, and no token is known that begins"),
    (["convert", "FOLDER", "FOLDER"], "not empty; choose another folder, or remove it"),
    (["convert", "FOLDER", "FOLDER/out", "--rope", "x"], "rope must be one of exact, bfloat16"),
    (["convert", "FOLDER/no", "FOLDER/out"], "no such folder; download the checkpoint first"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_an_error_is_one_line(arguments, message, folder, capsys):
    given = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    code, printed, error = run_command(capsys, *given)
    assert (code, printed) == (1, "") and message in error
    assert error.startswith("crosslayer: ") and error.count("\n") == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize("prompt", ["# Introduction", "null", "~", "{a: 1}", "7"])
def test_a_prompt_is_not_read_as_yaml(prompt):
    assert generate_parser().parse_args(["model", prompt]).prompt == prompt


def test_a_conversion_that_fails_leaves_no_folder(folder, tmp_path, monkeypatch, capsys):
    def fill_disk(model, path):
        (path / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", fill_disk)
        assert run_command(capsys, "convert", str(folder), str(tmp_path / "out"))[0] == 1
    assert list(tmp_path.glob("out*")) == []
    assert run_command(capsys, "convert", str(folder), str(tmp_path / "out"))[0] == 0
    assert list(tmp_path.glob("out*")) == [tmp_path / "out"]
