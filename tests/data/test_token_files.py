"""Files of token ids of other pretraining code, against the text that they were made of."""

import glob
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crosslayer.data.corpus import load_corpus
from crosslayer.data.prepared import prepare_corpus
from crosslayer.data.sources import read_sets
from crosslayer.data.token_files import list_token_files, read_token_ids
from crosslayer.data.tokenizing import load_tokenizer
from tests.data.conftest import STORIES
from tests.support.errors import error_message

GPT2, LLAMA3 = 20240520, 20240801  # how llm.c marks ids of 16 and of 32 bits
VERSIONS = {GPT2: 1, LLAMA3: 7}


def write_ids(file, ids, dtype="<u2"):
    np.array(ids, dtype).tofile(file)
    return str(file)


def write_llm_c(file, ids, mark=GPT2, version=None, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = mark, version or VERSIONS[mark], len(ids) if count is None else count
    numbers = np.array(ids, "<u4" if mark == LLAMA3 else "<u2")
    file.write_bytes(header.tobytes() + numbers.tobytes())
    return str(file)


def error_of(place, **options) -> str:
    return error_message(load_corpus, place, context=4, **options)


def make_tokenizer(stories, folder):
    """The name of a tokenizer of the stories, and the ids of each."""
    prepared = prepare_corpus(stories, "bpe:300", folder)
    tokenizer = prepared.tokenizer
    return str(folder), tokenizer, [ids.tolist() for ids in tokenizer.encode(list(STORIES))]


@pytest.mark.parametrize("layout", ["nanoGPT", "llm.c", "llm.c 32 bits", "two files"])
def test_training_on_ids_is_training_on_their_text(tmp_path, stories, layout):
    """nanoGPT ends a document with the separator, llm.c begins it so. A file may end anywhere."""
    name, tokenizer, stories_ids = make_tokenizer(stories, tmp_path / "tokenizer")
    end = tokenizer.end
    ended = [number for ids in stories_ids for number in [*ids, end]]
    begun = [number for ids in stories_ids for number in [end, *ids]]
    if layout == "nanoGPT":
        place = write_ids(tmp_path / "train.bin", ended)
    elif layout == "two files":
        write_llm_c(tmp_path / "ids_train_2.bin", begun[:1001])
        write_llm_c(tmp_path / "ids_train_10.bin", begun[1001:])
        write_ids(tmp_path / "ids_valid_1.bin", [1] * 9)
        place = str(tmp_path / "ids_train_*.bin")
    else:
        mark = LLAMA3 if layout == "llm.c 32 bits" else GPT2
        place = write_llm_c(tmp_path / "train.bin", begun, mark)
    valid = {"valid": str(tmp_path / "other.jsonl")}
    Path(valid["valid"]).write_text(Path(stories).read_text())
    expected = load_corpus(stories, 16, name, valid)
    corpus = load_corpus(place, 16, name, valid)
    assert corpus.digest == expected.digest
    prepared = prepare_corpus(place, name, tmp_path / "prepared", valid)
    assert load_corpus(str(tmp_path / "prepared"), 16, name).digest == expected.digest
    assert prepared.counts["train"].documents == len(STORIES)
    assert prepared.counts["train"].text_bytes == expected.train.tokens.text_bytes


def test_numbers_count_after_the_text_before_them(tmp_path, monkeypatch):
    names = ["a_02.bin", "a_2.bin", "a_10.bin", "b_1.bin"]
    for name in names:
        write_ids(tmp_path / name, [1])
    for found in (names, names[::-1]):  # as a file system lists them
        monkeypatch.setattr(glob, "glob", lambda *_, found=found, **__: found)
        assert [str(file) for file in list_token_files("*.bin")] == names


def test_a_part_of_the_ids_is_held_out(tmp_path):
    """Whole documents of many; the tail of one that no separator divides."""
    ids = np.tile(np.arange(1, 101), 10)
    with pytest.warns(UserWarning, match="no separator of the tokenizer bytes, the id 0, so it is"):
        corpus = load_corpus(write_ids(tmp_path / "one.bin", ids), context=4)
    train, held_out = corpus.train.tokens, corpus.valid["held-out"].tokens
    assert (len(train), len(held_out)) == (950, 50)
    assert np.concatenate([train.ids, held_out.ids]).tolist() == ids.tolist()

    many = [number for start in range(1, 101) for number in [0, *[start] * 20]]
    place = write_ids(tmp_path / "many.bin", many)
    sets = {name: [] for name in ("train", "held-out")}
    for name, document in read_sets({"train": place}, load_tokenizer("bytes")):
        assert len(set(document.ids.tolist())) == 1, "a document is whole"
        sets[name].append(int(document.ids[0]))
    assert sorted(sets["train"] + sets["held-out"]) == list(range(1, 101))
    assert 1 <= len(sets["held-out"]) <= 15


def test_ids_of_a_validation_set_stay_as_they_are(tmp_path, stories):
    """Raw numbers, as OLMo publishes its validation sets, and files of numpy."""
    ids = np.frombuffer("\0naïve\0\0café\0".encode(), np.uint8)
    write_ids(tmp_path / "raw.npy", ids)
    np.save(tmp_path / "saved.npy", ids.astype(np.int64))
    write_llm_c(tmp_path / "llm_c.bin", ids)
    files = {file.stem: str(file) for file in tmp_path.iterdir() if file.suffix in (".npy", ".bin")}
    corpus = load_corpus(stories, context=4, valid=files)
    for name in files:
        tokens = corpus.valid[name].tokens
        assert tokens.window(0, len(ids)).tolist() == ids.tolist()
        assert tokens.text_bytes == len(ids) and corpus.bytes_per_token[name] == 1

    # The tokens are those of the file, whatever the tokenizer would make of the text.
    bpe = load_corpus(stories, context=4, tokenizer="bpe:300").tokenizer
    odd = np.concatenate([bpe.encode([c])[0] for c in "the fox the fox"])
    write_ids(tmp_path / "raw.npy", odd)
    tokens = load_corpus(stories, 4, "bpe:300", {"raw": files["raw"]}).valid["raw"].tokens
    assert tokens.window(0, 15).tolist() == odd.tolist() and tokens.text_bytes == 15


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "cannot be read as token ids (it has 3 bytes, expected 16-bit numbers)"),
        (b"", "cannot be read as token ids (it is empty)"),
        (b"\x93NUMPY\x01\x00", "cannot be read as token ids"),
        (
            np.uint16([300, 1]).tobytes(),
            "has the id 300, but the tokenizer bytes has 256 ids; the file was made with another",
        ),
        (np.arange(1, 99, dtype="<u4").tobytes(), "every second 16-bit number is 0"),
        (np.arange(1, 99, dtype="<i8").tobytes(), "every second 16-bit number is 0"),
        (np.int32([GPT2, 1, 9]).tobytes(), "it ends within its header"),
        (np.int32([7, 1, 9] + [0] * 253).tobytes(), "it has a header of an unknown kind, 7"),
    ],
)
def test_wrong_token_ids_are_one_line(tmp_path, stories, content, message):
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    assert message in error_of(stories, valid={"ids": str(path)})
    assert message in error_of(str(path))
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_corpus(stories, "bytes", tmp_path / "out", {"ids": str(path)})


