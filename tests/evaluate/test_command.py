"""`crosslayer eval` from the command line: a table, results.json, and what is wrong in one line."""

import json
import subprocess
import sys

import pytest

import crosslayer
from crosslayer.cli.main import main
from crosslayer.evaluate import harness
from tests.evaluate.lms import byte_tokenizer, small_folder, tiny, write_lines


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    crosslayer.connect(tiny(256), "mudd(dilation=2)").save_pretrained(folder / "model")
    byte_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    small_folder(folder / "eval")
    (folder / "text.txt").write_text("A short text about a dog and a fox.\n")
    write_lines(
        folder / "spans.jsonl", [{"input": "Question: is it? Answer:", "target": " yes"}] * 3
    )
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(saved, *more: str) -> list[str]:
    return ["eval", str(saved / "model"), "--tokenizer", str(saved / "tokenizer.json"), *more]


def test_the_whole_command(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CROSSLAYER_DATA", str(saved))
    more = [
        "--tasks",
        "lambada",
        "piqa",
        "--fewshot",
        "0",
        "5",
        "--limit",
        "4",
        "--batch",
        "3",
        "--out",
    ]
    measured = ["--text", str(saved / "text.txt"), "--spans", str(saved / "spans.jsonl")]
    full = command(saved, *more, str(tmp_path / "out"), *measured, "--dtype", "bfloat16")
    assert main(full) == 0
    printed = capsys.readouterr().out
    for said in (
        "[1/6] lambada, 0-shot",
        "[4/6] piqa, 5-shot",
        "[5/6] text text.txt",
        "perplexity",
        "acc_norm",
        "–",
    ):
        assert said in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (
        results["settings"]["arm"] == "mudd(dilation=2)"
        and results["settings"]["dtype"] == "bfloat16"
    )
    assert [row["n"] for row in results["results"]] == [4, 4, 4, 4, 36, 3]
    assert main(full) == 0
    assert "[1/6]" not in capsys.readouterr().out, "nothing is done twice"
    assert main([*full, "--fewshot", "1"]) == 0
    assert "[1/4] lambada, 1-shot" in capsys.readouterr().out, "the folder takes more"
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["results"]) == 8


def test_requests_that_were_cut_are_said(saved, capsys):
    more = [
        "--tasks",
        "copa",
        "--fewshot",
        "5",
        "--limit",
        "2",
        "--context",
        "64",
        "--data",
        str(saved / "eval"),
    ]
    assert main(command(saved, *more)) == 0
    assert "cut from the left to the model's window: copa 4." in capsys.readouterr().out


def test_without_a_folder_it_makes_one_and_goes_on(saved, here, capsys):
    text = command(saved, "--text", str(saved / "text.txt"))
    assert main(text) == main([*text, "--stride", "8"]) == 0
    (folder,) = here.iterdir()
    assert f"Results: {folder.name}/results.json" in capsys.readouterr().out
    assert len(json.loads((folder / "results.json").read_text())["results"]) == 2
    assert main([*text, "--context", "16"]) == 0 and len(list(here.iterdir())) == 2, (
        "another setting, another folder"
    )


