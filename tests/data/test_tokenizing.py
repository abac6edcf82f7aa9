"""Bytes, a BPE of the data, and any tokenizer.json: the same ids for the same text, and back."""

import json
import pickle
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from crosslayer.convert.pretrained import open_id_tokenizer
from crosslayer.data import tokenizing
from crosslayer.data.sources import read_documents
from crosslayer.data.tokenizing import (
    Tokenizer,
    byte_tokenizer_json,
    find_ids,
    load_tokenizer,
    split_at,
    split_ids,
)
from tests.support.errors import error_message
from tests.support.hub import snapshot_folder

WORDS = ("quick", "lazy", "brown")
TEXTS = [f"the {word} fox, naïve café ☕ number {i}\r\n" for i in range(300) for word in WORDS]
HARD_TEXTS = [
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


def save_word_tokenizer(path, *tokens):
    """A tokenizer.json of words that would cut and pad."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.enable_truncation(2)
    model.enable_padding(length=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(str(path))
    return path


def error_of(name, texts=tuple) -> str:
    return error_message(load_tokenizer, str(name), texts)


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab, tokenizer.end) == ("bytes", 256, 0)
    assert [bytes(ids.tolist()).decode() for ids in tokenizer.encode(HARD_TEXTS)] == HARD_TEXTS


def test_bpe_is_deterministic_and_decodes_to_the_text(bpe):
    again = load_tokenizer("bpe:400", lambda: iter(TEXTS))
    assert again == bpe and again.digest == bpe.digest and bpe.vocab == 400
    assert load_tokenizer("bpe:401", lambda: TEXTS).digest != bpe.digest
    for text, ids in zip(HARD_TEXTS, bpe.encode(HARD_TEXTS), strict=True):
        assert bpe.model.decode(ids, skip_special_tokens=False) == text
        assert not len(ids) or ids.max() < bpe.vocab
    assert len(bpe.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
    assert bpe.encode(["a<|endoftext|>b"])[0].tolist()[1] == bpe.end


def test_bpe_of_ties_does_not_depend_on_their_order():
    # every pair is as frequent as every other
    words = [f" {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    first = load_tokenizer("bpe:280", lambda: ["".join(words)])
    second = load_tokenizer("bpe:280", lambda: ["".join(words[::-1])])
    assert first.model.get_vocab() == second.model.get_vocab()


def test_a_bpe_is_trained_on_the_first_characters(monkeypatch):
    monkeypatch.setattr(tokenizing, "_BPE_CHARACTERS", 3000)
    text = "".join(TEXTS)
    parts = [text[:1000], text[1000:4000], "never read " * 1000]
    expected = load_tokenizer("bpe:300", lambda: [text[:1000], text[1000:3000]])
    assert load_tokenizer("bpe:300", lambda: parts).definition == expected.definition


def test_ids_in_chunks_are_those_of_the_whole(monkeypatch):
    """Of more than a million ids, places and documents are found chunk by chunk."""
    monkeypatch.setattr(tokenizing, "_CHUNK_IDS", 3)
    ids = np.array([5, 0, 7, 0, 0, 8, 9, 6, 0, 4, 0])
    assert np.concatenate(list(split_ids(ids))).tolist() == ids.tolist()
    assert list(find_ids(ids, 0)) == [1, 3, 4, 8, 10]
    assert [document.tolist() for document in split_at(ids, 0)] == [[5], [7], [8, 9, 6], [4]]


def test_an_added_token_has_the_bytes_of_its_text(bpe):
    """One that is no ASCII, as DeepSeek's are."""
    definition = json.loads(bpe.definition)
    added = {**definition["added_tokens"][0], "id": bpe.vocab, "content": "<｜User｜>"}
    definition["added_tokens"].append(added)
    tokenizer = Tokenizer("added", bpe.vocab + 1, bpe.end, json.dumps(definition))
    text = "a fox<｜User｜>"
    (ids,) = tokenizer.encode([text])
    assert ids[-1] == bpe.vocab
    assert tokenizer.count_bytes(ids) == len(text.encode())


def test_a_saved_tokenizer_is_the_same(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.definition, "utf8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        saved = load_tokenizer(str(path))
        assert (saved.digest, saved.vocab, saved.end) == (bpe.digest, bpe.vocab, bpe.end)


def test_a_tokenizer_is_pickled_after_use(bpe):
    ids = bpe.encode(["a fox"])[0]
    copy = pickle.loads(pickle.dumps(bpe))
    assert copy == bpe and copy.encode(["a fox"])[0].tolist() == ids.tolist()


def test_a_tokenizer_json_neither_cuts_nor_pads(tmp_path):
    file = save_word_tokenizer(tmp_path / "tokenizer.json", "a", "b", "</s>")
    tokenizer = load_tokenizer(str(file))
    assert (tokenizer.vocab, tokenizer.end) == (3, 2)
    encoded = tokenizer.encode(["a b a b", "a", ""])
    assert [ids.tolist() for ids in encoded] == [[0, 1, 0, 1], [0], []]


def test_nothing_is_put_around_a_text(tmp_path):
    """Llama's tokenizer would begin every document with <s>."""
    file = save_word_tokenizer(tmp_path / "tokenizer.json", "a", "b", "</s>", "<s>")
    model = tokenizers.Tokenizer.from_file(str(file))
    ends = [("<s>", 3), ("</s>", 2)]
    model.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    model.save(str(file))
    assert load_tokenizer(str(file)).encode(["a b"])[0].tolist() == [0, 1]


def test_the_separator_is_the_eos_token_of_the_config(tmp_path):
    save_word_tokenizer(tmp_path / "tokenizer.json", "a", "<|endoftext|>", "stop")
    assert load_tokenizer(str(tmp_path)).end == 1
    config = tmp_path / "tokenizer_config.json"
    for eos_token in ("stop", {"content": "stop", "special": True}):
        config.write_text(json.dumps({"eos_token": eos_token}))
        assert load_tokenizer(str(tmp_path)).end == 2
    config.write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(str(tmp_path)).end == 1
    older = tmp_path / "special_tokens_map.json"
    older.write_text(json.dumps({"eos_token": {"content": "stop"}}))
    assert load_tokenizer(str(tmp_path)).end == open_id_tokenizer(tmp_path).end == 2
    config.write_text(json.dumps({"eos_token": "a", "added_tokens_decoder": {}}))
    assert load_tokenizer(str(tmp_path)).end == open_id_tokenizer(tmp_path).end == 0
    older.unlink()
    for eos_token in ([1], {"content": {}}, 3):
        config.write_text(json.dumps({"eos_token": eos_token}))
        assert "tokenizer_config.json: its eos_token must be text" in error_of(tmp_path)
    config.write_text("[" * 100_000)
    assert "tokenizer_config.json: JSON that is nested too deep" in error_of(tmp_path)
    config.write_text("[")
    assert "tokenizer_config.json: not JSON" in error_of(tmp_path)


def test_holes_in_a_vocabulary_are_counted(tmp_path):
    path = save_word_tokenizer(tmp_path / "tokenizer.json", "a", "</s>")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = 9
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab == 10


@pytest.mark.parametrize("name", ["org/words", "org/without"])
def test_a_name_on_the_hub(tmp_path, monkeypatch, name):
    snapshot = snapshot_folder(tmp_path, name)
    save_word_tokenizer(snapshot / "tokenizer.json", "a", "<|endoftext|>", "stop")
    (snapshot / "tokenizer_config.json").write_text('{"eos_token": "stop"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if name == "org/without":
        (snapshot / "tokenizer.json").unlink()
        assert "tokenizer.json: no such file, expected a tokenizer" in error_of(name)
    else:
        tokenizer = load_tokenizer(name)
        assert (tokenizer.name, tokenizer.vocab, tokenizer.end) == (name, 3, 2)


def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = error_of("openai-community/gpt2")
    assert error.startswith("openai-community/gpt2: no such folder; not in the local cache")
    assert "no network" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bites", "unknown tokenizer 'bites' (did you mean 'bytes'?); expected bytes, bpe:SIZE"),
        ("gpt2", "unknown tokenizer 'gpt2'; expected"),
        ("", "unknown tokenizer ''; expected"),
        ("bpe:99999999999999999999", "and at most"),
        ("bpe:256", "bpe:256: needs a size of at least 257"),
        ("bpe:4k", "unknown tokenizer 'bpe:4k'"),
        ("bpe:-5", "unknown tokenizer 'bpe:-5'"),
        ("bpe:99999", "tokens; ask for fewer"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    assert message in error_of(name, lambda: TEXTS)


def test_a_name_of_the_hub_without_a_slash(tmp_path, monkeypatch):
    """As of gpt2, which `--pretrained gpt2` asks for."""
    (tmp_path / "tokenizer.json").write_text(load_tokenizer("bpe:300", lambda: TEXTS).definition)
    asked = []

    def download(name, patterns):
        asked.append(name)
        return tmp_path

    monkeypatch.setattr("crosslayer.data.tokenizing.download_files", download)
    assert load_tokenizer("gpt2").vocab == 300 and asked == ["gpt2"]


def test_a_wrong_file_is_one_line(tmp_path):
    for content in (b"{}", b"", b"[1", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        error = error_of(tmp_path)
        assert re.search(r"tokenizer\.json: (not a tokenizer\.json|cannot be read)", error), content


def test_a_folder_without_a_tokenizer(tmp_path):
    assert "tokenizer.json: no such file, expected a tokenizer" in error_of(tmp_path)


def test_a_tokenizer_without_a_separator(tmp_path):
    save_word_tokenizer(tmp_path / "tokenizer.json", "a", "b")
    assert "no token that separates documents" in error_of(tmp_path)


def test_gpt2_on_wikitext(extra_data):
    tokenizer = load_tokenizer(str(extra_data / "tokenizers" / "gpt2_tokenizer.json"))
    assert (tokenizer.vocab, tokenizer.end) == (50257, 50256)
    (document,) = read_documents(str(extra_data / "lm" / "wikitext-2" / "valid.txt.gz"))
    (ids,) = tokenizer.encode([document.text])
    assert len(ids) == 258_659, "as tiktoken counts them"
    assert tokenizer.model.decode(ids) == document.text


def test_the_byte_tokenizer_json_equals_bytes(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json(), "utf8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file))
    for text, ids in zip(HARD_TEXTS, load_tokenizer("bytes").encode(HARD_TEXTS), strict=True):
        assert theirs(text).input_ids == ids.tolist() and theirs.decode(ids.tolist()) == text
