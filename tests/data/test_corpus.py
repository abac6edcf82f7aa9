"""What the loop is given: windows of a source, validation sets by name, and the same ones for everybody."""

import json
import math
import os
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from crosslayer.data.corpus import Corpus, Order, load_corpus
from crosslayer.data.prepared import prepare_corpus
from crosslayer.train.evaluation import evenly_spaced

WORDS = "the quick brown fox jumps over the lazy dog, and on it goes. " * 40


@pytest.fixture
def stories(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} {WORDS}"}) + "\n" for i in range(60)))
    return str(path)


def same(one: Corpus, other: Corpus) -> bool:
    sets = [{"train": c.train, **c.valid} for c in (one, other)]
    return sets[0].keys() == sets[1].keys() and all(
        len(sets[0][name]) == len(sets[1][name])
        and all(
            torch.equal(a, b)
            for a, b in zip(*map(list, (sets[0][name], sets[1][name])), strict=True)
        )
        for name in sets[0]
    )


def test_the_standard_library():
    data = load_corpus("stdlib", 256)
    assert data.vocab == 256 and data.bytes_per_token == {"held-out": 1}
    assert 0.01 < len(data.valid["held-out"]) / len(data.train) < 0.2
    assert 4 < data.entropy["held-out"] < 5.5


def test_windows_do_not_overlap_and_leave_nothing_but_a_rest(stories):
    data = load_corpus(stories, 16)
    for windows in (data.train, *data.valid.values()):
        stream = windows.tokens.window(0, len(windows.tokens))
        assert torch.equal(torch.cat(list(windows)), stream[: len(windows) * 17])
        assert 0 <= len(stream) - len(windows) * 17 < 17
        assert windows[0].shape == (17,) and windows[0].dtype == torch.long
        for index in (-1, len(windows)):
            with pytest.raises(IndexError, match=f"window {index} of"):
                windows[index]


def test_what_is_judged_is_spread_evenly():
    assert evenly_spaced(10, 4) == [0, 2, 5, 7] and evenly_spaced(3, 10**9) == [0, 1, 2]


def test_entropy(tmp_path):
    (tmp_path / "a.txt").write_text("abcd" * 1000)
    assert math.isclose(
        load_corpus(str(tmp_path / "a.txt"), 16).entropy["held-out"], 2.0, abs_tol=1e-9
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_prepared_or_not_it_is_the_same_corpus(stories, tmp_path, tokenizer):
    prepare_corpus(stories, tokenizer, tmp_path / "out")
    now, then = (
        load_corpus(stories, 16, tokenizer),
        load_corpus(str(tmp_path / "out"), 16, tokenizer),
    )
    assert now.digest == then.digest and same(now, then) and now.tokenizer == then.tokenizer
    assert now.entropy == then.entropy and now.bytes_per_token == then.bytes_per_token
    for data in (now, then):
        assert same(pickle.loads(pickle.dumps(data)), data)
    assert load_corpus(stories, 16, "bpe:301").digest != now.digest


def test_bits_per_byte_can_be_compared(stories):
    ours, theirs = (load_corpus(stories, 16, name) for name in ("bytes", "bpe:300"))
    tokens = theirs.valid["held-out"].tokens
    assert (
        theirs.bytes_per_token["held-out"]
        == ours.valid["held-out"].tokens.text_bytes / len(tokens)
        > 1
    )
    assert theirs.entropy["held-out"] == pytest.approx(
        tokens.entropy * len(tokens) / tokens.text_bytes
    )


def test_validation_sets_by_name(stories, tmp_path):
    (tmp_path / "one.txt").write_text("one " * 99)
    (tmp_path / "two.txt").write_text("two " * 99)
    valid = {name: str(tmp_path / f"{name}.txt") for name in ("one", "two")}
    data = load_corpus(stories, 16, valid=valid)
    assert list(data.valid) == ["one", "two"] and len(data.valid["one"].tokens) == 4 * 99
    assert len(data.train.tokens) == sum(len(f"{i} {WORDS}") + 1 for i in range(60)) - 1
    prepare_corpus(stories, "bytes", tmp_path / "whole", valid)
    assert load_corpus(str(tmp_path / "whole"), 16).digest == data.digest
    prepare_corpus(stories, "bytes", tmp_path / "split")
    both = load_corpus(str(tmp_path / "split"), 16, valid=valid)
    assert list(both.valid) == ["held-out", "one", "two"] and list(both.bytes_per_token) == list(
        both.valid
    )
    with pytest.raises(ValueError, match="has a validation set held-out already"):
        load_corpus(str(tmp_path / "split"), 16, valid={"held-out": stories})
    with pytest.raises(
        ValueError, match="its validation set one has 396 bytes, fewer than one context of 400"
    ):
        load_corpus(stories, 400, valid=valid)
    with pytest.raises(ValueError, match=r"three\.txt: no such file"):
        load_corpus(stories, 16, valid={"three": str(tmp_path / "three.txt")})


def test_another_tokenizer_than_it_was_prepared_with(stories, tmp_path):
    prepare_corpus(stories, "bpe:300", tmp_path / "out")
    for asked in ("bytes", "bpe:301"):
        with pytest.raises(
            ValueError, match=f"out: prepared with the tokenizer bpe:300, asked for {asked}"
        ):
            load_corpus(str(tmp_path / "out"), 16, asked)
    assert load_corpus(str(tmp_path / "out"), 16, str(tmp_path / "out")).vocab == 300
    prepare_corpus(stories, "bpe:310", tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"prepared with the tokenizer bpe:300, asked for /.*other"
    ):
        load_corpus(str(tmp_path / "out"), 16, str(tmp_path / "other"))
    (tmp_path / "out" / "corpus.json").unlink()
    (tmp_path / "out" / "preparing.lock").touch()
    with pytest.raises(ValueError, match="its preparation was interrupted"):
        load_corpus(str(tmp_path / "out"), 16, "bpe:300")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("too short", "its training part has 8 bytes, fewer than one context of 64 and the next"),
        ("a" * 300, "its validation part has 15 bytes, fewer than one context of 64"),
    ],
)
def test_too_little_text(tmp_path, content, message):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / "a.txt"), 64)
    prepare_corpus(str(tmp_path / "a.txt"), "bytes", tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / "out"), 64)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        load_corpus(str(tmp_path / "a.txt"), 0)


