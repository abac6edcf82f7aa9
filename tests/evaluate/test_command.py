"""`crosslayer eval` from the command line: tables, evaluation.json, and one line for each error."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from crosslayer.cli.main import main
from crosslayer.convert import open_tokenizer
from crosslayer.data.prepared import prepare_corpus
from crosslayer.evaluate import joined_perplexity
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
    arguments += ["--num-fewshot", 2, "--limit", 4, "--batch", 3, "--text", text]
    arguments += ["--spans", spans, "--out", tmp_path / "out"]
    code, printed, _ = run_command(capsys, *arguments)
    assert code == 0
    for shown in ("bits_per_byte", "loss_by_span", "local_choice", "acc_norm", "evaluation.json"):
        assert shown in printed
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert results["connection"] == "mudd(dilation=2)"
    assert results["tasks"]["n-shot"]["local_choice"] == 2
    assert results["tasks"]["n-samples"]["local_choice"]["effective"] == 4
    assert results["spans"][str(spans)]["spans"] == 3
    model = tiny_model("mudd(dilation=2)", 256)
    expected = joined_perplexity(model, open_tokenizer(folder / "model"), [TEXT])
    assert results["text"][str(text)] == pytest.approx(expected._asdict(), rel=1e-6)
    # a finished evaluation is never overwritten
    code, _, error = run_command(capsys, *arguments)
    assert code == 1 and "evaluation.json exists already; choose another folder" in error


def test_one_span(folder, tmp_path, capsys):
    """Its standard error is not known."""
    write_lines(tmp_path / "span.jsonl", [{"input": "Is it? Answer:", "target": " yes"}])
    code, printed, _ = run_command(
        capsys, folder / "model", "--spans", tmp_path / "span.jsonl", "--out", tmp_path / "out"
    )
    assert code == 0 and "not known" in printed
    (result,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["spans"].values()
    assert result["loss_by_span_stderr"] is None


def test_what_was_measured_is_kept_when_a_text_fails(folder, include_path, tmp_path, capsys):
    """And printed; the same command can be given again, and leaves only the finished file."""
    text, short = str(folder / "text.txt"), tmp_path / "short.txt"
    short.write_text("a")
    arguments = [folder / "model", "--tasks", "local_choice", "--include-path", include_path]
    arguments += ["--limit", 2, "--text", text, short, "--out", tmp_path / "out"]
    code, printed, error = run_command(capsys, *arguments)
    assert code == 1 and "short.txt: the text has no token to score" in error
    assert "bits_per_byte" in printed
    file = tmp_path / "out" / "evaluation.json"
    unfinished = file.with_name("evaluation.json.part")
    results = json.loads(unfinished.read_text())
    assert "tasks" in results and list(results["text"]) == [text]
    short.write_text(TEXT)
    assert run_command(capsys, *arguments)[0] == 0
    assert list(json.loads(file.read_text())["text"]) == [text, str(short)]
    assert not unfinished.exists()


def test_a_perplexity_beyond_any_number_is_null(folder, tmp_path, capsys):
    """JSON has no infinity. A text without white space is one word."""
    (tmp_path / "word.txt").write_text("a" * 400)
    arguments = [folder / "model", "--text", tmp_path / "word.txt", "--out", tmp_path]
    code, printed, _ = run_command(capsys, *arguments)
    assert code == 0 and "inf" in printed
    (result,) = json.loads((tmp_path / "evaluation.json").read_text())["text"].values()
    assert result["word_perplexity"] is None and result["perplexity"] > 1


@pytest.mark.parametrize("documents", ["joined", "apart"])
def test_token_ids_are_scored_as_their_text(folder, tmp_path, capsys, documents):
    """nanoGPT's file of two documents, one with two spaces and characters of 3 bytes."""
    rows = write_lines(tmp_path / "texts.jsonl", [{"text": TEXT}, {"text": "An  “older” text."}])
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"] + [256] + tokenizer("An  “older” text.")["input_ids"]
    np.array(ids, "<u2").tofile(tmp_path / "val.bin")
    valid = {"stories": str(rows)}
    prepare_corpus(str(rows), str(folder / "model"), tmp_path / "prepared", valid)
    arguments = [folder / "model", "--documents", documents, "--context", 16, "--out", tmp_path]
    files = [rows, tmp_path / "val.bin", tmp_path / "prepared"]
    assert run_command(capsys, *arguments, "--text", *files)[0] == 0
    results = json.loads((tmp_path / "evaluation.json").read_text())["text"]
    assert [Path(name).name for name in results] == ["texts.jsonl", "val.bin", "prepared@stories"]
    of_text, *of_ids = results.values()
    assert of_ids == [of_text, of_text] and of_text["tokens"] > 40


