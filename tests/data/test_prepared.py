"""Prepared folders: written once, complete or absent, and mapped rather than read."""

import json
import multiprocessing
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest

from crosslayer.data.prepared import open_prepared, prepare_corpus
from crosslayer.data.sources import read_documents
from tests.data.conftest import STORIES
from tests.support.errors import error_message


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_what_a_folder_holds(stories, tmp_path, name):
    progress = []
    folder = tmp_path / "new" / "out"
    prepared = prepare_corpus(
        stories, name, folder, progress=lambda *arguments: progress.append(arguments)
    )
    expected = {"corpus.json", "dataset_dict.json", "train", "held-out"}
    if name != "bytes":
        expected.add("tokenizer.json")
    assert {path.name for path in folder.iterdir()} == expected
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    train, held_out = prepared.counts["train"], prepared.counts["held-out"]
    assert train.documents + held_out.documents == len(progress) == len(STORIES)
    text_bytes = sum(len(text.encode()) + 1 for text in STORIES) - 2
    assert train.text_bytes + held_out.text_bytes == text_bytes
    assert dict(progress) == prepared.counts, "the last call for each set has its totals"
    assert prepared.source == stories and prepared.tokenizer.name == name
    again = prepare_corpus(stories, name, tmp_path / "again")
    assert again.counts == prepared.counts
    for part, stream in prepared.streams.items():
        assert again.streams[part].digest == stream.digest


def test_datasets_alone_can_read_it(stories, tmp_path):
    prepare_corpus(stories, "bytes", tmp_path / "out", {"all": stories})
    rows = datasets.load_from_disk(str(tmp_path / "out"))["all"]
    assert [bytes(row).decode() for row in rows["tokens"]] == [
        "\0" * bool(number) + text for number, text in enumerate(STORIES)
    ]


def test_a_long_document_is_several_rows(stories, tmp_path, monkeypatch):
    """Arrow counts the tokens of the rows that it buffers in 32 bits."""
    whole = prepare_corpus(stories, "bytes", tmp_path / "whole")
    monkeypatch.setattr("crosslayer.data.prepared.ROW_TOKENS", 7)
    split = prepare_corpus(stories, "bytes", tmp_path / "split")
    assert split.counts == whole.counts
    assert max(len(row) for row in split.streams["train"].ids["tokens"]) == 7
    assert split.streams["train"].digest == whole.streams["train"].digest


def test_tokens_are_mapped_not_read(stories, tmp_path):
    prepare_corpus(stories, "bytes", tmp_path / "out")
    (file,) = (tmp_path / "out" / "train").glob("*.arrow")
    before = pyarrow.total_allocated_bytes()
    stream = open_prepared(tmp_path / "out").streams["train"]
    stream.window(0, 500)
    assert pyarrow.total_allocated_bytes() - before < len(stream)
    # an id changed in the file is seen through the map
    first_ids = np.frombuffer(STORIES[0].encode(), np.uint8).astype(np.uint16)
    with file.open("r+b") as opened:
        opened.seek(file.read_bytes().index(first_ids.tobytes()))
        opened.write(b"\x07\x00")
    assert first_ids[0] != 7 and stream.window(0, 1).tolist() == [7]


