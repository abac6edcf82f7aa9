"""Bytes, a BPE of the data, and any tokenizer.json: the same ids for the same text, and back."""

import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from crosslayer.data.tokenizing import byte_tokenizer_json, load_tokenizer

TEXTS = [
    f"the {word} fox, naïve café ☕ number {i}\r\n"
    for i in range(300)
    for word in ("quick", "lazy", "brown")
]
HARD = [
    "",
    " ",
    "\n\n\n",
    "\r\n",
    "\0",
    "naïve ☕ 𝔘 e\u0301",
    "  indented\n\n\tand tabs  ",
    "x" * 5000,
    "\u2028\ufeff",
]


@pytest.fixture(scope="module")
def bpe():
    return load_tokenizer("bpe:400", lambda: TEXTS)


def saved(path: Path, *tokens: str, unk: str | None = None) -> Path:
    """A tokenizer.json of words."""
    words = {token: i for i, token in enumerate(tokens)}
    model = Model(models.WordLevel(words, unk_token=unk) if unk else models.WordLevel(words))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.enable_truncation(2)
    model.enable_padding(length=7)
    path.parent.mkdir(exist_ok=True)
    model.save(str(path))
    return path


def test_bytes():
    kind = load_tokenizer("bytes")
    assert (kind.name, kind.vocab, kind.end) == ("bytes", 256, 0)
    assert [bytes(ids.tolist()).decode() for ids in kind.encode(HARD)] == HARD


def test_bpe_is_the_same_every_time_and_goes_back(bpe, tmp_path):
    again = load_tokenizer("bpe:400", lambda: iter(TEXTS))
    assert again == bpe and again.digest == bpe.digest and bpe.vocab == 400
    assert load_tokenizer("bpe:401", lambda: TEXTS).digest != bpe.digest
    for text, ids in zip(HARD, bpe.encode(HARD), strict=True):
        assert bpe.model.decode(ids, skip_special_tokens=False) == text
        assert not len(ids) or ids.max() < bpe.vocab
    assert len(bpe.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
    assert bpe.encode(["a<|endoftext|>b"])[0].tolist()[1] == bpe.end


def test_bpe_learns_nothing_from_the_order_of_rare_ties():
    words = [
        f" {a}{b}" for a in "abcdefgh" for b in "ijklmnop"
    ]  # every pair as frequent as every other
    first, second = (
        load_tokenizer("bpe:280", lambda order=order: ["".join(order)])
        for order in (words, words[::-1])
    )
    assert first.model.get_vocab() == second.model.get_vocab()


def test_a_saved_tokenizer_is_the_same_one(bpe, tmp_path):
    bpe.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        found = load_tokenizer(str(path))
        assert (found.digest, found.vocab, found.end) == (bpe.digest, bpe.vocab, bpe.end)
    bpe.encode(["in use"])
    travelled = pickle.loads(pickle.dumps(bpe))
    assert (
        travelled == bpe
        and travelled.encode(["a fox"])[0].tolist() == bpe.encode(["a fox"])[0].tolist()
    )


def test_a_tokenizer_json_neither_cuts_nor_pads(tmp_path):
    kind = load_tokenizer(str(saved(tmp_path / "tokenizer.json", "a", "b", "</s>")))
    assert (kind.vocab, kind.end) == (3, 2)
    assert [ids.tolist() for ids in kind.encode(["a b a b", "a", ""])] == [[0, 1, 0, 1], [0], []]


def test_the_end_is_what_the_config_says(tmp_path):
    saved(tmp_path / "tokenizer.json", "a", "<|endoftext|>", "stop")
    assert load_tokenizer(str(tmp_path)).end == 1
    for named in ("stop", {"content": "stop", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert load_tokenizer(str(tmp_path)).end == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(str(tmp_path)).end == 1
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: cannot be read"):
        load_tokenizer(str(tmp_path))


def test_holes_in_a_vocabulary_are_counted(tmp_path):
    path = saved(tmp_path / "tokenizer.json", "a", "</s>")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = 9
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "bites",
            r"unknown tokenizer 'bites' \(did you mean 'bytes'\?\); expected bytes, bpe:SIZE, or a path",
        ),
        ("gpt2", "unknown tokenizer 'gpt2'; expected"),
        ("bpe:256", "expected bpe:SIZE with a vocabulary of at least 257"),
        ("bpe:", "expected bpe:SIZE"),
        ("bpe:4k", "expected bpe:SIZE"),
        ("bpe:-5", "expected bpe:SIZE"),
        ("bpe:99999", r"bpe:99999: the training text gives only \d+ tokens; ask for fewer"),
    ],
)
def test_a_bad_name_is_one_clear_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(name, lambda: TEXTS)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="needs texts"):
        load_tokenizer("bpe:300")
    with pytest.raises(ValueError, match="unknown tokenizer"):
        load_tokenizer(str(tmp_path))
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"", b"[1", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"tokenizer\.json: (not a tokenizer\.json|cannot be read)"
        ) as error:
            load_tokenizer(str(path))
        assert "\n" not in str(error.value)
    saved(path, "a", "b")
    with pytest.raises(
        ValueError,
        match=r"no token that separates documents.*eos_token in a tokenizer_config\.json",
    ):
        load_tokenizer(str(path))


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
@pytest.mark.parametrize(
    # gpt2's count is also tiktoken's
    ("file", "vocab", "end", "count"),
    [("gpt2", 50257, 50256, 258_659), ("gpt_neox_20b", 50277, 0, 258_131)],
)
def test_published_tokenizers(file, vocab, end, count):
    root = Path(os.environ["CROSSLAYER_DATA"])
    kind = load_tokenizer(str(root / "tokenizers" / f"{file}_tokenizer.json"))
    assert (kind.vocab, kind.end) == (vocab, end)
    text = gzip.decompress((root / "lm" / "wikitext-2" / "valid.txt.gz").read_bytes()).decode()
    (ids,) = kind.encode([text])
    assert isinstance(ids, np.ndarray) and len(ids) == count and kind.model.decode(ids) == text


def test_bytes_for_those_who_read_a_tokenizer_json(tmp_path):
    ours, file = load_tokenizer("bytes"), tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json(), "utf8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file))
    for text, ids in zip(HARD, ours.encode(HARD), strict=True):
        assert theirs(text).input_ids == ids.tolist() and theirs.decode(ids.tolist()) == text