def test_ids_of_a_tokenizer_that_was_saved_again(folder, tmp_path, capsys):
    """transformers writes the same tokenizer differently. "bytes" is a tokenizer's name, too."""
    prepare_corpus(str(folder / "text.txt"), str(folder / "model"), tmp_path / "prepared")
    open_tokenizer(folder / "model").save_pretrained(tmp_path / "again")
    arguments = [folder / "model", "--text", tmp_path / "prepared", "--context", 8]
    assert run_command(capsys, *arguments, "--tokenizer", tmp_path / "again")[0] == 0
    tiny_model(vocab=256).save_pretrained(tmp_path / "bytes")
    np.array([*TEXT.encode(), 0] * 2, "<u2").tofile(tmp_path / "val.bin")
    arguments = [tmp_path / "bytes", "--text", tmp_path / "val.bin", "--tokenizer", "bytes"]
    assert run_command(capsys, *arguments, "--out", tmp_path)[0] == 0
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert results["tokenizer"] == "bytes"


def test_a_folder_prepared_with_another_tokenizer(folder, tmp_path, capsys):
    prepare_corpus(str(folder / "text.txt"), "bytes", tmp_path / "prepared")
    code, _, error = run_command(capsys, folder / "model", "--text", tmp_path / "prepared")
    assert code == 1 and "prepared with the tokenizer bytes, whose ids are not those of" in error


def test_a_folder_in_use_is_refused(folder, tmp_path, capsys):
    arguments = [folder / "model", "--text", folder / "text.txt", "--out", tmp_path / "out"]
    with lock_folder(tmp_path / "out"):
        code, _, error = run_command(capsys, *arguments)
    assert code == 1 and f"{tmp_path / 'out'}: in use by process" in error
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_dtype_and_context(folder, tmp_path, capsys):
    text, spans = folder / "text.txt", folder / "spans.jsonl"
    arguments = [folder / "model", "--text", text, "--spans", spans, "--dtype", "bfloat16"]
    assert run_command(capsys, *arguments, "--context", 16, "--out", tmp_path)[0] == 0
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert (results["dtype"], results["context"]) == ("bfloat16", 16)
    assert results["text"][str(text)]["tokens"] == 2 * 16, "two windows of 17 of the 36 bytes"
    assert results["spans"][str(spans)]["truncated"] == 3, "of 14 + 4 bytes each"


def test_the_context_of_tasks(folder, include_path, capsys):
    arguments = [folder / "model", "--tasks", "local_word", "--include-path", include_path]
    code, _, error = run_command(capsys, *arguments, "--context", 3)
    assert code == 1 and "an answer longer than the context of 3 tokens" in error