@pytest.mark.parametrize("kept", ["in memory", "prepared"])
def test_workers_read_the_same_batches(stories, tmp_path, kept):
    if kept == "prepared":
        prepare_corpus(stories, "bytes", tmp_path / "out")
    data = load_corpus(str(tmp_path / "out") if kept == "prepared" else stories, 16)
    order = Order(len(data.train), seed=0, batch=8, start=2)
    alone, two = (
        list(islice(DataLoader(data.train, 8, sampler=order, num_workers=workers), 6))
        for workers in (0, 2)
    )
    assert torch.equal(torch.stack(alone), torch.stack(two)) and alone[0].shape == (8, 17)
    ranks = [
        list(islice(DataLoader(data.train, 4, sampler=Order(len(data.train), 0, 8, rank, 2, 2)), 6))
        for rank in (0, 1)
    ]
    assert all(
        torch.equal(torch.cat(pair), whole) for *pair, whole in zip(*ranks, alone, strict=True)
    )


@pytest.mark.slow
def test_workers_that_are_spawned_read_them_too(stories):
    data = load_corpus(stories, 16)
    loader = DataLoader(
        data.train,
        8,
        sampler=Order(len(data.train), 0, 8),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert next(iter(loader)).shape == (8, 17)


def test_another_process_has_the_same_corpus(stories):
    code = "import sys; from crosslayer.train.data import corpus; print(corpus(sys.argv[1], 16, 'bpe:300').digest)"
    found = subprocess.run(
        [sys.executable, "-c", code, stories], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert found.stdout.split() == [load_corpus(stories, 16, "bpe:300").digest]


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
def test_wikitext_with_gpt2s_tokenizer():
    root = Path(os.environ["CROSSLAYER_DATA"])
    wikitext = root / "lm" / "wikitext-2"
    valid = {"valid": str(wikitext / "valid.txt.gz"), "test": str(wikitext / "test.txt.gz")}
    tokenizer = str(root / "tokenizers" / "gpt2_tokenizer.json")
    data = load_corpus(
        str(root / "lm" / "tinystories-sample" / "valid.txt.gz"), 128, tokenizer, valid
    )
    # as tiktoken counts them
    assert {name: len(w.tokens) for name, w in data.valid.items()} == {
        "valid": 258_659,
        "test": 295_877,
    }
    assert data.vocab == 50257 and data.bytes_per_token["valid"] == pytest.approx(4.33, abs=0.02)
    # <|endoftext|> in the text is the token
    assert (data.train.tokens.window(0, len(data.train.tokens)) == 50256).sum() == 397
