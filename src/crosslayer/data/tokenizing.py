"""Text to tokens: bytes, a byte-level BPE trained on the data, or any tokenizer.json."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..validation import did_you_mean

FILE = "tokenizer.json"
END = "<|endoftext|>"
ENDS = (
    END,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
)  # what separates documents, the first found
SAMPLE = 2**28  # characters a BPE is trained on, the first of the training documents


@dataclass(frozen=True)
class Tokenizer:
    """What turns text into the ids of tokens.

    Args:
        name: as it was asked for: bytes, bpe:4096, or a path.
        vocab: one more than the largest id.
        end: the id that stands between two documents.
        definition: the content of tokenizer.json; None for bytes.
    """

    name: str
    vocab: int
    end: int
    definition: str | None = None

    @property
    def digest(self) -> str:
        """What it is, whatever it is called."""
        return hashlib.sha256(f"{self.end} {self.definition or self.name}".encode()).hexdigest()[
            :16
        ]

    @cached_property
    def model(self) -> Any:
        return parsed(self.definition or "", self.name)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without any around it. A special token's own text is read as that token."""
        if self.definition is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return [
            np.array(e.ids, np.uint32)
            for e in self.model.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def save(self, folder: Path) -> Path | None:
        """Write tokenizer.json, where there is one, and say where."""
        if self.definition is None:
            return None
        (folder / FILE).write_text(self.definition, "utf8")
        return folder / FILE

    def __getstate__(self) -> dict[str, Any]:  # processes parse it again; most of them never encode
        return {key: value for key, value in self.__dict__.items() if key != "model"}


def load_tokenizer(name: str, texts: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """A tokenizer by name: "bytes", "bpe:4096" of these texts, or a path to a tokenizer.json or a folder with one.

    Documents are separated by byte 0, by <|endoftext|>, or by what the tokenizer.json says: the eos_token of a
    tokenizer_config.json beside it, else the first of `ENDS` that it knows.

    Raises:
        ValueError: no such tokenizer, or texts too few for the vocabulary.
    """
    if name == "bytes":
        return Tokenizer(name, 256, 0)
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < 257:
            raise ValueError(
                f"{name}: expected bpe:SIZE with a vocabulary of at least 257 (256 bytes and {END})"
            )
        if texts is None:
            raise ValueError(f"{name}: a BPE needs texts to be trained on")
        return trained(name, int(size), texts())
    return of_file(name, Path(name))


def trained(name: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2's: the same texts always give the same one."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        sample(texts),
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if model.get_vocab_size() < size:
        raise ValueError(
            f"{name}: the training text gives only {model.get_vocab_size()} tokens; ask for fewer"
        )
    return Tokenizer(name, size, 0, model.to_str())  # special tokens come first


def byte_tokenizer_json() -> str:
    """The tokenizer.json of "bytes", for those who read no other: token i is byte i."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    # a printable byte is written as itself, the rest as the characters from 256 on
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own, others = (
        {ord(c): c for c in letters if ord(c) < 256},
        iter(c for c in letters if ord(c) >= 256),
    )
    model = Model(models.BPE({own.get(byte) or next(others): byte for byte in range(256)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model.to_str()


def sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def of_file(name: str, path: Path) -> Tokenizer:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        known = did_you_mean(name, ["bytes", "bpe:4096"])
        raise ValueError(
            f"unknown tokenizer {name!r}{known}; expected bytes, bpe:SIZE, or a path to a {FILE}"
        )
    try:
        definition = file.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    model = parsed(definition, str(file))
    known = model.get_vocab(with_added_tokens=True)
    end = next((token for token in (configured(file), *ENDS) if token in known), None)
    if end is None:
        raise ValueError(
            f"{file}: has no token that separates documents, none of {', '.join(ENDS)}; name it as eos_token in a "
            f"tokenizer_config.json beside it"
        )
    return Tokenizer(name, max(known.values()) + 1, known[end], definition)


def configured(file: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, which may be an object with its content."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text("utf8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{config}: cannot be read ({error})") from None
    return token.get("content") if isinstance(token, dict) else token


def parsed(definition: str, name: str) -> Any:
    from tokenizers import Tokenizer as Model

    try:
        model = Model.from_str(definition)
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"{name}: not a {FILE} ({error})") from None
    model.no_truncation()
    model.no_padding()
    return model