def test_a_plain_host_with_another_tokenizer(folder, tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "host")
    tokenizer = folder / "model" / "tokenizer.json"
    arguments = [tmp_path / "host", "--text", folder / "text.txt", "--tokenizer", tokenizer]
    losses = []
    for out in ("other", "own"):
        assert run_command(capsys, *arguments, "--out", tmp_path / out)[0] == 0
        results = json.loads((tmp_path / out / "evaluation.json").read_text())
        losses.append(results["text"][str(folder / "text.txt")])
        open_tokenizer(folder / "model").save_pretrained(tmp_path / "host")
        arguments = arguments[:3]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate; name --tasks, --text or --spans"),
        (["--tasks", "x", "--include-path", "/no/tasks"], "/no/tasks: no such folder"),
        (["--spans", "/no/spans", "--windows", "3"], "--windows is for --text; leave it out"),
        (["--text", "TEXT", "--num-fewshot", "3"], "--num-fewshot is for --tasks; leave it out"),
        (["--tasks", "x", "--num-fewshot", "-1"], "num_fewshot must be a number of at least 0"),
        (["--tasks", "x", "--limit", "0"], "limit must be a whole number of at least 1, got 0"),
        (["--text", "TEXT", "--context", "1"], "context must be at least 2, got 1"),
        (["--text", "/no/file"], "/no/file: no such file or folder"),
        (["--text", "/no/val.bin"], "/no/val.bin: no such file or folder"),
        (["--text", "ONE_ID"], "ONE_ID: the text has no token to score"),
        (["--spans", "/no/file"], "/no/file: cannot be read"),
        (["--text", "TEXT", "--context", "999"], "context must be from 2 to the model's 256"),
        (["--text", "TEXT", "--batch", "0"], "batch must be a whole number of at least"),
        (["--text", "TEXT", "--tokenizer", "/no/file"], "/no/file: no such folder or file"),
        (["--text", "TEXT", "--tokenizer", "TEXT"], "no tokenizer can be read from TEXT"),
        (["--text", "TEXT", "--dtype", "float31"], "dtype must be one of float32, bfloat16"),
        (["--text", "TEXT", "--device", "nothing"], "cannot use the device 'nothing'"),
        (["--text", "TEXT", "--device", "meta"], "cannot use the device 'meta' (Cannot copy out"),
        (["--text", "TEXT", "--windows", "0"], "windows must be a whole number of at least 1"),
        (["--text", "TEXT", "--documents", "apart", "--windows", "2"], "--windows is for joined"),
        (["--text", "TEXT", "--documents", "alone"], "--documents must be one of 'joined',"),
        (["--task", "piqa"], "unknown option --task (did you mean '--tasks'?)"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(arguments, message, folder, tmp_path, capsys):
    text = str(folder / "text.txt")
    one_id = str(tmp_path / "one.bin")
    np.array([7], "<u2").tofile(one_id)
    places = {"TEXT": text, "ONE_ID": one_id}
    given = [places.get(word, word) for word in arguments]
    out = tmp_path / "out"
    code, printed, error = run_command(capsys, folder / "model", "--out", out, *given)
    last = error.strip().splitlines()[-1]
    assert (code, printed) == (1, "") and last.startswith("crosslayer: ")
    assert message.replace("TEXT", text).replace("ONE_ID", one_id) in last
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


def write_tokenizer(path, end: str, config: dict | None) -> str:
    """A tokenizer.json whose token `end` is the last, perhaps with a tokenizer_config.json."""
    path.mkdir()
    tokenizer = byte_tokenizer(None).backend_tokenizer
    tokenizer.add_special_tokens(["<s>", end])
    tokenizer.save(str(path / "tokenizer.json"))
    if config is None:
        return str(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


SLOW_PAIRS = [("llama", "config")]
SLOW_PAIRS += [
    (family, "file")
    for family in (
        "mistral", "qwen2", "qwen3", "arcee", "olmo", "mixtral", "olmoe", "gemma2", "gemma3_text",
        "olmo2", "phi3", "gpt2", "gpt_neox",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "tokenizer"),
    [
        ("granite", "bytes"),
        ("llama", "file"),
        pytest.param("gpt_neox", "bpe:270", marks=pytest.mark.slow),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS),
    ],
)
def test_eval_reads_what_train_ends_with(family, tokenizer, tmp_path, capsys):
    """Documents joined by the tokenizer's end, and a vocabulary padded beyond the tokenizer's."""
    if tokenizer == "file":
        tokenizer = write_tokenizer(tmp_path / "tokenizer", "</s>", None)
    elif tokenizer == "config":
        config = {"eos_token": "<stop>", "tokenizer_class": "GPT2Tokenizer"}
        tokenizer = write_tokenizer(tmp_path / "tokenizer", "<stop>", config)
    text, valid = tmp_path / "text.txt", tmp_path / "valid.jsonl"
    text.write_text("".join(f"{i}: a dog and a fox, {i * i} “naïve” dogs.\n" for i in range(60)))
    write_lines(valid, [{"text": f"{i} foxes saw {i * i} dogs, Ā."} for i in range(30)])
    sizes = [
        "--layers",
        "2",
        "--dim",
        "32",
        "--heads",
        "2",
        "--context",
        "16",
        "--batch",
        "2",
        "--steps",
        "2",
        "--vocab",
        "320",
    ]
    command = ["train", "--family", family, "--data", text, "--tokenizer", tokenizer, *sizes]
    command += ["--valid", json.dumps({"v": str(valid)}), "--arm", "mudd", "--out", tmp_path]
    assert main([str(word) for word in command]) == 0
    trained = json.loads((tmp_path / "result.json").read_text())
    measured = {}
    for out, windows in (("same", ["--windows", 24]), ("all", [])):  # train evaluates 12 · 2
        arguments = [tmp_path / "model", "--text", valid, "--out", tmp_path / out, *windows]
        assert run_command(capsys, *arguments)[0] == 0
        results = json.loads((tmp_path / out / "evaluation.json").read_text())
        measured[out] = results["text"][str(valid)]
    same, of_all = measured["same"], measured["all"]
    assert same["loss"] == pytest.approx(trained["valid_loss"], rel=1e-6)
    assert same["bits_per_byte"] == pytest.approx(trained["metrics"]["bits/byte"], rel=1e-6)
    assert same["tokens"] == 24 * 16 < of_all["tokens"]
    assert of_all["loss"] != same["loss"]
    if tokenizer == "bytes":  # with a separator between two documents
        stream = sum(len(f"{i} foxes saw {i * i} dogs, Ā.".encode()) for i in range(30)) + 29
        assert of_all["tokens"] == stream // 17 * 16