def test_a_folder_in_use_is_left_alone(stories, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    assert "mine: not empty" in error_message(prepare_corpus, stories, "bytes", folder)
    assert "in the way" in error_message(prepare_corpus, stories, "bytes", folder / "thesis.txt")
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    prepare_corpus(stories, "bytes", tmp_path / "out")
    assert "out: not empty" in error_message(prepare_corpus, stories, "bytes", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    prepare_corpus(stories, "bytes", tmp_path / "empty")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("bad.jsonl", "bytes", "line 81: not JSON"),
        ("bad.jsonl", "bpe:300", "line 81: not JSON"),
        ("nowhere", "bytes", "no such file"),
        ("stories.jsonl", "bites", "unknown tokenizer"),
        ("short.txt", "bytes", "too little text, its set train is empty"),
        ("out", "bytes", "holds token ids, not text"),
    ],
)
def test_a_failure_leaves_nothing(stories, tmp_path, source, name, message):
    (tmp_path / "bad.jsonl").write_text(Path(stories).read_text() + "{")
    (tmp_path / "short.txt").write_text("a")
    prepare_corpus(stories, "bytes", tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    assert message in error_message(prepare_corpus, str(tmp_path / source), name, tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_preparation_leaves_nothing(stories, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(stories, "bytes", tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["stories.jsonl"]


def _prepare_slowly(source: str, folder: Path) -> None:
    prepare_corpus(source, "bytes", folder, progress=lambda *_: time.sleep(0.1))


@pytest.mark.slow
def test_a_killed_preparation_starts_over(stories, tmp_path):
    folder = tmp_path / "out"
    # not a fork, which would share tqdm's lock with this process and be killed while it holds it
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_slowly, args=(stories, folder)
    )
    process.start()
    while not (tmp_path / "out.part" / "train.arrow").exists():
        assert process.is_alive()
        time.sleep(0.01)
    message = f"out.part: in use by process {process.pid} on "
    assert message in error_message(prepare_corpus, stories, "bytes", folder)
    process.kill()
    process.join()
    assert (tmp_path / "out.part").exists() and not folder.exists()
    prepared = prepare_corpus(stories, "bytes", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stories.jsonl"]
    assert prepared.counts == prepare_corpus(stories, "bytes", tmp_path / "other").counts


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


DAMAGES = {
    "truncated data": lambda out: (
        [f.write_bytes(f.read_bytes()[:-3000]) for f in (out / "train").glob("*.arrow")]
    ),
    "no data": lambda out: [f.unlink() for f in (out / "train").glob("*.arrow")],
    "data of another": lambda out: (
        (out / "train").rename(out / "x") and (out / "held-out").rename(out / "train")
    ),
    "no tokenizer": lambda out: (out / "tokenizer.json").unlink(),
    "another tokenizer": lambda out: (out / "tokenizer.json").write_text("{}"),
    "not json": lambda out: (out / "corpus.json").write_text("{"),
    "empty json": lambda out: (out / "corpus.json").write_text("{}"),
    "another format": lambda out: change_json(out / "corpus.json", format="crosslayer tokens 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_line(stories, tmp_path, damage):
    folder = tmp_path / "out"
    prepare_corpus(stories, "bpe:300", folder)
    DAMAGES[damage](folder)
    assert "out: damaged, prepare it again (" in error_message(open_prepared, folder)


def test_a_description_of_the_wrong_shape_is_one_line(stories, tmp_path):
    folder = tmp_path / "out"
    prepare_corpus(stories, "bytes", folder)
    right = json.loads((folder / "corpus.json").read_text())
    train = right["sets"]["train"]
    wrong = [
        {"sets": {}},
        {"sets": [1]},
        {"sets": {"train": [1]}},
        {"sets": {"train": train | {"text_bytes": "x"}}},
        {"sets": {"train": train | {"documents": 0}}},
        {"tokenizer": []},
        {"tokenizer": right["tokenizer"] | {"vocab": "x"}},
        {"tokenizer": right["tokenizer"] | {"end": None}},
        {"digests": {"train": 3}},
        {"digests": []},
    ]
    for values in wrong:
        (folder / "corpus.json").write_text(json.dumps(right | values))
        assert "out: damaged, prepare it again (" in error_message(open_prepared, folder), values
    for text in ("[]", "[" * 100_000, "3"):
        (folder / "corpus.json").write_text(text)
        assert "out: damaged, prepare it again (" in error_message(open_prepared, folder), text


def test_counts_beyond_two_billion(stories, tmp_path):
    folder = tmp_path / "out"
    prepare_corpus(stories, "bytes", folder)
    description = json.loads((folder / "corpus.json").read_text())
    description["sets"]["train"]["text_bytes"] = 3_000_000_000
    (folder / "corpus.json").write_text(json.dumps(description))
    assert open_prepared(folder).counts["train"].text_bytes == 3_000_000_000


def test_not_a_prepared_folder(tmp_path):
    assert "not a prepared corpus, it has no corpus.json" in error_message(open_prepared, tmp_path)


def test_prepared_ids_are_no_text(stories, tmp_path):
    prepare_corpus(stories, "bytes", tmp_path / "out")
    with pytest.raises(ValueError, match="holds token ids, not text"):
        next(read_documents(str(tmp_path / "out")))
