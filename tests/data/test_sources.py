"""Text from anywhere, split without chance. Wrong input is one clear line."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from crosslayer.data.readers import list_text_files
from crosslayer.data.sources import (
    HELD_OUT,
    TRAIN_SET,
    VALID_SHARE,
    Document,
    TextSource,
    _hash_share,
    name_sets,
    read_documents,
    read_sets,
    split_held_out,
)
from crosslayer.data.tokenizing import load_tokenizer
from tests.support.errors import error_message
from tests.support.hub import save_dataset

WORDS = "the quick brown fox jumps over the lazy dog, and so on it goes. " * 40
HARD_TEXTS = ["naïve café ☕ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 e\u0301", "zero\0byte", "a line\u2028separator", "tab\tend\n"]


def texts(source) -> list[str]:
    return [document.text for document in read_documents(str(source))]


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def error_of(source) -> str:
    return error_message(texts, source)


def test_source_is_parsed_once():
    for place, expected in {
        "stdlib": ("stdlib", "", None, TRAIN_SET),
        "a/b.txt": ("files", "a/b.txt", None, TRAIN_SET),
        "datasets:org/name": ("dataset", "org/name", None, TRAIN_SET),
        "datasets:org/name,cfg": ("dataset", "org/name", "cfg", TRAIN_SET),
        "datasets:org/name@test": ("dataset", "org/name", None, "test"),
        "datasets:org/name,cfg@test": ("dataset", "org/name", "cfg", "test"),
    }.items():
        assert TextSource.parse(place) == TextSource(*expected)


def test_standard_library_is_whole_and_sorted():
    documents = list(read_documents("stdlib"))
    names = [document.name for document in documents]
    assert 300 < len(documents) < 3000
    assert not any("/test/" in f"/{name}" for name in names)
    assert [Path(name) for name in names] == sorted(map(Path, names))
    assert documents[names.index("os.py")].text == Path(os.__file__).read_text("utf8")


def test_files_of_every_kind_hold_the_same_text(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(WORDS.encode()))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": WORDS, "id": 1}) + "\n \n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(WORDS).encode()))
    write_parquet(tmp_path / "c.parquet", id=[1], text=[WORDS])
    names = ("a.txt", "a.txt.gz", "b.jsonl", "b.jsonl.gz", "c.parquet")
    assert [texts(tmp_path / name) for name in names] == [[WORDS]] * 5
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "sub" / "folder.txt").mkdir(parents=True)
    (tmp_path / "sub" / "d.md").write_text("last")
    assert texts(tmp_path) == [WORDS] * 5 + ["last"]
    names = [document.name for document in read_documents(str(tmp_path))]
    assert names[-2:] == ["c.parquet:1", "sub/d.md:1"]


def test_zstandard(tmp_path, monkeypatch):
    frames = [zstandard.compress(b'{"text": "%d"}\n' % i) for i in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert texts(tmp_path / "a.jsonl.zst") == ["0", "1", "2"]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "need the package zstandard: pip install" in error_of(tmp_path / "a.jsonl.zst")


def test_compressed_json_has_a_document_a_line(tmp_path):
    lines = b'{"text": "a", "id": 1}\n{"text": "b"}\n'
    (tmp_path / "c4-0000.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "package.json").write_text('{\n "name": "no text"\n}')
    assert texts(tmp_path) == ["a", "b"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS, "utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', "utf-8-sig")
    assert texts(tmp_path) == [WORDS, "one", "two"]


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.Jsonl.GZ"])
def test_suffixes_of_json_lines(tmp_path, name):
    write = gzip.compress if name.endswith(".GZ") else bytes
    (tmp_path / name).write_bytes(write(b'{"text": "one"}\n{"text": "two"}\n'))
    assert texts(tmp_path / name) == ["one", "two"]
    (tmp_path / "settings.json").write_text('{"no": "text"}')  # not read with its folder
    (tmp_path / "b.TXT").write_text("three")
    assert texts(tmp_path) == (["three"] if name == "a.json" else ["one", "two", "three"])


def test_a_long_text_may_have_more_zeros(tmp_path):
    text = "nine char\0" * 200  # a tenth
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text]


def test_what_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt: neither a regular file nor a folder" in error_of(tmp_path / "pipe.txt")
    assert "no text file in it" in error_of(tmp_path)
    for source in ("", " ", "a\0b"):
        assert "a source of text must be stdlib, a file" in error_of(source)


def test_hard_texts_come_through_unchanged(tmp_path):
    escaped = "\r\n".join(json.dumps({"text": text}) for text in HARD_TEXTS)
    (tmp_path / "a.jsonl").write_bytes(escaped.encode())
    raw = "\n".join(json.dumps(text, ensure_ascii=False) for text in HARD_TEXTS)
    (tmp_path / "b.jsonl").write_text(raw, "utf8")
    write_parquet(tmp_path / "c.parquet", text=HARD_TEXTS)
    encoded = pyarrow.array(HARD_TEXTS, pyarrow.large_string()).dictionary_encode()
    write_parquet(tmp_path / "d.parquet", text=encoded)
    for name in ("a.jsonl", "b.jsonl", "c.parquet", "d.parquet"):
        assert texts(tmp_path / name) == HARD_TEXTS
    for i, text in enumerate(HARD_TEXTS):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
        assert texts(tmp_path / f"{i}.txt") == [text]


def test_other_fields_of_json_lines_may_differ(tmp_path):
    lines = [{"text": "a", "id": 1}, {"text": "b", "id": "x", "meta": {}}, "c", {"text": "d"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert texts(tmp_path / "a.jsonl") == ["a", "b", "c", "d"]


def test_names_are_no_patterns(tmp_path):
    for name in ("a[1].txt", "a*.txt", "a1.txt", "#a 1.txt"):
        (tmp_path / name).write_text(name)
        assert texts(tmp_path / name) == [name]


def test_linked_folders_are_read(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "a.txt").write_text(place.name)
    (folder / "more").symlink_to(elsewhere)
    (elsewhere / "around").symlink_to(folder)  # read once
    assert texts(folder) == ["data", "elsewhere"]


def test_a_parquet_file_without_rows_is_empty(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=["one"])
    write_parquet(tmp_path / "b.parquet", text=pyarrow.array([], pyarrow.string()))
    assert texts(tmp_path) == ["one"]


def test_blank_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('""\n{"text": " \\n"}\n"a"\n')
    assert list(read_documents(str(tmp_path / "a.jsonl"))) == [Document("a.jsonl:3", "a")]


def test_a_big_file_is_streamed(tmp_path, monkeypatch):
    """Also where all of its rows are in one group."""
    count = 3000
    rows = pyarrow.table({"text": [f"{i} {WORDS}" for i in range(count)]})
    parquet.write_table(rows, tmp_path / "big.parquet", row_group_size=count)
    rows_of_batches = []
    iter_batches = parquet.ParquetFile.iter_batches

    def record(self, *args, **options):
        for batch in iter_batches(self, *args, **options):
            rows_of_batches.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", record)
    documents = read_documents(str(tmp_path / "big.parquet"))
    next(documents)
    assert rows_of_batches == [1000]
    assert sum(1 for _ in documents) == count - 1 and rows_of_batches == [1000] * 3


def test_documents_are_split_by_name():
    documents = [Document(f"{i}.txt", f"{i} {WORDS}") for i in range(60)]
    sets = list(split_held_out(iter(documents)))
    held_out = {document for name, document in sets if name == HELD_OUT}
    assert [document for _, document in sets] == documents and 0 < len(held_out) < 20
    more = iter([*documents[::-1], Document("60.txt", "a new file moves no other")])
    assert {document for name, document in split_held_out(more) if name == HELD_OUT} >= held_out


def test_the_documents_held_out_are_pinned():
    """With others, a model trained by an earlier version would have seen what is held out."""
    documents = [Document(f"{i}.txt", WORDS) for i in range(100)]
    names = [
        number
        for number, (name, _) in enumerate(split_held_out(iter(documents)))
        if name == HELD_OUT
    ]
    assert names == [1, 18, 39, 71, 77, 85]


def test_at_least_one_document_is_held_out():
    names = [f"{i}.txt" for i in range(300)]
    unlucky = [Document(n, WORDS) for n in names if _hash_share(n) >= VALID_SHARE]
    lucky = next(Document(n, WORDS) for n in names if _hash_share(n) < VALID_SHARE)
    assert [name for name, _ in split_held_out(iter(unlucky))].count(HELD_OUT) == 1
    sets = list(split_held_out(iter([*unlucky, lucky])))
    assert [document for name, document in sets if name == HELD_OUT] == [lucky]


def test_few_documents_are_split_at_their_tail():
    documents = [Document("a", "a" * 50), Document("b", "b" * 949)]
    assert list(split_held_out(iter(documents))) == [
        (TRAIN_SET, documents[0]),
        (TRAIN_SET, Document("b", "b" * 899)),
        (HELD_OUT, Document("b", "b" * 50)),
    ]


def test_named_validation_sets_leave_the_source_whole(tmp_path):
    for name in (TRAIN_SET, "one", "two"):
        (tmp_path / f"{name}.txt").write_text(name)
    valid = {name: str(tmp_path / f"{name}.txt") for name in ("one", "two")}
    sets = name_sets(str(tmp_path / "train.txt"), valid)
    found = [(name, document.text) for name, document in read_sets(sets, load_tokenizer("bytes"))]
    assert found == [(TRAIN_SET, TRAIN_SET), ("one", "one"), ("two", "two")]


def test_wrong_set_names():
    for name in (TRAIN_SET, "", "a/b", "..", "a b"):
        with pytest.raises(ValueError, match="cannot name a validation set"):
            name_sets("stdlib", {name: "stdlib"})


TORN = gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode(), mtime=0)[:-20]


# three complete blocks of 128 kB, of a frame with more
TORN_ZSTD = zstandard.compress(np.random.default_rng(0).bytes(400_000).hex().encode())[:300_000]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: no such file or folder"),
        ("empty.txt", b"", "empty.txt: empty"),
        ("blank.txt", b" \n\n ", "blank.txt: empty"),
        ("empty.jsonl", b"\n", "empty.jsonl: empty"),
        ("latin.txt", "caf\xe9 ".encode("latin1"), "not UTF-8 text (it has a byte 0xe9)"),
        ("latin.jsonl", b'"a"\n"caf\xe9"\n', "not UTF-8 text (it has a byte 0xe9)"),
        ("image.txt", b"\x89PNG\r\n\x1a\n" * 99, "not UTF-8 text"),
        ("ids.txt", b"a\0" * 200, "ids.txt: not text, as many of its bytes are zero"),
        ("torn.txt.gz", TORN, "torn.txt.gz: cannot be read"),
        ("fake.txt.gz", b"not gzip at all", "fake.txt.gz: cannot be read"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "broken.jsonl: line 2: not JSON"),
        ("typo.jsonl", b'{"texts": "a"}', "row 1 has no column \"text\" (did you mean 'texts'?)"),
        ("list.jsonl", b"[1, 2]", "row 1 of its column text is [1, 2], not Unicode text"),
        (
            "deep.jsonl",
            b'"a"\n{"text": ' + b"[" * 100_000,
            "deep.jsonl: line 2: JSON that is nested",
        ),
        ("big.jsonl", b'{"id": ' + b"9" * 5000 + b"}", "big.jsonl: line 1: not JSON (Exceeds"),
        (
            "torn.txt.zst",
            TORN_ZSTD,
            "torn.txt.zst: cannot be read (it ends within compressed data)",
        ),
        ("fake.txt.zst", b"not zstd at all", "fake.txt.zst: cannot be read"),
        ("half.jsonl", b'"a"\n{"text": "\\ud83d"}', "row 2 of its column text is '\\ud83d', not"),
        ("fake.parquet", b"not parquet at all", "fake.parquet: cannot be read"),
        ("empty.parquet", b"", "empty.parquet: cannot be read"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = error_of(tmp_path / name)
    assert message in error and error.startswith(str(tmp_path / name))


def test_wrong_parquet_columns_are_one_line(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", id=[1], texts=["a"])
    assert "no column \"text\" (did you mean 'texts'?); its columns: id, texts" in error_of(file)
    file = write_parquet(tmp_path / "b.parquet", text=["a", None])
    assert "row 2 of its column text is None, not Unicode text" in error_of(file)
    file = write_parquet(tmp_path / "c.parquet", text=[3])
    assert "row 1 of its column text is 3, not Unicode text" in error_of(file)


def test_a_misspelled_name_has_a_suggestion(tmp_path):
    (tmp_path / "stories.txt").write_text("a")
    assert "did you mean 'stories.txt'?" in error_of(tmp_path / "storys.txt")
    assert "did you mean 'stdlib'?" in error_of("stdlb")


def test_a_folder_without_text(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"x")
    assert "no text file in it (looked for .txt" in error_of(tmp_path)


def test_a_folder_that_datasets_can_load(tmp_path):
    folder = tmp_path / "corpus,with@signs"
    folder.mkdir()
    for part in ("train", "validation"):
        lines = "".join(json.dumps({"text": f"{part} {i}"}) + "\n" for i in range(3))
        (folder / f"{part}.jsonl").write_text(lines)
    assert texts(f"datasets:{folder}") == ["train 0", "train 1", "train 2"]
    folder = folder.rename(tmp_path / "corpus")
    assert texts(f"datasets:{folder}@validation")[0] == "validation 0"
    assert texts(f"datasets:{folder},default@validation")[0] == "validation 0"
    assert re.search("cannot be read .*split", error_of(f"datasets:{folder}@test"))


@pytest.mark.parametrize("name", ["text", "pandas"])
def test_a_folder_called_like_a_format_of_datasets(tmp_path, monkeypatch, name):
    """`datasets` takes a bare name for the format, and then reads the working directory."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("inside\n")
    (tmp_path / "b.txt").write_text("beside\n")
    monkeypatch.chdir(tmp_path)
    assert texts(f"datasets:{name}") == ["inside"]


