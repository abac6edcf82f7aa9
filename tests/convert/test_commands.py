"""`crosslayer convert` and `crosslayer generate` from the command line."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import crosslayer
from tests.hf.backbones import llama

pytest.importorskip("jsonargparse")
from crosslayer.cli.main import main
from crosslayer.convert import load_published

CASE = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '. ' }}{% endfor %}"


def letters(size: int = 97) -> Tokenizer:
    """A letter a token, and words up to the vocabulary's size."""
    names = [*"abcdefghijklmnopqrstuvwxyz.,", "Ġ", *(f"Ġword{i}" for i in range(size))][:size]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(autouse=True)
def quiet():
    """As in a process of its own, where the command comes before transformers."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def folder(checkpoint):
    """A published checkpoint with a bare tokenizer.json."""
    path = checkpoint(CASE)
    letters().save(str(path / "tokenizer.json"))
    return path


def ran(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def greedy(model, tokenizer, prompt: str, length: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :]) + "\n"


def test_convert_and_generate(folder, tmp_path, capsys):
    code, out, err = ran(capsys, "convert", folder, tmp_path / "converted", "--rope", "bfloat16")
    assert (code, err) == (0, "") and re.fullmatch(
        r"\S+converted: Qwen3ForCausalLM with mudd\(round64=True, expand_last=True\), [\d,]+ parameters\n",
        out,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, load_published(folder, rope="bfloat16")(ids).logits)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = greedy(model, tokenizer, "hello", 12)
    assert ran(capsys, "generate", tmp_path / "converted", "hello", "--max-new-tokens", 12) == (
        0,
        expected,
        "",
    )
    on_the_fly = ran(
        capsys, "generate", folder, "hello", "--max-new-tokens", 12, "--rope", "bfloat16"
    )
    assert on_the_fly == (0, expected, "")


def test_in_a_process_of_its_own(folder):
    """Nothing but the text is printed."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "crosslayer.cli",
        "generate",
        str(folder),
        "hi",
        "--seed",
        "3",
    ]
    done = subprocess.run([*command, "--max-new-tokens", "3"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1


def test_dtype(folder, tmp_path, capsys):
    assert ran(capsys, "convert", folder, tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    )
    assert (
        ran(
            capsys,
            "generate",
            tmp_path / "out",
            "hello",
            "--dtype",
            "float32",
            "--max-new-tokens",
            2,
        )[0]
        == 0
    )


def test_sampling_follows_the_seed(folder, capsys):
    def sampled(*more):
        return ran(
            capsys, "generate", folder, "hello", "--temperature", 1.5, "--max-new-tokens", 20, *more
        )[1]

    assert sampled() == sampled() != sampled("--seed", 1)
    assert (
        sampled("--top-p", 1e-6)
        == ran(capsys, "generate", folder, "hello", "--max-new-tokens", 20)[1]
    )


def test_lines_from_stdin(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nworld\n"))
    code, out, _ = ran(capsys, "generate", folder, "--max-new-tokens", 6)
    alone = [
        ran(capsys, "generate", folder, word, "--max-new-tokens", 6)[1]
        for word in ("hello", "world")
    ]
    assert (code, out) == (0, "".join(alone))


def test_tokens_come_as_they_are_made(folder, monkeypatch):
    class Terminal(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += bool(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["generate", str(folder), "hello", "--max-new-tokens", "9"]) == 0
    assert sys.stdout.flushes >= 5, "a word is printed when the next begins"


@pytest.fixture
def connected(tmp_path):
    """A connected model's own folder, with a tokenizer that has a chat template and an end of text."""
    torch.manual_seed(1)
    model = crosslayer.connect(llama(), "mudd")
    model.save_pretrained(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters(), eos_token="z", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_conversation(connected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nmore\n"))
    code, out, err = ran(capsys, "generate", connected, "--max-new-tokens", 5)
    assert (code, err) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(connected)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(connected)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    first = greedy(model, tokenizer, "u hello. ", 5)
    second = greedy(model, tokenizer, f"u hello. a {first[:-1]}. u more. ", 5)
    assert out == first + second


def test_another_tokenizer(connected, folder, capsys):
    (connected / "tokenizer.json").unlink()
    (connected / "tokenizer_config.json").unlink()
    (connected / "chat_template.jinja").unlink(missing_ok=True)
    lacking = ran(capsys, "generate", connected, "hello")
    assert (
        lacking[0] == 1 and "has no tokenizer; name a tokenizer.json with --tokenizer" in lacking[2]
    )
    for given in (folder, folder / "tokenizer.json"):
        assert (
            ran(
                capsys, "generate", connected, "hello", "--tokenizer", given, "--max-new-tokens", 3
            )[0]
            == 0
        )


def test_the_end_of_a_text(folder):
    """The tokenizer's; a published config's default is a token like any other to it."""
    from types import SimpleNamespace as Some

    from crosslayer.cli.generate import ends

    def of(models, tokenizers, chat=None):
        model = Some(generation_config=Some(eos_token_id=models))
        return ends(model, Some(eos_token_id=tokenizers, chat_template=chat))

    assert (of(2, 0), of(2, None), of(None, None), of([3, 2], None)) == ([0], [2], None, [2, 3])
    assert (of([5, 6], 0, TEMPLATE), of(None, 0, TEMPLATE)) == ([0, 5, 6], [0])


WRONG = [
    (lambda f: ("generate", f / "no", "x"), r"no is no folder; generate takes a local one"),
    (lambda f: ("generate", f, "x", "--temperature", -1), "temperature must be at least 0, got -1.0"),
    (lambda f: ("generate", f, "x", "--top-p", 0), "top_p must be above 0 and at most 1, got 0.0"),
    (lambda f: ("generate", f, "x", "--max-new-tokens", 0), "max_new_tokens must be a whole number of at least 1"),
    (lambda f: ("generate", f, "x", "--max-new-token", 3), r"unknown option --max-new-token \(did you mean"),
    (lambda f: ("generate", f, "x", "--dtype", "half"), "dtype must be one of float32, bfloat16, float16, got 'half'"),
    (lambda f: ("generate", f, "x", "--device", "gpu"), "cannot use the device 'gpu'"),
    (lambda f: ("generate", f, "x", "--rope", "half"), "rope must be one of exact, bfloat16, float16, got 'half'"),
    (lambda f: ("generate", f, "x", "--tokenizer", f / "no"), "no has no tokenizer"),
    (lambda f: ("generate", f, "x", "--tokenizer", f / "config.json"), "cannot read the tokenizer of"),
    (lambda f: ("generate", f, ""), "the prompt has no tokens"),
    (lambda f: ("convert", f, f), "is there already; name a new or an empty folder"),
    (lambda f: ("convert", f, f.parent / "out", "--rope", "x"), "rope must be one of exact, bfloat16, float16"),
    (lambda f: ("convert", f.parent / "no", f.parent / "out"), r"has no config\.json"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_is_one_line(arguments, message, folder, capsys):
    code, out, err = ran(capsys, *arguments(folder))
    assert (code, out) == (1, "") and re.search(message, err), err
    assert err.startswith("crosslayer: ") and err.count("\n") == 1
    assert not (folder.parent / "out").exists()


def test_a_pickle_is_not_loaded(folder, connected, capsys):
    for path in (folder, connected):
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        torch.save(tensors, path / "pytorch_model.bin")
        code, _, err = ran(capsys, "generate", path, "x")
        assert (
            code == 1
            and "pytorch_model.bin is a pickle, which can run code and is never loaded" in err
        )


def test_a_tokenizer_of_another_model(folder, capsys):
    letters(300).save(str(folder / "tokenizer.json"))
    bigger = json.loads((folder / "tokenizer.json").read_text())
    vocab = bigger["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab["h"], vocab[last] = vocab[last], vocab["h"]
    (folder / "tokenizer.json").write_text(json.dumps(bigger))
    code, _, err = ran(capsys, "generate", folder, "hello")
    assert (
        code == 1
        and "the tokenizer gives the token 299, but the model has 97: it is another's" in err
    )


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
def test_the_tokenizer_of_the_published_models(checkpoint, capsys):
    """GPT-NeoX's, with a vocabulary of its size."""
    path = checkpoint(CASE, vocab_size=50432)
    tensors = load_file(path / "model.safetensors")
    for name in ("tok_embeddings.weight", "output.weight"):
        tensors[name] = torch.randn(50432, 64)
    save_file(tensors, path / "model.safetensors")
    file = Path(os.environ["CROSSLAYER_DATA"]) / "tokenizers" / "gpt_neox_20b_tokenizer.json"
    code, out, err = ran(
        capsys, "generate", path, "The sky is", "--tokenizer", file, "--max-new-tokens", 7
    )
    expected = greedy(
        load_published(path), PreTrainedTokenizerFast(tokenizer_file=str(file)), "The sky is", 7
    )
    assert (code, out, err) == (0, expected, "")
