"""Text from anywhere, split without chance; a bad file is one clear line."""

import gzip
import json
import math
import os
from pathlib import Path

import pytest
import torch

from crosslayer.train.data import load

WORDS = "the quick brown fox jumps over the lazy dog, and on it goes. " * 40


def test_the_standard_library_is_deterministic():
    text, again = load("stdlib", 256), load("stdlib", 256)
    assert text.digest == again.digest
    assert 8_000_000 < len(text.train) + len(text.valid) < 40_000_000
    assert 0.01 < len(text.valid) / len(text.train) < 0.2
    assert 4 < text.entropy < 5.5


def test_files_of_every_kind_hold_the_same_text(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(WORDS.encode()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": WORDS, "id": 1}) + "\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(WORDS).encode()))
    digests = {load(str(tmp_path / name), 16).digest for name in ("a.txt", "a.txt.gz", "a.jsonl", "b.jsonl.gz")}
    assert len(digests) == 1
    whole = load(str(tmp_path), 16)
    assert len(whole.train) + len(whole.valid) == 4 * len(WORDS) + 3


def test_documents_are_split_by_name(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"{i} {WORDS}")
    text = load(str(tmp_path), 16)
    train, valid = (bytes(part.numpy().tobytes()).split(b"\0") for part in (text.train, text.valid))
    assert len(train) + len(valid) == 60 and not set(train) & set(valid) and valid
    (tmp_path / "60.txt").write_text("a new file moves no other")
    again = load(str(tmp_path), 16)
    assert set(bytes(again.valid.numpy().tobytes()).split(b"\0")) >= set(valid)


def test_batches_depend_on_the_seed_alone():
    text = load("stdlib", 64)
    first, again, other = (next(text.batches(seed, 4, 64)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (4, 65) and first.dtype == torch.long


def test_held_out_windows_do_not_overlap(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(4000)))
    text = load(str(tmp_path / "a.txt"), 16)
    batches = text.held_out(4, 16, 100)
    assert sum(len(b) for b in batches) == len(text.valid) // 17


def test_entropy(tmp_path):
    (tmp_path / "a.txt").write_text("abcd" * 1000)
    assert math.isclose(load(str(tmp_path / "a.txt"), 16).entropy, 2.0, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "missing.txt: no such file or folder"),
        ("empty.txt", b"", "empty.txt: empty"),
        ("blank.txt", b" \n\n ", "blank.txt: empty"),
        ("empty.jsonl", b"\n", "empty.jsonl: empty"),
        ("latin.txt", "caf\xe9 ".encode("latin1") * 99, r"latin.txt: not UTF-8 text \(byte 3 is 0xe9\)"),
        ("image.txt", b"\x89PNG\r\n\x1a\n" * 99, "not UTF-8 text"),
        ("cut.txt.gz", gzip.compress(WORDS.encode())[:-20], "cut.txt.gz: cannot be read"),
        ("fake.txt.gz", b"not gzip at all", "fake.txt.gz: cannot be read"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "broken.jsonl: line 2 is not JSON"),
        (
            "fields.jsonl",
            b'{"body": "a", "id": 1}',
            "fields.jsonl: line 1 has the fields body, id, expected a string or a",
        ),
        ("list.jsonl", b"[1, 2]", "list.jsonl: line 1 has list, expected"),
        ("short.txt", b"too short", "its training part has 8 bytes, fewer than one context of 64 and the next"),
        ("shortish.txt", b"a" * 300, "its validation part has 15 bytes, fewer than one context of 64"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path / name), 64)
    assert "\n" not in str(error.value)


def test_a_folder_without_text(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no text file in it \(looked for \*\.txt"):
        load(str(tmp_path), 64)


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
@pytest.mark.parametrize(
    ("name", "size", "bits"),
    [
        ("lm/tinyshakespeare/input.txt", 1.12e6, 4.8),
        ("lm/tinystories-sample/valid.txt.gz", 0.34e6, 4.4),
        ("lm/novels/valid.jsonl.gz", 2.01e6, 4.4),
        ("lm/wikitext-2", 13.18e6, 4.5),
    ],
)
def test_real_text(name, size, bits):
    text = load(str(Path(os.environ["CROSSLAYER_DATA"]) / name), 256)
    assert len(text.train) + len(text.valid) == pytest.approx(size, rel=0.03)
    assert text.entropy == pytest.approx(bits, abs=0.25)