def test_a_folder_that_datasets_has_saved(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "one") == texts(f"datasets:{tmp_path / 'one'}") == ["a", "b"]
    assert texts(f"datasets:{tmp_path / 'two'}@test") == ["b"]
    message = "no split 'tests' (did you mean 'test'?); its splits: train, test"
    assert message in error_of(f"datasets:{tmp_path / 'two'}@tests")
    datasets.Dataset.from_dict({"content": ["a"]}).save_to_disk(tmp_path / "bare")
    assert 'no column "text"; its columns: content' in error_of(tmp_path / "bare")


def test_a_name_on_the_hub():
    rows = {"train": [{"text": "a"}, {"text": "b"}], "test": [{"text": "c"}]}
    save_dataset(Path(datasets.config.HF_DATASETS_CACHE), "org/some-texts", "plain", rows)
    assert texts("datasets:org/some-texts,plain") == ["a", "b"]
    assert texts("datasets:org/some-texts,plain@test") == ["c"]


@pytest.mark.parametrize("source", ["datasets:org/name", "datasets:org/name,config@train"])
def test_no_network_is_one_line(source):
    error = error_of(source)
    assert error.startswith(f"{source}: not in the local cache")
    assert "no network" in error and "give a local file" in error


def test_a_dataset_without_a_name():
    # a name without an owner could be a format of the library, like pandas, which reads pickles
    for source in ("datasets:", "datasets:pandas", "datasets:json@train"):
        assert "expected datasets:OWNER/NAME[,CONFIG][@SPLIT]" in error_of(source)


def test_a_path_of_two_colons_is_one_line(tmp_path):
    (tmp_path / "a::b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a::b\.txt: a path with :: cannot be read; rename it"):
        list(read_documents(str(tmp_path / "a::b.txt")))


@pytest.mark.parametrize(
    ("url", "builder", "unit"),
    [
        ("https://hub.org/train.parquet?download=true", "parquet", None),
        ("https://hub.org/train.jsonl?download=true", "text", "line"),
        ("https://hub.org/a.parquet/book.txt?download=true", "text", "document"),
        ("hf://datasets/a/b/*.json*", "text", "line"),
    ],
)
def test_the_kind_of_a_url_is_before_its_query(url, builder, unit, monkeypatch):
    calls = []
    rows = [{"text": '{"text": "a"}' if unit == "line" else "a"}]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, **options: calls.append((name, options)) or rows
    )
    assert texts(url) == ["a"]
    ((name, options),) = calls
    assert (name, options.get("sample_by")) == (builder, unit)


def test_hidden_files_and_compressed_parquet_files_are_left_out(tmp_path):
    """Editors and notebooks keep copies in hidden folders, of which one might be held out."""
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".b.txt", "c.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [name for _, name in list_text_files(tmp_path)] == ["a.txt"]
