"""`crosslayer eval` from the command line: tables, results.json, and one line for each error."""

import json

import pytest
import torch

from crosslayer.cli.main import main
from crosslayer.convert import open_tokenizer
from crosslayer.evaluate import text_perplexity
from crosslayer.files import lock_folder
from tests.evaluate.tiny_models import byte_tokenizer, tiny_model, write_lines

TEXT = "A short text about a dog and a fox.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A connected model as `crosslayer train` saves it, with a text and spans."""
    root = tmp_path_factory.mktemp("saved")
    tiny_model("mudd(dilation=2)", 256).save_pretrained(root / "model")
    byte_tokenizer().backend_tokenizer.save(str(root / "model" / "tokenizer.json"))
    (root / "text.txt").write_text(TEXT)
    write_lines(root / "spans.jsonl", [{"input": "Is it? Answer:", "target": " yes"}] * 3)
    return root


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["eval", *(str(a) for a in arguments)])
    return code, *capsys.readouterr()


def test_tasks_text_and_spans(folder, include_path, tmp_path, capsys):
    text, spans = folder / "text.txt", folder / "spans.jsonl"
    arguments = [folder / "model", "--tasks", "local_choice", "--include-path", include_path]
    arguments += ["--num-fewshot", 2, "--limit", 4, "--batch-size", 3, "--text", text]
    arguments += ["--spans", spans, "--out", tmp_path / "out"]
    code, printed, _ = run_command(capsys, *arguments)
    assert code == 0
    for shown in ("bits_per_byte", "loss_by_span", "local_choice", "acc_norm", "results.json"):
        assert shown in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["connection"] == "mudd(dilation=2)"
    assert results["tasks"]["n-samples"]["local_choice"]["effective"] == 4
    assert results["spans"][str(spans)]["spans"] == 3
    model = tiny_model("mudd(dilation=2)", 256)
    expected = text_perplexity(model, open_tokenizer(folder / "model"), [TEXT])
    assert results["text"][str(text)] == pytest.approx(expected._asdict(), rel=1e-6)
    # a finished evaluation is never overwritten
    code, _, error = run_command(capsys, *arguments)
    assert code == 1 and "results.json exists already; choose another folder" in error


def test_a_folder_in_use_is_refused(folder, tmp_path, capsys):
    arguments = [folder / "model", "--text", folder / "text.txt", "--out", tmp_path / "out"]
    with lock_folder(tmp_path / "out"):
        code, _, error = run_command(capsys, *arguments)
    assert code == 1 and f"{tmp_path / 'out'}: in use by process" in error
    assert not (tmp_path / "out" / "results.json").exists()


def test_dtype_and_context(folder, tmp_path, capsys):
    arguments = [folder / "model", "--text", folder / "text.txt", "--dtype", "bfloat16"]
    assert run_command(capsys, *arguments, "--context", 16, "--out", tmp_path)[0] == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["dtype"], results["context"]) == ("bfloat16", 16)


def test_a_plain_host_with_another_tokenizer(folder, tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "host")
    tokenizer = folder / "model" / "tokenizer.json"
    arguments = [tmp_path / "host", "--text", folder / "text.txt", "--tokenizer", tokenizer]
    assert run_command(capsys, *arguments)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate; name --tasks, --text or --spans"),
        (["--tasks", "x", "--include-path", "/no/tasks"], "/no/tasks: no such folder"),
        (["--text", "/no/file"], "/no/file: no such file or folder"),
        (["--spans", "/no/file"], "/no/file: cannot be read"),
        (["--text", "TEXT", "--context", "999"], "context must be from 2 to the model's 256"),
        (["--text", "TEXT", "--batch-size", "0"], "batch_size must be a whole number of at least"),
        (["--text", "TEXT", "--tokenizer", "/no/file"], "/no/file: no such folder or file"),
        (["--text", "TEXT", "--tokenizer", "TEXT"], "no tokenizer can be read from TEXT"),
        (["--text", "TEXT", "--dtype", "float31"], "dtype must be one of float32, bfloat16"),
        (["--text", "TEXT", "--device", "nothing"], "cannot use the device 'nothing'"),
        (["--task", "piqa"], "unknown option --task (did you mean '--tasks'?)"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(arguments, message, folder, tmp_path, capsys):
    text = str(folder / "text.txt")
    given = [text if word == "TEXT" else word for word in arguments]
    out = tmp_path / "out"
    code, printed, error = run_command(capsys, folder / "model", "--out", out, *given)
    last = error.strip().splitlines()[-1]
    assert (code, printed) == (1, "") and last.startswith("crosslayer: ")
    assert message.replace("TEXT", text) in last
    assert not out.exists()


def test_a_tokenizer_of_another_model(folder, tmp_path, capsys):
    tiny_model(vocab=100).save_pretrained(tmp_path / "model")
    tokenizer = folder / "model" / "tokenizer.json"
    arguments = [tmp_path / "model", "--text", folder / "text.txt", "--tokenizer", tokenizer]
    code, _, error = run_command(capsys, *arguments)
    assert code == 1 and "the tokenizer has 257 tokens and the model's embedding 100" in error
    code, _, error = run_command(capsys, *arguments[:3])
    assert code == 1 and "has no tokenizer; copy that of the original model" in error


def test_no_pickle_is_loaded(folder, tmp_path, capsys):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    tokenizer = folder / "model" / "tokenizer.json"
    arguments = [tmp_path, "--text", folder / "text.txt", "--tokenizer", tokenizer]
    code, _, error = run_command(capsys, *arguments)
    assert code == 1 and "pytorch_model.bin is a pickle" in error
