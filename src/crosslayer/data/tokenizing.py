"""Text to token ids: bytes, a byte-level BPE trained on the data, or any tokenizer.json.

The libraries are `tokenizers` and, for a name on the Hub, `huggingface_hub`.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..files import read_json, short_digest
from ..hub import can_be_hub_name, download_files
from ..validation import did_you_mean

BYTE_TOKENIZER = "bytes"  # the name of the tokenizer whose token i is byte i
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # beside an older tokenizer_config.json
BYTE_END = "\0"  # the token of byte 0, which separates documents of bytes
END_OF_TEXT = "<|endoftext|>"
# what separates documents where no file names an eos_token: the first of these that is known
SEPARATOR_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_LARGEST_BPE = 2**24
_SPACE = "\u0120"  # how a byte-level BPE writes a space
_CHUNK_IDS = 2**20  # read at once where all ids are read
_BPE_CHARACTERS = 2**28  # a BPE is trained on this many, the first of the training documents


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into token ids.

    Args:
        name: as the user wrote it: bytes, bpe:4096, a path, or a name on the Hub.
        vocab: one more than the largest id.
        end: the id that separates two documents.
        definition: the content of tokenizer.json; None for bytes.
    """

    name: str
    vocab: int
    end: int
    definition: str | None = None

    @property
    def digest(self) -> str:
        """Identifies the tokenizer, whatever its name."""
        return short_digest(f"{self.end} {self.definition or self.name}")

    @cached_property
    def model(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return _parse_definition(self.definition or "", self.name)

    def has_ids_of(self, other: "Tokenizer") -> bool:
        """Whether every id means the same, also where the files of both are written differently."""
        if self.definition is None or other.definition is None or self.end != other.end:
            return self.digest == other.digest
        vocabularies = [tokenizer.model.get_vocab() for tokenizer in (self, other)]
        return bool(vocabularies[0] == vocabularies[1])

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without special tokens around it.

        The text of a special token is read as that token.
        """
        if self.definition is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """The text of these ids, with that of special tokens."""
        if self.definition is None:
            return ids.astype(np.uint8).tobytes().decode(errors="replace")
        text: str = self.model.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def count_bytes(self, ids: np.ndarray) -> int:
        """The UTF-8 bytes of the text of these ids, with one for each separator."""
        if self.definition is None:
            return len(ids)
        if self._id_bytes is not None:
            size = sum(int(self._id_bytes[chunk].sum()) for chunk in split_ids(ids))
            return size - self._count_added_spaces(ids)
        # some decoders strip a space at the start of what they get
        texts = sum(len(self.decode(document).encode()) for document in split_at(ids, self.end))
        return texts + int(np.count_nonzero(ids == self.end))

    def _count_added_spaces(self, ids: np.ndarray) -> int:
        """The documents that begin with a space, where the tokenizer puts one before each text.

        A space of the text itself is taken for one of these.
        """
        if not len(self._ids_with_space):
            return 0
        starts = np.array([0, *(place + 1 for place in find_ids(ids, self.end))])
        return int(np.isin(ids[starts[starts < len(ids)]], self._ids_with_space).sum())

    @cached_property
    def _ids_with_space(self) -> np.ndarray:
        """The ids of tokens that begin with a space; none where no space is put before a text."""
        first = json.loads(self.definition or "{}").get("pre_tokenizer") or {}
        steps = first.get("pretokenizers", [first])
        if not any(s["type"] == "ByteLevel" and s.get("add_prefix_space") for s in steps if s):
            return np.array([], np.int64)
        vocabulary = self.model.get_vocab()
        return np.array([i for token, i in vocabulary.items() if token.startswith(_SPACE)])

    @cached_property
    def _id_bytes(self) -> np.ndarray | None:
        """The bytes of each id [vocab], one of the separator; None where they depend on others.

        A byte-level BPE writes every byte as one character of its alphabet. Other tokens, added to
        its vocabulary, are text as they are.
        """
        decoder = json.loads(self.definition or "{}").get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        sizes = np.zeros(self.vocab, np.int64)
        for token, number in self.model.get_vocab(with_added_tokens=False).items():
            sizes[number] = len(token)
        for number, token in self.model.get_added_tokens_decoder().items():
            sizes[number] = len(token.content.encode())
        sizes[self.end] = 1
        return sizes

    def __getstate__(self) -> dict[str, Any]:
        # a worker process parses the definition again, if it encodes at all
        return {field.name: getattr(self, field.name) for field in fields(self)}


def split_ids(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Views of ids, one after another, so that what is computed of them stays small."""
    for start in range(0, len(ids), _CHUNK_IDS):
        yield ids[start : start + _CHUNK_IDS]


def find_ids(ids: np.ndarray, number: int) -> Iterator[int]:
    """The places of one id among others."""
    start = 0
    for chunk in split_ids(ids):
        yield from (start + np.flatnonzero(chunk == number)).tolist()
        start += len(chunk)


def split_at(ids: np.ndarray, separator: int) -> Iterator[np.ndarray]:
    """What is between two separators, and before the first and after the last one, if anything."""
    start = 0
    for end in [*find_ids(ids, separator), len(ids)]:
        if end > start:
            yield ids[start:end]
        start = end + 1


def load_tokenizer(name: str, texts: Callable[[], Iterable[str]] = lambda: ()) -> Tokenizer:
    """A tokenizer by name.

    Documents are separated by byte 0, by <|endoftext|> in a BPE, and otherwise by the eos_token
    that the files beside the tokenizer.json name, or by the first of `SEPARATOR_TOKENS` that it
    has.

    Args:
        name: "bytes"; "bpe:4096", a byte-level BPE trained on `texts`; a path to a tokenizer.json
            or its folder; or a name on the Hub like openai-community/gpt2.
        texts: returns the texts that a BPE is trained on; none by default.

    Raises:
        ValueError: no such tokenizer, or texts too few for the vocabulary.
    """
    if name == BYTE_TOKENIZER:
        return Tokenizer(name, 256, 0)
    if size := re.fullmatch(r"bpe:(\d+)", name):
        return _train_bpe(name, int(size[1]), texts())
    path = Path(name)
    if path.is_file():
        return _read_tokenizer(name, path)
    if path.is_dir() and name:
        return _read_tokenizer(name, path / TOKENIZER_FILE)
    suggestion = did_you_mean(name, ["bytes", "bpe:4096"])
    reason = ""
    if can_be_hub_name(name) and not suggestion:
        try:
            files = [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE]
            folder = download_files(name, files)
            return _read_tokenizer(name, folder / TOKENIZER_FILE)
        except ValueError as error:
            if "/" in name:
                raise
            reason = f" ({error})"  # a mistyped word, or an old name like gpt2
    raise ValueError(
        f"unknown tokenizer {name!r}{suggestion}; expected bytes, bpe:SIZE, a path to a "
        f"{TOKENIZER_FILE}, or a name on the Hub like openai-community/gpt2{reason}"
    )


def _train_bpe(name: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2's. The same texts always give the same tokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if not 257 <= size <= _LARGEST_BPE:
        raise ValueError(
            f"{name}: needs a size of at least 257 (256 bytes and {END_OF_TEXT}), "
            f"and at most {_LARGEST_BPE}"
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_first_characters(texts), trainer)
    if model.get_vocab_size() < size:
        raise ValueError(
            f"{name}: the training text gives only {model.get_vocab_size()} tokens; ask for fewer"
        )
    return Tokenizer(name, size, 0, model.to_str())  # special tokens come first


def _first_characters(texts: Iterable[str]) -> Iterator[str]:
    left = _BPE_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def byte_tokenizer_json() -> str:
    """The tokenizer.json of "bytes", for libraries that read no other: token i is byte i."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # ByteLevel writes a printable byte as itself, and the others as the characters from 256 on
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {character for character in alphabet if ord(character) < 256}
    substitutes = iter(character for character in alphabet if ord(character) >= 256)
    vocabulary = {}
    for byte in range(256):
        character = chr(byte) if chr(byte) in printable else next(substitutes)
        vocabulary[character] = byte
    # An end token is looked for in the text itself. Byte 0's substitute is a letter, so it is not
    # the token's name: the letter would be read as byte 0.
    vocabulary = {BYTE_END if byte == 0 else c: byte for c, byte in vocabulary.items()}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    model.add_special_tokens([BYTE_END])
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model.to_str()


def _is_of_bytes(definition: str) -> bool:
    """Whether the content of a tokenizer.json is `byte_tokenizer_json`'s, as of a model trained on
    bytes.
    """
    given = json.loads(definition)
    expected = json.loads(byte_tokenizer_json())
    # transformers adds a post-processor, which is for special tokens
    return bool({**given, "post_processor": None} == {**expected, "post_processor": None})


def make_tokenizer(
    name: str, definition: str, eos_token: str | None, source: str | Path
) -> Tokenizer:
    """The tokenizer of a tokenizer.json; that of bytes where a model was trained on bytes.

    Documents are separated by the eos_token if the vocabulary has it, else by the first of
    `SEPARATOR_TOKENS` that it has.

    Args:
        name: as the user wrote it.
        definition: the content of tokenizer.json.
        eos_token: the token that ends a text, where a file names one.
        source: where the definition is from, for the message of an error.

    Raises:
        ValueError: the definition is not that of a tokenizer, or it has no token that separates
            documents.
    """
    vocabulary = _parse_definition(definition, str(source)).get_vocab(with_added_tokens=True)
    if _is_of_bytes(definition):
        return load_tokenizer(BYTE_TOKENIZER)
    known = [token for token in (eos_token, *SEPARATOR_TOKENS) if token in vocabulary]
    if not known:
        raise ValueError(
            f"{source}: has no token that separates documents, none of "
            f"{', '.join(SEPARATOR_TOKENS)}; name it as eos_token in its {TOKENIZER_CONFIG_FILE}"
        )
    return Tokenizer(name, max(vocabulary.values()) + 1, vocabulary[known[0]], definition)


def _read_tokenizer(name: str, file: Path) -> Tokenizer:
    if not file.is_file():
        raise ValueError(f"{file}: no such file, expected a tokenizer")
    try:
        definition = file.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    return make_tokenizer(name, definition, _read_eos_token(file.parent), file)


def _read_eos_token(folder: Path) -> str | None:
    """The eos_token that transformers finds in a tokenizer's folder, if any."""
    eos_token = None
    for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        content = read_json(folder / name) if (folder / name).exists() else {}
        eos_token = content.get("eos_token") or eos_token
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        if eos_token is not None and not isinstance(eos_token, str):
            raise ValueError(
                f"{folder / name}: its eos_token must be text, got {reprlib.repr(eos_token)}"
            )
        if "added_tokens_decoder" in content:  # transformers then ignores the older file
            break
    return eos_token


def _parse_definition(definition: str, name: str) -> Any:
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{name}: not a {TOKENIZER_FILE} ({error})") from None
    model.no_truncation()
    model.no_padding()
    return model
