"""Token files: written once, mapped, checked, and never half there."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crosslayer.data import shards
from crosslayer.data.prepared import Tokens, open_prepared, prepare_corpus, verify_corpus
from crosslayer.data.shards import Shard, pack
from crosslayer.data.sources import Document
from crosslayer.data.tokenizing import Tokenizer, load_tokenizer

BYTES = load_tokenizer("bytes")
STORIES = [f"{i}: the fox ☕ jumps over {i * i} dogs.\n" * (1 + i % 7) for i in range(80)]


@pytest.fixture
def stories(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    return str(path)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 1000)
    monkeypatch.setattr(shards, "BATCH", 700)


def packed(texts, kind=BYTES) -> Tokens:
    found = (("train", Document(str(i), text)) for i, text in enumerate(texts))
    return Tokens(tuple(shard for _, shard in pack(found, kind)), kind.vocab, kind.name)


def whole(tokens: Tokens) -> list[int]:
    return tokens.window(0, len(tokens)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_shards_of_any_size_hold_the_same_stream(monkeypatch, size):
    monkeypatch.setattr(shards, "SHARD", size)
    monkeypatch.setattr(shards, "BATCH", 11)
    texts = ["ab", "c" * 23, "☕", "de"]
    tokens = packed(texts)
    joined = "\0".join(texts).encode()
    assert whole(tokens) == list(joined) and tokens.text_bytes == len(joined) == len(tokens)
    assert tokens.documents.tolist() == [0, 3, 27, 31]
    assert {len(shard.tokens) for shard in tokens.shards[:-1]} <= {size}
    for start in range(len(joined)):
        for length in (0, 1, 5, len(joined) - start):
            found = tokens.window(start, min(length, len(joined) - start))
            assert (
                bytes(found.tolist()) == joined[start : start + length]
                and found.dtype == torch.long
            )
    for start, length in ((-1, 2), (0, len(joined) + 1), (len(joined), 1), (3, -1)):
        with pytest.raises(IndexError):
            tokens.window(start, length)


def test_text_bytes_do_not_depend_on_the_tokenizer():
    bpe = load_tokenizer("bpe:300", lambda: STORIES)
    ours, theirs = packed(STORIES, bpe), packed(STORIES)
    assert ours.text_bytes == theirs.text_bytes == len(theirs) > len(ours)
    assert bpe.model.decode(whole(ours), skip_special_tokens=False) == "<|endoftext|>".join(STORIES)
    assert [whole(ours)[i - 1] for i in ours.documents.tolist()[1:]] == [bpe.end] * (
        len(STORIES) - 1
    )


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, torch.uint16), (2**16 + 1, torch.uint32)])
def test_the_vocabulary_decides_the_dtype(tmp_path, vocab, dtype, monkeypatch):
    top = Tokenizer("bytes", vocab, vocab - 1)
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda self, texts: [np.array([vocab - 1, 0], np.uint32) for _ in texts],
    )
    tokens = packed(["a", "b"], top)
    assert tokens.shards[0].tokens.dtype == dtype
    assert whole(tokens) == [vocab - 1, 0, vocab - 1, vocab - 1, 0] and tokens.entropy > 0


def test_entropy():
    assert packed(["abcd" * 1000]).entropy == pytest.approx(2)
    assert packed(["a" * 50]).entropy == 0


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_what_is_prepared_is_what_would_be_in_memory(stories, tmp_path, small_shards, name):
    seen = []
    folder = tmp_path / "out"
    prepared = prepare_corpus(stories, name, folder, watch=lambda *what: seen.append(what))
    assert {what[0] for what in seen} == {"train", "held-out"} | (
        {"tokenizer"} if name != "bytes" else set()
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["corpus.json", *(["tokenizer.json"] if name != "bytes" else [])]
        + [
            f"{part}-{i:05d}.safetensors"
            for part, t in prepared.sets.items()
            for i in range(len(t.shards))
        ]
    )
    train = prepared.sets["train"]
    assert len(train.shards) > 3 and verify_corpus(folder) == sum(
        len(t.shards) for t in prepared.sets.values()
    )
    assert (
        train.text_bytes + prepared.sets["held-out"].text_bytes
        == sum(len(t.encode()) + 1 for t in STORIES) - 2
    )
    with safe_open(folder / "train-00001.safetensors", "pt") as shard:
        header = shard.metadata()
        documents = shard.get_tensor("documents")
    assert header["tokenizer"] == name and header["tokenizer_digest"] == prepared.tokenizer.digest
    assert (
        header["dtype"] == "uint16"
        and header["documents"] == str(len(documents))
        and header["source"] == stories
    )
    again = prepare_corpus(stories, name, tmp_path / "again")
    assert [t.digest for t in again.sets.values()] == [t.digest for t in prepared.sets.values()]
    assert train.documents.tolist()[0] == 0 and len(train.documents) == sum(
        what[0] == "train" for what in seen
    )


def test_tokens_travel_as_files(stories, tmp_path):
    train = prepare_corpus(stories, "bytes", tmp_path / "out").sets["train"]
    travelled = pickle.loads(raw := pickle.dumps(train))
    assert whole(travelled) == whole(train) and len(raw) < 1000 < len(train)
    again = pickle.loads(pickle.dumps(packed(STORIES)))
    assert whole(again) == whole(packed(STORIES)) and torch.equal(
        again.documents, packed(STORIES).documents
    )


def test_billions_of_tokens_are_mapped_not_read(tmp_path):
    count = 2**33
    header = {"tokens": {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count]}}
    header |= {
        "documents": {"dtype": "I64", "shape": [1], "data_offsets": [2 * count, 2 * count + 8]}
    }
    header |= {"__metadata__": {"text_bytes": "1", "sha256": "0"}}
    raw = json.dumps(header).encode()
    path = tmp_path / "train-00000.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.seek(2 * (count - 3), os.SEEK_CUR)
        file.write(np.array([7, 8, 9], np.uint16).tobytes() + bytes(8))
    if path.stat().st_blocks * 512 > 1e6:
        pytest.skip("this file system has no sparse files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = pickle.loads(
        pickle.dumps(Tokens((Shard(*[torch.empty(0)] * 2, 1, "0", path),), 256, "bytes"))
    )
    assert len(tokens) == count and tokens.window(count - 3, 3).tolist() == [7, 8, 9]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_a_corrupted_byte_is_found_and_named(stories, tmp_path, small_shards):
    folder = tmp_path / "out"
    prepare_corpus(stories, "bytes", folder)
    for at in (-1, -900):  # the last document's place and a token
        prepared = (folder / "train-00002.safetensors").read_bytes()
        raw = bytearray(prepared)
        raw[at] ^= 1
        (folder / "train-00002.safetensors").write_bytes(raw)
        open_prepared(folder)
        with pytest.raises(
            ValueError, match=r"1 of \d+ shards are not as written: train-00002\.safetensors$"
        ):
            verify_corpus(folder)
        (folder / "train-00002.safetensors").write_bytes(prepared)
    verify_corpus(folder)


def test_what_is_wrong_with_a_folder_is_one_clear_line(stories, tmp_path, small_shards):
    folder, other = tmp_path / "out", tmp_path / "other"
    prepare_corpus(stories, "bpe:300", folder)
    prepare_corpus(stories, "bpe:310", other)
    shard = folder / "train-00001.safetensors"
    raw = shard.read_bytes()

    def says(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            open_prepared(folder)
        assert "\n" not in str(error.value)

    shard.write_bytes(raw[:-10])
    says(r"train-00001\.safetensors: has [\d,]+ bytes where corpus\.json says [\d,]+; cut off")
    shard.unlink()
    says(r"train-00001\.safetensors: missing, though corpus\.json lists it")
    shard.write_bytes(b"x" * len(raw))
    says(r"train-00001\.safetensors: not a shard of tokens, or a broken one")
    shard.write_bytes((folder / "train-00000.safetensors").read_bytes())
    says(r"train-00001\.safetensors: (of another corpus, its|has)")
    shard.write_bytes(raw)
    header = dict(safe_open(shard, "pt").metadata())
    tensors = {name: safe_open(shard, "pt").get_tensor(name) for name in ("tokens", "documents")}
    save_file(tensors, shard, header | {"tokenizer_digest": "0" * 16})
    says(r"of another corpus, its tokenizer_digest is 0000000000000000 where corpus\.json says")
    shard.write_bytes(raw)
    open_prepared(folder)

    definition = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    says(r"tokenizer\.json: missing, or another tokenizer")
    (folder / "tokenizer.json").unlink()
    says(r"tokenizer\.json: missing, or another tokenizer")
    (folder / "tokenizer.json").write_bytes(definition)

    listing = folder / "corpus.json"
    written = listing.read_text()
    for content in (
        "{",
        "[]",
        "{}",
        '"x"',
        '{"format": 3}',
        written.replace("tokens 1", "tokens 2"),
    ):
        listing.write_text(content)
        says(
            r"corpus\.json: (not a prepared corpus's \(damaged\?\)|its format is .*, expected 'crosslayer tokens 1')"
        )
    listing.unlink()
    says("out: not a prepared corpus, as it has no corpus.json")
    with pytest.raises(ValueError, match="not a prepared corpus"):
        open_prepared(tmp_path / "nowhere")


def test_a_folder_that_is_not_ours_is_left_alone(stories, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="mine: not empty, and not an interrupted preparation's"):
        prepare_corpus(stories, "bytes", folder)
    (folder / "preparing.lock").touch()
    (folder / "thesis.txt").touch()
    with pytest.raises(ValueError, match="mine: not empty"):
        prepare_corpus(stories, "bytes", folder)
    assert len(list(folder.iterdir())) == 3
    with pytest.raises(ValueError, match=r"thesis\.txt: a file is in the way"):
        prepare_corpus(stories, "bytes", folder / "thesis.txt")
    prepare_corpus(stories, "bytes", tmp_path / "out")
    with pytest.raises(ValueError, match="out: holds a prepared corpus already"):
        prepare_corpus(stories, "bytes", tmp_path / "out")


def test_a_failure_leaves_nothing(stories, tmp_path, small_shards):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(Path(stories).read_text() + "{")
    for source, name in (
        (str(bad), "bytes"),
        (str(bad), "bpe:300"),
        ("nowhere", "bytes"),
        (stories, "bites"),
    ):
        with pytest.raises(ValueError, match=r"line 81 is not JSON|no such file|unknown tokenizer"):
            prepare_corpus(source, name, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def stop(*what: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(stories, "bytes", tmp_path / "out", watch=stop)
    assert not list((tmp_path / "out").iterdir())


SLOW = """
import sys, time
from crosslayer.train import packing, tokens
packing.SHARD, packing.BATCH = 1000, 700
tokens.prepare(sys.argv[1], "bytes", sys.argv[2], watch=lambda *what: time.sleep(0.03))
"""


def test_a_killed_preparation_starts_over(stories, tmp_path, small_shards):
    folder = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SLOW, stories, str(folder)])
    deadline = time.monotonic() + 60
    while not (folder / "train-00001.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ValueError, match="out: its preparation was interrupted"):
        open_prepared(folder)
    with pytest.raises(ValueError, match="out: another process is preparing it"):
        prepare_corpus(stories, "bytes", folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder / "train-00007.safetensors.part").write_bytes(b"half")
    with pytest.raises(ValueError, match="out: its preparation was interrupted"):
        open_prepared(folder)
    prepared = prepare_corpus(stories, "bytes", folder)
    assert (
        verify_corpus(folder)
        and not list(folder.glob("*.part"))
        and not list(folder.glob("*.lock"))
    )
    assert [t.digest for t in prepared.sets.values()] == [
        t.digest for t in prepare_corpus(stories, "bytes", tmp_path / "other").sets.values()
    ]