def test_wrong_files_are_one_line(tmp_path):
    cut = write_llm_c(tmp_path / "cut.bin", [1, 2, 3], count=4)
    assert "it has 3 ids, its header says 4" in error_of(cut)
    assert "its version is 2, expected 1" in error_of(
        write_llm_c(tmp_path / "newer.bin", [1], version=2)
    )
    wrong = {"signed": np.array([1, -1]), "float": np.ones(3), "two": np.array([[1]])}
    wrong["none"] = np.zeros(0, np.uint16)
    for name, array in wrong.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert "has the id -1" in error_of(str(tmp_path / "signed.npy"))
    assert "it has float64 [3], expected one row" in error_of(str(tmp_path / "float.npy"))
    assert "it has int64 [1, 1], expected one row" in error_of(str(tmp_path / "two.npy"))
    assert "it has uint16 [0], expected one row" in error_of(str(tmp_path / "none.npy"))
    assert "no file has such a name" in error_of(str(tmp_path / "*_train.bin"))
    assert re.search(r"no such file or folder \(did you mean", error_of(str(tmp_path / "cu.bin")))
    assert "name the tokenizer that made them" in error_of(
        write_ids(tmp_path / "whole.bin", [1, 2]), tokenizer="bpe:300"
    )
    (tmp_path / "link_1.bin").symlink_to(tmp_path / "gone.bin")
    assert "cannot be read as token ids (" in error_of(str(tmp_path / "link_*.bin"))
    os.mkfifo(tmp_path / "pipe_1.bin")
    assert "(not a regular file)" in error_of(str(tmp_path / "pipe_*.bin"))
    (tmp_path / "cut.idx").touch()
    assert "Megatron's" in error_of(cut)


def test_a_large_vocabulary_needs_wide_numbers(tmp_path):
    """16 bits hold no id of 65,536 or more."""
    wide = replace(load_tokenizer("bytes"), vocab=70_000)
    with pytest.raises(ValueError, match="its numbers have 16 bits, too few for the 70000 ids of"):
        read_token_ids(write_ids(tmp_path / "raw.bin", [1, 2, 3]), wide)
    ids = read_token_ids(write_llm_c(tmp_path / "llm_c.bin", [1, 69_999], LLAMA3), wide)
    assert ids.tolist() == [1, 69_999]


def test_a_validation_set_among_the_training_files(tmp_path):
    for number in (1, 2):
        write_ids(tmp_path / f"ids_{number}.bin", [number, number, 0] * 20)
    valid = {"v": str(tmp_path / "ids_2.bin")}
    with pytest.warns(UserWarning, match="ids_2.bin is in the training data and in the validation"):
        load_corpus(str(tmp_path / "ids_*.bin"), context=4, valid=valid)


@pytest.mark.parametrize("decoder", ["ByteLevel", "adds a space", "other", "strips a space"])
def test_ids_have_the_bytes_of_their_text(tmp_path, stories, decoder):
    """With one byte for each separator, as where the text is tokenised now."""
    folder = tmp_path / "tokenizer"
    prepare_corpus(stories, "bpe:300", folder)
    name = str(folder)
    if decoder != "ByteLevel":  # their ids are decoded
        definition = json.loads((folder / "tokenizer.json").read_text())
        decoders = [definition["decoder"]]
        if decoder != "other":
            definition["pre_tokenizer"]["add_prefix_space"] = True
        if decoder == "strips a space":  # the one that Llama's tokenizer adds to a text
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        if decoder != "adds a space":
            definition["decoder"] = {"type": "Sequence", "decoders": decoders}
        name = str(tmp_path / "tokenizer.json")
        Path(name).write_text(json.dumps(definition))
    tokenizer = load_tokenizer(name)
    ids = [ids.tolist() for ids in tokenizer.encode(STORIES)]
    joined = [number for document in ids for number in [*document, tokenizer.end]][:-1]
    valid = {"ids": write_ids(tmp_path / "valid.bin", joined), "text": str(tmp_path / "o.jsonl")}
    Path(valid["text"]).write_text(Path(stories).read_text())
    sets = load_corpus(stories, 4, name, valid).valid
    assert sets["ids"].tokens.digest == sets["text"].tokens.digest
    assert sets["ids"].tokens.text_bytes == sets["text"].tokens.text_bytes


def test_ids_of_gpt2(tmp_path, extra_data):
    """As nanoGPT's prepare.py writes them."""
    file = str(extra_data / "tokenizers" / "gpt2_tokenizer.json")
    text = "A naïve café ☕ <|endoftext|"  # nearly the separator, and so no special token
    (ids,) = load_tokenizer(file).encode([text])
    place = write_ids(tmp_path / "train.bin", [*ids, 50256] * 60)
    corpus = load_corpus(place, context=8, tokenizer=file)
    sets = [corpus.train.tokens, corpus.valid["held-out"].tokens]
    separators = 60 - 2  # none before the first document of a set
    assert sum(stream.text_bytes for stream in sets) == 60 * len(text.encode()) + separators
