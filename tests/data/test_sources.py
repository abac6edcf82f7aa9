"""Text from anywhere, split without chance; a bad file is one clear line."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from crosslayer.data import sources
from crosslayer.data.sources import Document, documents, parts, split

WORDS = "the quick brown fox jumps over the lazy dog, and on it goes. " * 40
LUCKY = next(f"{i}.md" for i in range(200) if sources.share(f"{i}.md") < sources.VALID_SHARE)
HARD = [
    "",
    "  \n",
    "naïve café ☕ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 e\u0301",
    "a\r\nb\r\n",
    "\ufeffmarked",
    "zero\0byte",
    "a line\u2028separator",
]


def texts(source) -> list[str]:
    return [text for _, text in documents(str(source))]


def table(path: Path, **columns) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def test_the_standard_library_is_deterministic():
    found = list(documents("stdlib"))
    assert found == list(documents("stdlib")) and 300 < len(found) < 3000
    assert 8_000_000 < sum(len(text) for _, text in found) < 40_000_000


def test_files_of_every_kind_hold_the_same_text(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(WORDS.encode()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": WORDS, "id": 1}) + "\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(WORDS).encode()))
    table(tmp_path / "c.parquet", id=[1], text=[WORDS])
    names = ("a.txt", "a.txt.gz", "a.jsonl", "b.jsonl.gz", "c.parquet")
    assert [texts(tmp_path / name) for name in names] == [[WORDS]] * 5
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.md").write_text("last")
    assert texts(tmp_path) == [WORDS] * 5 + ["last"]
    assert [name for name, _ in documents(str(tmp_path))][-2:] == ["c.parquet:1", "sub/d.md"]


def test_hard_texts_come_through_unchanged(tmp_path):
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(json.dumps({"text": t}) for t in HARD).encode())
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps(t, ensure_ascii=False) for t in HARD), "utf8"
    )
    table(tmp_path / "c.parquet", text=HARD)
    table(
        tmp_path / "d.parquet", text=pyarrow.array(HARD, pyarrow.large_string()).dictionary_encode()
    )
    for name in ("a.jsonl", "b.jsonl", "c.parquet", "d.parquet"):
        assert texts(tmp_path / name) == HARD[2:], "blank documents are left out"
    for i, text in enumerate(HARD[2:]):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
        assert texts(tmp_path / f"{i}.txt") == [text]


def test_a_long_file_is_several_documents_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 101)
    lined = "".join(f"{i} ☕\n" for i in range(200))
    endless = "☕" * 500
    for name, whole in (("lined.txt", lined), ("endless.txt", endless), ("exact.txt", "x" * 202)):
        (tmp_path / name).write_text(whole, "utf8")
        found = list(documents(str(tmp_path / name)))
        assert "".join(text for _, text in found) == whole and len(found) > 1
        assert len({n for n, _ in found}) == len(found) and all(
            len(t.encode()) <= 210 for _, t in found
        )
    assert all(text.endswith("\n") for text in texts(tmp_path / "lined.txt"))
    (tmp_path / "bad.txt").write_bytes(endless.encode() + b"\xff" + b"x" * 300)
    with pytest.raises(ValueError, match=r"bad.txt: not UTF-8 text \(byte 1500 is 0xff\)"):
        texts(tmp_path / "bad.txt")


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_a_big_file_is_never_in_memory_whole(tmp_path, kind):
    path = tmp_path / f"big.{kind}"
    rows = 3000
    if kind == "parquet":
        table(path, text=[f"{i} {WORDS * 2}" for i in range(rows)])
    else:
        with gzip.open(path, "wt", compresslevel=1) as stream:
            stream.writelines(json.dumps({"text": f"{i} {WORDS * 2}"}) + "\n" for i in range(rows))
    tracemalloc.start()
    assert sum(1 for _ in documents(str(path))) == rows
    assert tracemalloc.get_traced_memory()[1] < 4e6 < 2 * rows * len(WORDS)
    tracemalloc.stop()


def test_documents_are_split_by_name():
    found = [Document(f"{i}.txt", f"{i} {WORDS}") for i in range(60)]
    sets = list(split(iter(found)))
    held = {document for name, document in sets if name == "held-out"}
    assert [document for _, document in sets] == found and 0 < len(held) < 20
    again = split(iter([*found[::-1], Document("60.txt", "a new file moves no other")]))
    assert {document for name, document in again if name == "held-out"} >= held


def test_one_document_at_least_is_held_out():
    for start in range(0, 2000, 40):
        sets = list(split(iter([Document(f"{i}.txt", WORDS) for i in range(start, start + 40)])))
        assert any(name == "held-out" for name, _ in sets)
        assert sets == list(split(iter([document for _, document in sets])))
    unlucky = [
        d
        for d in (Document(f"{i}.txt", WORDS) for i in range(200))
        if sources.share(d.name) >= 0.05
    ]
    assert [name for name, _ in split(iter(unlucky))].count("held-out") == 1
    assert [name for name, _ in split(iter([*unlucky, Document(LUCKY, WORDS)]))].index(
        "held-out"
    ) == len(unlucky)


def test_few_documents_are_split_at_their_tail():
    whole = [Document("a", "a" * 50), Document("b", "b" * 949)]
    sets = list(split(iter(whole)))
    assert sets == [
        ("train", whole[0]),
        ("train", Document("b", "b" * 899)),
        ("held-out", Document("b", "b" * 50)),
    ]
    assert list(split(iter([Document("a", "x" * 94), Document("b", "y" * 5)]))) == [
        ("train", Document("a", "x" * 94)),
        ("held-out", Document("b", "y" * 5)),
    ]


def test_named_validation_sets_leave_the_source_whole(tmp_path):
    for name in ("train", "one", "two"):
        (tmp_path / f"{name}.txt").write_text(name)
    valid = {name: str(tmp_path / f"{name}.txt") for name in ("one", "two")}
    found = [(part, text) for part, (_, text) in parts(str(tmp_path / "train.txt"), valid)]
    assert found == [("train", "train"), ("one", "one"), ("two", "two")]
    for name in ("train", "", "a/b", "..", "a b"):
        with pytest.raises(ValueError, match="cannot name a validation set"):
            parts("stdlib", {name: "stdlib"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: no such file or folder$"),
        ("empty.txt", b"", "empty.txt: empty"),
        ("blank.txt", b" \n\n ", "blank.txt: empty"),
        ("empty.jsonl", b"\n", "empty.jsonl: empty"),
        ("blanks.jsonl", b'""\n{"text": " "}\n', "blanks.jsonl: empty"),
        (
            "latin.txt",
            "caf\xe9 ".encode("latin1") * 99,
            r"latin.txt: not UTF-8 text \(byte 3 is 0xe9\)",
        ),
        ("latin.jsonl", b'"a"\n"caf\xe9"\n', r"latin.jsonl: not UTF-8 text \(byte 8 is 0xe9\)"),
        ("half.txt", "café".encode()[:-1], r"half.txt: not UTF-8 text \(byte 3 is 0xc3\)"),
        ("image.txt", b"\x89PNG\r\n\x1a\n" * 99, "not UTF-8 text"),
        ("cut.txt.gz", gzip.compress(WORDS.encode(), mtime=0)[:-20], "cut.txt.gz: cannot be read"),
        ("fake.txt.gz", b"not gzip at all", "fake.txt.gz: cannot be read"),
        (
            "torn.jsonl.gz",
            gzip.compress(b'"a"\n' * 999, mtime=0)[:20] + b"\xff" * 30,
            "torn.jsonl.gz: cannot be read",
        ),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "broken.jsonl: line 2 is not JSON"),
        (
            "fields.jsonl",
            b'{"body": "a", "id": 1}',
            "fields.jsonl: line 1 has the fields body, id, expected a string or a",
        ),
        (
            "half.jsonl",
            b'"a"\n{"text": "a \\ud83d b"}',
            r"half.jsonl: line 2 is not Unicode text \(half .* \\ud83d\)",
        ),
        ("list.jsonl", b"[1, 2]", "list.jsonl: line 1 has list, expected"),
        (
            "fake.parquet",
            b"not parquet at all",
            "fake.parquet: not a parquet file, or a broken one",
        ),
        ("empty.parquet", b"", "empty.parquet: not a parquet file, or a broken one"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        texts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_near_name_is_told(tmp_path):
    (tmp_path / "novels.jsonl").touch()
    with pytest.raises(
        ValueError, match=r"novel.jsonl: no such file or folder \(did you mean 'novels.jsonl'\?\)"
    ):
        texts(tmp_path / "novel.jsonl")
    with pytest.raises(ValueError, match=r"stdlb: .*did you mean 'stdlib'"):
        texts("stdlb")


def test_a_folder_without_text(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no text file in it \(looked for \*\.txt.*\*\.parquet\)"):
        texts(tmp_path)


def test_bad_parquet_columns(tmp_path):
    with pytest.raises(
        ValueError, match=r'no column "text" \(did you mean \'texts\'\?\); its columns: id, texts'
    ):
        texts(table(tmp_path / "a.parquet", id=[1], texts=["a"]))
    with pytest.raises(ValueError, match="row 2 of its column text is string None, not text"):
        texts(table(tmp_path / "b.parquet", text=["a", None]))
    with pytest.raises(ValueError, match="row 1 of its column text is int64 3, not text"):
        texts(table(tmp_path / "c.parquet", text=[3]))
    latin = pyarrow.StringArray.from_buffers(
        1, pyarrow.array([0, 4], "int32").buffers()[1], pyarrow.py_buffer(b"caf\xe9")
    )
    with pytest.raises(ValueError, match=r"e\.parquet: not UTF-8 text"):
        texts(table(tmp_path / "e.parquet", text=latin))
    whole = table(tmp_path / "d.parquet", text=[f"{i} {WORDS}" for i in range(99)])
    raw = bytearray(whole.read_bytes())
    raw[100:400] = b"\xff" * 300
    whole.write_bytes(raw)
    with pytest.raises(ValueError, match=r"d\.parquet: ") as error:
        texts(whole)
    assert "\n" not in str(error.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return pytest.importorskip("datasets")


def test_datasets_streams_a_local_folder(tmp_path, hub):
    folder = tmp_path / "corpus,with@signs"
    folder.mkdir()
    for part in ("train", "validation"):
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps({"text": f"{part} {i}"}) + "\n" for i in range(3))
        )
    assert texts(f"datasets:{folder}") == ["train 0", "train 1", "train 2"]
    folder = folder.rename(tmp_path / "corpus")
    assert texts(f"datasets:{folder}@validation")[0] == "validation 0"
    assert texts(f"datasets:{folder},default@validation")[0] == "validation 0"
    with pytest.raises(ValueError, match=r"corpus@test: cannot be loaded \(.*split") as error:
        texts(f"datasets:{folder}@test")
    assert "\n" not in str(error.value)


def test_datasets_maps_what_it_has_saved(tmp_path, hub):
    rows = hub.Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk(tmp_path / "one")
    hub.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "several")
    assert texts(f"datasets:{tmp_path / 'one'}") == ["a", "b"]
    assert texts(f"datasets:{tmp_path / 'several'}@test") == ["b"]
    with pytest.raises(
        ValueError, match=r"no split 'tests' \(did you mean 'test'\?\); its splits: train, test"
    ):
        texts(f"datasets:{tmp_path / 'several'}@tests")
    hub.Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "bare")
    with pytest.raises(ValueError, match='no column "text"; its columns: body'):
        texts(f"datasets:{tmp_path / 'bare'}")


def test_an_unknown_dataset_is_one_line(hub):
    for source in ("datasets:nobody/nothing", "datasets:nobody/nothing,config@train"):
        with pytest.raises(
            ValueError, match=f"^{source}: cannot be loaded .*HF_HUB_OFFLINE=0"
        ) as error:
            texts(source)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="expected datasets:NAME"):
        texts("datasets:")


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("lm/tinyshakespeare/input.txt", 1, 1_115_394),
        ("lm/tinystories-sample/valid.txt.gz", 1, 0.34e6),
        ("lm/novels/valid.jsonl.gz", 5, 2.01e6),
        ("lm/wikitext-2", 3, 13.18e6),
    ],
)
def test_real_text(name, count, size):
    found = texts(Path(os.environ["CROSSLAYER_DATA"]) / name)
    assert len(found) == count and sum(len(text.encode()) for text in found) == pytest.approx(
        size, rel=0.03
    )