def test_stopped(saved, capsys, monkeypatch, tmp_path):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "run", stop)
    more = ["--tasks", "copa", "--data", str(saved / "eval"), "--out", str(tmp_path / "out")]
    assert main(command(saved, *more)) == 130
    assert (
        "Stopped. What had finished is kept: the same command goes on." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--tasks", "lambda"],
            "unknown task 'lambda' (did you mean 'lambada'?); known: lambada, hellaswag",
        ),
        (["--tasks", "piqa", "--data", "/nowhere/at/all"], "/nowhere/at/all: no such folder"),
        (["--tasks", "piqa"], "name their folder with --data, or set CROSSLAYER_DATA"),
        (["--text", "/nowhere/at/all"], "/nowhere/at/all: no such file or folder"),
        (["--spans", "/nowhere/at/all"], "/nowhere/at/all: cannot be read"),
        (["--limit", "0", "--text", "TEXT"], "limit must be at least 1, got 0"),
        (["--fewshot", "-1", "--text", "TEXT"], "fewshot must be at least 0, got -1"),
        (["--batch", "0", "--text", "TEXT"], "batch_size must be at least 1, got 0"),
        (
            ["--context", "1000", "--text", "TEXT"],
            "context must be from 2 to the model's 256, got 1000",
        ),
        (
            ["--stride", "300", "--text", "TEXT"],
            "stride must be from 1 to the context of 256, got 300",
        ),
        (
            ["--tokenizer", "/nowhere/at/all", "--text", "TEXT"],
            "/nowhere/at/all: no tokenizer there",
        ),
        (["--tokenizer", "TEXT", "--text", "TEXT"], "text.txt: not a tokenizer.json"),
        (
            ["--dtype", "float31", "--text", "TEXT"],
            "dtype must be one of auto, float32, bfloat16, float16",
        ),
        (["--device", "nothing", "--text", "TEXT"], "cannot use the device 'nothing'"),
        (["--task", "piqa"], "unknown option --task (did you mean '--tasks'?)"),
    ],
)
def test_bad_input_is_one_line(saved, tmp_path, more, message, capsys, monkeypatch):
    monkeypatch.delenv("CROSSLAYER_DATA", raising=False)
    more = [str(saved / "text.txt") if word == "TEXT" else word for word in more]
    assert main(command(saved, "--out", str(tmp_path / "out"), *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("crosslayer: ") and message in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": "a", "choices": ["b"]}\n', "line 1 lacks label; it has context, choices"),
        ('{"context": \n', "line 1 is not JSON"),
        ("[1, 2]\n", "line 1 is list, expected an object"),
        ("", "empty"),
        ('{"context": "a", "choices": ["b"], "label": 0}\n{"context":\n', "line 2 is not JSON"),
        ('{"context": "a", "choices": ["b"], "label": 1}\n', "line 1 has label 1 and 1 answers"),
        (
            '{"context": "a", "choices": ["b", 3], "label": 1}\n',
            "has choices ['b', 3], expected a list of texts",
        ),
        (
            '{"context": "a", "choices": ["b"], "label": "0"}\n',
            "line 1 has label '0', expected a number",
        ),
    ],
)
def test_a_bad_file_is_one_line(saved, tmp_path, content, message, capsys):
    (tmp_path / "piqa_val.jsonl").write_text(content)
    assert main(command(saved, "--tasks", "piqa", "--data", str(tmp_path))) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("crosslayer: ") and message in error


def test_a_folder_without_the_file(saved, tmp_path, capsys):
    assert main(command(saved, "--tasks", "piqa", "--data", str(tmp_path))) == 1
    assert "has no piqa_val.jsonl or piqa_val.jsonl.gz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("eval", "has no config.json"),
        ("nowhere", "no such folder, and no such model in the Hugging Face cache"),
    ],
)
def test_no_such_model(saved, model, message, capsys):
    assert main(["eval", str(saved / model), "--text", str(saved / "text.txt")]) == 1
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_tokenizer_of_another_model(saved, tmp_path, capsys):
    crosslayer.connect(tiny(64, 100), "prenorm").save_pretrained(tmp_path / "model")
    more = ["--tokenizer", str(saved / "tokenizer.json"), "--text", str(saved / "text.txt")]
    assert main(["eval", str(tmp_path / "model"), *more]) == 1
    assert (
        "has 257 tokens and the model's embedding 100 rows: not a pair" in capsys.readouterr().err
    )
    assert main(["eval", str(tmp_path / "model"), *more[2:]]) == 1
    assert "no tokenizer there; name its folder or file with --tokenizer" in capsys.readouterr().err


class Without:
    """Finds every module but the harness."""

    def find_spec(self, name, path, target=None):
        if name == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name=name)


def test_without_the_harness(saved, capsys, monkeypatch):
    for name in [name for name in sys.modules if name == "lm_eval" or name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    assert main(command(saved, "--text", str(saved / "text.txt"))) == 1
    assert "lm_eval is not installed; pip install 'crosslayer[eval]'" in capsys.readouterr().err


def test_import_is_light():
    heavy = ("transformers", "lm_eval", "datasets", "lightning")
    code = f"import sys, crosslayer.evaluate, crosslayer.commands.eval; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )
