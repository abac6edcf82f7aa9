"""Windows of a source against an independent loop, in memory and memory-mapped."""

import json
import pickle
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from crosslayer.data import prepared, token_streams
from crosslayer.data.corpus import Corpus, TokenWindows, load_corpus
from crosslayer.data.prepared import prepare_corpus
from crosslayer.data.sampler import ResumableSampler
from crosslayer.data.sources import TRAIN_SET, Document, read_sets, training_texts
from crosslayer.data.token_streams import encode_in_memory
from crosslayer.data.tokenizing import Tokenizer, load_tokenizer
from tests.data.conftest import STORIES


def stream_of(texts, tokenizer):
    documents = [("train", Document(str(i), text)) for i, text in enumerate(texts)]
    return encode_in_memory(iter(documents), tokenizer)["train"]


def all_ids(windows: TokenWindows) -> np.ndarray:
    return windows.tokens.window(0, len(windows.tokens)).numpy()


def expected_windows(texts, tokenizer, context) -> np.ndarray:
    """The definition: join the documents by the separator, cut, and drop the rest."""
    ids: list[int] = []
    for number, text in enumerate(texts):
        if number:
            ids.append(tokenizer.end)
        ids.extend(tokenizer.encode([text])[0].tolist())
    count = len(ids) // (context + 1)
    return np.array(ids[: count * (context + 1)]).reshape(count, context + 1)


def is_equal(one: Corpus, other: Corpus) -> bool:
    ids = [
        {"train": all_ids(c.train)} | {n: all_ids(w) for n, w in c.valid.items()}
        for c in (one, other)
    ]
    return ids[0].keys() == ids[1].keys() and all(
        np.array_equal(ids[0][name], ids[1][name]) for name in ids[0]
    )


@pytest.mark.parametrize("context", [1, 64, 1000])
@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_windows_equal_an_independent_loop(
    stories, tmp_path, monkeypatch, context, name, is_prepared
):
    monkeypatch.setattr(token_streams, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(prepared, "BUFFERED_ROWS", 3)
    monkeypatch.setattr("datasets.config.DEFAULT_MAX_BATCH_SIZE", 5)  # rows of a record batch
    source = stories
    valid = {"again": stories}
    if is_prepared:
        source = str(tmp_path / "out")
        prepare_corpus(stories, name, source, valid)
        valid = {}
    corpus = load_corpus(source, context, name, valid)
    expected = expected_windows(STORIES, load_tokenizer(name, lambda: STORIES), context)
    for windows in (corpus.train, corpus.valid["again"]):
        assert len(windows.tokens._chunks) > (8 if is_prepared else 0)
        found = torch.stack([windows[i] for i in range(len(windows))])
        assert found.dtype == torch.long
        assert np.array_equal(found.numpy(), expected)


def test_windows_that_end_with_the_stream():
    windows = TokenWindows(stream_of(["abcdef"], load_tokenizer("bytes")), context=2)
    assert [windows[i].tolist() for i in range(len(windows))] == [[97, 98, 99], [100, 101, 102]]


def test_window_bounds(stories):
    windows = load_corpus(stories, 16).train
    for index in (-1, len(windows)):
        with pytest.raises(IndexError, match=r"tokens .* of"):
            windows[index]
    for start, length in ((-1, 2), (0, len(windows.tokens) + 1), (len(windows.tokens), 1), (3, -1)):
        with pytest.raises(IndexError, match=r"tokens .* of"):
            windows.tokens.window(start, length)


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_the_vocabulary_decides_the_dtype(vocab, dtype, monkeypatch):
    def encode(self, texts):
        return [np.array([vocab - 1, 0], np.uint32) for _ in texts]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    stream = stream_of(["a", "b"], Tokenizer("bytes", vocab, vocab - 1))
    assert stream.ids.dtype == dtype
    assert stream.window(0, 5).tolist() == [vocab - 1, 0, vocab - 1, vocab - 1, 0]


def test_standard_library():
    corpus = load_corpus("stdlib", 256)
    assert corpus.tokenizer.vocab == 256 and corpus.bytes_per_token == {"held-out": 1}
    assert 0.01 < len(corpus.valid["held-out"]) / len(corpus.train) < 0.2
    assert 4 < corpus.valid["held-out"].tokens.entropy_per_token < 5.5


def test_entropy():
    tokenizer = load_tokenizer("bytes")
    assert stream_of(["abcd" * 1000], tokenizer).entropy_per_token == pytest.approx(2)
    assert stream_of(["a" * 50], tokenizer).entropy_per_token == 0


def test_text_bytes_do_not_depend_on_the_tokenizer(stories):
    valid = {"all": stories}
    ours = load_corpus(stories, 16, "bytes", valid)
    theirs = load_corpus(stories, 16, "bpe:300", valid)
    tokens = theirs.valid["all"].tokens
    assert tokens.text_bytes == len(ours.valid["all"].tokens) > len(tokens)
    assert theirs.bytes_per_token["all"] == tokens.text_bytes / len(tokens) > 1


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_prepared_or_not_it_is_the_same_corpus(stories, tmp_path, tokenizer):
    prepare_corpus(stories, tokenizer, tmp_path / "out")
    now = load_corpus(stories, 16, tokenizer)
    then = load_corpus(f"datasets:{tmp_path / 'out'}", 16, tokenizer)
    for windows in (then.train, then.valid["held-out"]):
        assert windows.tokens.digest == replace(windows.tokens, known_digest=None).digest
    assert is_equal(now, then) and now.digest == then.digest and now.tokenizer == then.tokenizer
    assert now.bytes_per_token == then.bytes_per_token
    for corpus in (now, then):
        corpus.train[0]
        assert is_equal(pickle.loads(pickle.dumps(corpus)), corpus)
    assert len(pickle.dumps(then.train)) < 3000 < len(then.train.tokens), "pickled as file names"
    assert load_corpus(stories, 16, "bpe:301").digest != now.digest


def test_a_bpe_is_not_trained_on_what_is_held_out(stories):
    sets = {TRAIN_SET: stories}
    documents = list(read_sets(sets, load_tokenizer("bytes")))
    expected = [document.text for name, document in documents if name == TRAIN_SET]
    assert list(training_texts(sets)) == expected and len(expected) < len(documents)


def test_the_digest_is_of_all_sets_and_the_tokenizer(stories, tmp_path):
    """A run that resumes with another validation set or separator is another run."""
    (tmp_path / "a.txt").write_text("a" * 99)
    (tmp_path / "b.txt").write_text("b" * 99)
    a, b = (load_corpus(stories, 16, valid={"v": str(tmp_path / f"{x}.txt")}) for x in "ab")
    assert a.train.tokens.digest == b.train.tokens.digest and a.digest != b.digest
    assert replace(a, tokenizer=replace(a.tokenizer, end=1)).digest != a.digest


def test_validation_sets_by_name(stories, tmp_path):
    (tmp_path / "one.txt").write_text("one " * 99)
    valid = {"one": str(tmp_path / "one.txt")}
    corpus = load_corpus(stories, 16, valid=valid)
    assert list(corpus.valid) == ["one"] and len(corpus.valid["one"].tokens) == 4 * 99
    prepare_corpus(stories, "bytes", tmp_path / "split")
    both = load_corpus(str(tmp_path / "split"), 16, valid=valid)
    assert list(both.valid) == list(both.bytes_per_token) == ["held-out", "one"]
    with pytest.raises(ValueError, match="has a set held-out already"):
        load_corpus(str(tmp_path / "split"), 16, valid={"held-out": stories})
    with pytest.raises(ValueError, match="its set one has 396 bytes, fewer than the 400 \\+ 1"):
        load_corpus(stories, 400, valid=valid)
    with pytest.raises(ValueError, match=r"two\.txt: no such file"):
        load_corpus(stories, 16, valid={"two": str(tmp_path / "two.txt")})


def test_another_tokenizer_than_that_of_the_preparation(stories, tmp_path):
    out = str(tmp_path / "out")
    prepare_corpus(stories, "bpe:300", out)
    prepare_corpus(stories, "bpe:310", tmp_path / "other")
    for name in ("bytes", "bpe:301", str(tmp_path / "other")):
        with pytest.raises(ValueError, match=f"prepared with the tokenizer bpe:300, not {name}"):
            load_corpus(out, 16, name)
    assert load_corpus(out, 16, out).tokenizer.vocab == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("too short", "its set train has 8 bytes, fewer than the 64"),
        ("a" * 300, "its set held-out has 15 bytes, fewer than the 64"),
    ],
)
def test_too_little_text(tmp_path, text, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / "a.txt"), 64)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        load_corpus(str(tmp_path / "a.txt"), 0)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_workers_and_ranks_read_the_same_batches(stories, tmp_path, is_prepared):
    source = stories
    if is_prepared:
        source = str(tmp_path / "out")
        prepare_corpus(stories, "bytes", source)
    train = load_corpus(source, 16).train

    def batches(batch, sampler, workers):
        loader = DataLoader(train, batch, sampler=sampler, num_workers=workers)
        return list(islice(loader, 6))

    alone = batches(8, ResumableSampler(len(train), 0, 8, start=2), 0)
    with_workers = batches(8, ResumableSampler(len(train), 0, 8, start=2), 2)
    ranks = [batches(4, ResumableSampler(len(train), 0, 8, rank, 2, 2), 0) for rank in (0, 1)]
    assert alone[0].shape == (8, 17)
    for expected, other, first, second in zip(alone, with_workers, *ranks, strict=True):
        assert torch.equal(other, expected)
        assert torch.equal(torch.cat([first, second]), expected)


@pytest.mark.slow
def test_spawned_workers_map_the_same_files(stories, tmp_path):
    prepare_corpus(stories, "bytes", tmp_path / "out")
    train = load_corpus(str(tmp_path / "out"), 16).train

    def first_batch(**options):
        sampler = ResumableSampler(len(train), 0, 8)
        return next(iter(DataLoader(train, 8, sampler=sampler, **options)))

    spawned = first_batch(num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(spawned, first_batch(num_workers=0))


def test_a_prepared_folder_with_its_tokenizer_written_differently(stories, tmp_path):
    """As transformers does where it saves a model. The folder's own tokenizer is the corpus's."""
    made = prepare_corpus(stories, "bpe:300", tmp_path / "prepared")
    definition = json.loads((tmp_path / "prepared" / "tokenizer.json").read_text())
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(definition, indent=1))
    corpus = load_corpus(str(tmp_path / "prepared"), 4, str(other))
    assert corpus.tokenizer.digest == made.tokenizer.digest
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "a"}))  # the same ids with another separator
    with pytest.raises(ValueError, match="prepared with the tokenizer bpe:300, not"):
        load_corpus(str(tmp_path / "prepared"), 4, str(other))
    config.unlink()
    vocabulary = definition["model"]["vocab"]  # as many tokens, with the same separator
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other.write_text(json.dumps(definition))
    assert load_tokenizer(str(other)).end == made.tokenizer.end
    with pytest.raises(ValueError, match="prepared with the tokenizer bpe:300, not"):
        load_corpus(str(tmp_path / "prepared"), 4, str(other))
