"""`crosslayer data`: prepare and show, and one line for wrong input."""

from pathlib import Path

import pytest

from crosslayer.cli import data as data_command
from crosslayer.cli.main import main
from crosslayer.data import prepared


def test_prepare_and_show(stories, tmp_path, capsys):
    out = str(tmp_path / "out")
    other = tmp_path / "other.jsonl"
    other.write_text(Path(stories).read_text())
    options = ["--tokenizer", "bpe:300", "--out", out, f"--valid.other={other}"]
    assert main(["data", "prepare", stories, *options]) == 0
    printed = capsys.readouterr().out
    assert main(["data", "show", out]) == 0
    shown = capsys.readouterr().out
    assert printed.endswith(shown), "what was prepared is shown"
    for word in (
        "train",
        "other",
        "bpe:300",
        "80",
        "vocabulary 300",
        "other begins with '0: the fox",
    ):
        assert word in shown


def test_a_log_file_has_lines_of_progress(stories, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_command, "_LINE_SECONDS", -1)  # a line for each document
    arguments = ["data", "prepare", stories, "--tokenizer", "bytes"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "train: 1 documents, 0.0 MB so far\ntrain: 2 documents, 0.0 MB so far\n" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prepare missing.txt --out {out}", "missing.txt: no such file or folder"),
        ("prepare {stories} --out {out} --tokeniser x", "unknown option --tokeniser (did you mean"),
        ("prepare {stories} --out {out} --tokenizer byte", "unknown tokenizer 'byte' (did you"),
        ("prepare {stories} --out {out} --valid a=x", "got 'a=x'; write --valid.NAME=VALUE"),
        ("prepare {stories} --out {out} --valid.a=x.bin", "x.bin: no such file or folder"),
        ("prepare {stories} --out {stories}", "a file is in the way of the output folder"),
        ("prepare {stories} --out .", ".: cannot be replaced; name a new folder"),
        ("prepare {stories}", "missing: out; see"),
        ("show {out}", "out: not a prepared corpus, it has no corpus.json"),
        ("shw {out}", "invalid choice: 'shw'"),
    ],
)
def test_wrong_input_is_one_line(stories, tmp_path, capsys, arguments, message):
    words = [word.format(stories=stories, out=tmp_path / "out") for word in arguments.split()]
    assert main(["data", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_stopped_preparation(stories, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepared, "encode_sets", stop)
    assert main(["data", "prepare", stories, "--out", str(tmp_path / "out")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["stories.jsonl"]
