"""Documents to shards: runs of tokens of bounded size, the same whether they are kept in memory or written."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .sources import Document
from .tokenizing import Tokenizer

SHARD = 2**26  # tokens
BATCH = 2**21  # characters given to the tokenizer at once


class Shard(NamedTuple):
    tokens: Tensor
    documents: Tensor
    text_bytes: int  # of the documents that begin here, in UTF-8; a separator is one byte
    digest: str
    file: Path | None = None

    @property
    def header(self) -> dict[str, str]:
        return {
            "dtype": str(self.tokens.dtype).removeprefix("torch."),
            "tokens": str(len(self.tokens)),
            "documents": str(len(self.documents)),
            "text_bytes": str(self.text_bytes),
            "sha256": self.digest,
        }


class Packer:
    """Gathers tokens until they are a shard."""

    def __init__(self, kind: Tokenizer):
        self.end = kind.end
        self.dtype = np.dtype(np.uint16 if kind.vocab <= 2**16 else np.uint32)
        self.begun = False
        self.clear()

    def clear(self) -> None:
        self.pieces: list[np.ndarray] = []
        self.documents: list[int] = []
        self.size = self.text_bytes = 0

    def add(self, text: str, ids: np.ndarray) -> Iterator[Shard]:
        """Take a document, however long; what comes out is full."""
        if not len(ids):
            return
        if self.begun:
            self.text_bytes += 1
            yield from self.fill(np.array([self.end]))
        self.begun = True
        self.documents.append(self.size)
        self.text_bytes += len(text.encode())
        yield from self.fill(ids)

    def fill(self, ids: np.ndarray) -> Iterator[Shard]:
        while len(ids):
            part, ids = ids[: SHARD - self.size], ids[SHARD - self.size :]
            self.pieces.append(part.astype(self.dtype))
            self.size += len(part)
            if self.size == SHARD:
                yield from self.rest()

    def rest(self) -> Iterator[Shard]:
        """What there is, if anything."""
        if self.size:
            tokens, documents = np.concatenate(self.pieces), np.array(self.documents, np.int64)
            text_bytes = self.text_bytes
            self.clear()
            found = torch.from_numpy(tokens), torch.from_numpy(documents)
            yield Shard(*found, text_bytes, checksum(*found))


def checksum(tokens: Tensor, documents: Tensor) -> str:
    digest = hashlib.sha256(tokens.numpy().data)
    digest.update(documents.numpy().data)
    return digest.hexdigest()


def pack(found: Iterable[tuple[str, Document]], kind: Tokenizer) -> Iterator[tuple[str, Shard]]:
    """The shards of every set, as they become full."""
    packers: dict[str, Packer] = {}
    for batch in batches(found):
        encoded = kind.encode([document.text for _, document in batch])
        for (name, document), ids in zip(batch, encoded, strict=True):
            packer = packers.setdefault(name, Packer(kind))
            for shard in packer.add(document.text, ids):
                yield name, shard
    for name, packer in packers.items():
        for shard in packer.rest():
            yield name, shard


def batches(found: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch, size = [], 0
    for name, document in found:
        batch.append((name, document))
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
