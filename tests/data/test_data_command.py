"""`crosslayer data` from the command line: prepare, show, verify, and one line for what is wrong."""

import json
import subprocess
import sys

import pytest

from crosslayer.cli.main import main


@pytest.fixture
def stories(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": f"{i}: the fox and {i * i} dogs.\n" * 9}) + "\n" for i in range(60)
        )
    )
    return str(path)


def test_prepare_show_verify(stories, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "data",
                "prepare",
                stories,
                "--tokenizer",
                "bpe:300",
                "--out",
                out,
                "--valid",
                f"same={stories}",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert main(["data", "show", out]) == 0
    shown = capsys.readouterr().out
    assert printed.endswith(shown), "what was prepared is shown"
    for word in ("train", "same", "uint16", "bpe:300", "documents", "60", "checksum"):
        assert word in shown
    assert main(["data", "verify", out]) == 0
    assert "2 shards are as they were written" in capsys.readouterr().out
    shard = tmp_path / "out" / "same-00000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-600] ^= 4
    shard.write_bytes(raw)
    assert main(["data", "verify", out]) == 1
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("1 of 2 shards are not as written: same-00000.safetensors")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prepare missing.txt --out {out}", "missing.txt: no such file or folder"),
        (
            "prepare {stories} --out {out} --tokeniser bytes",
            "unknown option --tokeniser (did you mean '--tokenizer'?)",
        ),
        (
            "prepare {stories} --out {out} --tokenizer byte",
            "unknown tokenizer 'byte' (did you mean 'bytes'?)",
        ),
        ("prepare {stories} --out {out} --valid some", "--valid some: expected NAME=SOURCE"),
        (
            "prepare {stories} --out {out} --valid a=x a=y",
            "--valid a=y: there are two validation sets a",
        ),
        ("prepare {stories} --out {out} --workers 0", "workers must be at least 1, got 0"),
        ("prepare {stories} --out {stories}", "a file is in the way of the folder"),
        ("show {out}", "out: not a prepared corpus, as it has no corpus.json"),
        ("verify {out}", "out: not a prepared corpus"),
        ("prepare {stories}", "out"),
        ("verfy {out}", "invalid choice: 'verfy'"),
    ],
)
def test_what_is_wrong_is_one_line(stories, tmp_path, capsys, arguments, message):
    given = [part.format(stories=stories, out=tmp_path / "out") for part in arguments.split()]
    assert main(["data", *given]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_imports_nothing_heavy():
    code = "import sys; from crosslayer.commands import data; data.parser(); print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {
        "transformers",
        "datasets",
        "pyarrow",
        "tokenizers",
        "lightning",
        "PIL",
        "rich",
    } & set(modules)


def test_a_stopped_preparation_says_so(stories, tmp_path, capsys, monkeypatch):
    from crosslayer.data import prepared

    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepared, "counted", stopped)
    assert main(["data", "prepare", stories, "--out", str(tmp_path / "out")]) == 130
    assert (
        "Stopped; nothing is left of it." in capsys.readouterr().out
        and not (tmp_path / "out").exists()
    )
