"""Streams of tokens, in memory or in a folder that was prepared once; read a window at a time.

A prepared folder holds, of each set, shards NAME-00000.safetensors with

    tokens     [N] uint16, or uint32 where the vocabulary needs it: documents with the tokenizer's `end` between them
    documents  [documents that begin here] int64: where in `tokens` they begin

whose header says format, tokenizer, source and checksum; the tokenizer.json, where there is one; and corpus.json, which
lists the shards. It is written last: without it a folder is not a corpus.
"""

import bisect
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import atomic_replace, fsync_path, write_text_atomic
from .locked_folder import claimed
from .shards import BATCH, Shard, checksum, pack
from .sources import TRAIN, Document, parts
from .tokenizing import FILE, Tokenizer, load_tokenizer

FORMAT = "crosslayer tokens 1"
CORPUS, BUSY = "corpus.json", "preparing.lock"
OURS = re.compile(r"\w[\w.-]*-\d{5}\.safetensors(\.part)?|corpus\.json\.part|tokenizer\.json")
Watch = Callable[
    [str, int, int], None
]  # of a set (or of "tokenizer", while one is trained): documents and bytes read


@dataclass(frozen=True, eq=False)
class Tokens:
    """One stream of tokens, in memory or memory-mapped. It travels to other processes as the names of its files."""

    shards: tuple[Shard, ...]
    vocab: int
    tokenizer: str

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __repr__(self) -> str:
        return f"{len(self):,} tokens of {self.tokenizer}"

    def window(self, start: int, length: int) -> Tensor:
        """The tokens from `start` on, [length] int64."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        found = []
        index = bisect.bisect_right(self.ends, start)
        while length:
            shard = self.shards[index].tokens
            piece = shard[start - self.ends[index] + len(shard) :][:length]
            found.append(piece.long())
            start, length, index = start + len(piece), length - len(piece), index + 1
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(len(shard.tokens) for shard in self.shards))

    @property
    def documents(self) -> Tensor:
        """Where each document begins, [documents] int64."""
        begins = [
            s.documents + end - len(s.tokens) for s, end in zip(self.shards, self.ends, strict=True)
        ]
        return torch.cat(begins) if begins else torch.empty(0, dtype=torch.long)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text behind it, with one for each separator."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join(shard.digest for shard in self.shards).encode()).hexdigest()[
            :16
        ]

    @cached_property
    def entropy(self) -> float:
        """Order-0 entropy in bits a token: what a model that knows only their frequencies reaches."""
        counts = torch.zeros(self.vocab, dtype=torch.float64)
        for piece in (p for shard in self.shards for p in shard.tokens.split(BATCH)):
            counts += torch.bincount(piece.long(), minlength=self.vocab)
        p = counts / len(self)
        return -(p * p.clamp_min(1e-300).log2()).sum().item()

    def __getstate__(self) -> dict[str, Any]:
        # arrays, as torch cannot pickle uint16
        shards = [s.file or (s.tokens.numpy(), s.documents.numpy(), *s[2:]) for s in self.shards]
        return {"shards": shards, "vocab": self.vocab, "tokenizer": self.tokenizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state | {"shards": tuple(unpickled(shard) for shard in state["shards"])}
        )


def unpickled(shard: Any) -> Shard:
    if isinstance(shard, Path):
        return mapped(shard)[0]
    tokens, documents, *others = shard
    return Shard(torch.from_numpy(tokens), torch.from_numpy(documents), *others)


@dataclass(frozen=True)
class Prepared:
    """What a prepared folder holds."""

    folder: Path
    source: str
    tokenizer: Tokenizer
    sets: dict[str, Tokens]


def silent(name: str, documents: int, text_bytes: int) -> None:
    pass


def prepare_corpus(
    source: str,
    name: str,
    folder: str | Path,
    valid: dict[str, str] | None = None,
    watch: Watch = silent,
) -> Prepared:
    """Tokenise a source into a new or empty folder, in bounded memory; one that was interrupted starts over.

    Args:
        source: of the training documents, and of the held-out ones where `valid` names none.
        name: of the tokenizer.
        folder: what `open_corpus` opens, once it is complete.
        valid: sources of validation sets, by their names.
        watch: called after every document.

    Raises:
        ValueError: the source, the tokenizer or the folder is not as it should be. Nothing has been left behind.
    """
    folder = Path(folder)
    with claimed(folder, CORPUS, BUSY, OURS):
        kind = learn(name, source, valid, watch)
        if file := kind.save(folder):
            fsync_path(file)
        common = {
            "format": FORMAT,
            "source": source,
            "tokenizer": kind.name,
            "tokenizer_digest": kind.digest,
        }
        sets: dict[str, list[dict[str, Any]]] = {}
        for part, shard in pack(counted(parts(source, valid), watch), kind):
            listed = sets.setdefault(part, [])
            file = folder / f"{part}-{len(listed):05d}.safetensors"
            write(file, shard, {**common, "set": part, **shard.header})
            listed.append({"file": file.name, "bytes": file.stat().st_size, **shard.header})
        about = {"name": kind.name, "vocab": kind.vocab, "end": kind.end, "digest": kind.digest}
        written = {"format": FORMAT, "source": source, "tokenizer": about, "sets": sets}
        write_text_atomic(folder / CORPUS, json.dumps(written, indent=1))
    return open_prepared(folder)


def learn(
    name: str, source: str, valid: dict[str, str] | None = None, watch: Watch = silent
) -> Tokenizer:
    """The tokenizer of that name; one that has to be trained sees the training documents only."""

    def texts() -> Iterator[str]:
        found = (
            ("tokenizer", document) for part, document in parts(source, valid) if part == TRAIN
        )
        return (document.text for _, document in counted(found, watch))

    return load_tokenizer(name, texts)


def counted(found: Iterator[tuple[str, Document]], watch: Watch) -> Iterator[tuple[str, Document]]:
    counts: dict[str, tuple[int, int]] = {}
    for part, document in found:
        yield part, document
        documents, size = counts.get(part, (0, 0))
        counts[part] = documents + 1, size + len(document.text.encode())
        watch(part, *counts[part])


def write(file: Path, shard: Shard, header: dict[str, str]) -> None:
    from safetensors.torch import save_file

    aside = file.with_name(f"{file.name}.part")
    save_file({"tokens": shard.tokens, "documents": shard.documents}, aside, header)
    atomic_replace(aside, file)


def open_prepared(folder: str | Path) -> Prepared:
    """A prepared folder, memory-mapped. Sizes and headers are checked; `verify` reads all of it.

    Raises:
        ValueError: not a prepared folder, not complete, or not as it was written.
    """
    folder = Path(folder)
    path = folder / CORPUS
    if not path.is_file():
        if (folder / BUSY).is_file():
            raise ValueError(f"{folder}: its preparation was interrupted; do it again")
        raise ValueError(f"{folder}: not a prepared corpus, as it has no {CORPUS}")
    try:
        written = json.loads(path.read_text("utf8"))
        if written["format"] != FORMAT:
            raise ValueError(f"{path}: its format is {written['format']!r}, expected {FORMAT!r}")
        about = written["tokenizer"]
        definition = (folder / FILE).read_text("utf8") if (folder / FILE).is_file() else None
        kind = Tokenizer(about["name"], about["vocab"], about["end"], definition)
        if kind.digest != about["digest"]:
            raise ValueError(
                f"{folder / FILE}: missing, or another tokenizer than the corpus was made with"
            )
        common = {"format": FORMAT, "tokenizer_digest": kind.digest}
        sets = {
            name: Tokens(
                tuple(checked(folder, shard, common | {"set": name}) for shard in shards),
                kind.vocab,
                kind.name,
            )
            for name, shards in written["sets"].items()
        }
        return Prepared(folder, written["source"], kind, sets)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a prepared corpus's (damaged?)") from None


def checked(folder: Path, listed: dict[str, Any], common: dict[str, str]) -> Shard:
    """A shard that is as corpus.json says, as far as that can be seen without reading it."""
    file = folder / listed["file"]
    if not file.is_file():
        raise ValueError(f"{file}: missing, though {CORPUS} lists it")
    if file.stat().st_size != listed["bytes"]:
        raise ValueError(
            f"{file}: has {file.stat().st_size:,} bytes where {CORPUS} says {listed['bytes']:,}; cut off, or another's"
        )
    shard, header = mapped(file)
    expected = common | {
        key: value for key, value in listed.items() if key not in ("file", "bytes")
    }
    for key, value in expected.items():
        if header.get(key) != value:
            raise ValueError(
                f"{file}: of another corpus, its {key} is {header.get(key)} where {CORPUS} says {value}"
            )
    return shard


def mapped(file: Path) -> tuple[Shard, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
            tokens, documents = opened.get_tensor("tokens"), opened.get_tensor("documents")
        return Shard(tokens, documents, int(header["text_bytes"]), header["sha256"], file), header
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file}: not a shard of tokens, or a broken one ({error})") from None


def verify_corpus(folder: str | Path) -> int:
    """Read every shard of a prepared folder and compare it with its checksum; return how many there are.

    Raises:
        ValueError: which are not as they were written.
    """
    shards = [shard for tokens in open_prepared(folder).sets.values() for shard in tokens.shards]
    broken = [s.file.name for s in shards if s.file and checksum(s.tokens, s.documents) != s.digest]
    if broken:
        raise ValueError(
            f"{folder}: {len(broken)} of {len(shards)} shards are not as written: {', '.join(broken)}"
        )
    return len(shards)
