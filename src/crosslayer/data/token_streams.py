"""Documents to streams of token ids: one stream for each set, in memory or memory-mapped."""

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .readers import Document
from .tokenizing import Tokenizer, split_ids

BATCH_DOCUMENTS = 128  # tokenised at once

ProgressCallback = Callable[[str, "StreamCounts"], None]  # takes the name of a set


class StreamCounts(NamedTuple):
    """Sizes of a stream. text_bytes counts UTF-8, with one byte for each separator."""

    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The token ids of a set of documents, with the tokenizer's separator between two documents.

    Args:
        ids: an array; or a `datasets.Dataset` whose rows of the column "tokens" follow one another.
            A dataset is memory-mapped, and pickled as the names of its files.
        vocab: one more than the largest possible id.
        text_bytes: UTF-8 bytes of the text, with one for each separator.
        known_digest: the digest, if it was computed before.
    """

    ids: Any
    vocab: int
    text_bytes: int
    known_digest: str | None = None

    def __len__(self) -> int:
        return self._ends[-1]

    def window(self, start: int, length: int) -> Tensor:
        """The ids from `start` on, [length] int64.

        Raises:
            IndexError: the stream has not as many.
        """
        if not 0 <= start < start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while length:
            chunk = self._chunks[index]
            offset = start - self._ends[index] + len(chunk)
            piece = chunk[offset : offset + length]
            pieces.append(piece)
            start += len(piece)
            length -= len(piece)
            index += 1
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64))

    @cached_property
    def digest(self) -> str:
        """Identifies the ids, however they are stored."""
        if self.known_digest is not None:
            return self.known_digest
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece.astype("<u4").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def entropy_per_token(self) -> float:
        """Order-0 entropy in bits a token: the loss of a model that knows only the frequencies."""
        counts = torch.zeros(self.vocab, dtype=torch.float64)
        for piece in self._pieces():
            ids = torch.from_numpy(piece.astype(np.int64))
            counts += torch.bincount(ids, minlength=self.vocab)
        p = counts / len(self)
        return -(p * p.clamp_min(1e-300).log2()).sum().item()

    @cached_property
    def _chunks(self) -> list[np.ndarray]:
        """Views of the ids: one for each record batch of a dataset."""
        if isinstance(self.ids, np.ndarray):
            return [self.ids]
        column = self.ids.data.column("tokens")
        return [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in column.chunks]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(chunk) for chunk in self._chunks))

    def all_ids(self) -> np.ndarray:
        """The ids in memory, [tokens]."""
        return self._chunks[0] if len(self._chunks) == 1 else np.concatenate(self._chunks)

    def _pieces(self) -> Iterator[np.ndarray]:
        for chunk in self._chunks:
            yield from split_ids(chunk)

    def __getstate__(self) -> dict[str, Any]:
        # without the views, which would be pickled as copies
        return {field.name: getattr(self, field.name) for field in fields(self)}


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)


def encode_sets(
    documents: Iterator[tuple[str, Document]],
    tokenizer: Tokenizer,
    write: Callable[[str, np.ndarray], Any],
    progress: ProgressCallback | None = None,
) -> dict[str, StreamCounts]:
    """Tokenise documents into the stream of their set, a batch of documents in memory at a time.

    Args:
        documents: each with the name of its set.
        tokenizer: of all of them.
        write: takes the name of a set and the ids of a document, preceded by a separator unless it
            is the first of its set. The ids of a set one after another are its stream.
        progress: called after every document.

    Returns:
        The sizes of each set that has tokens.
    """
    dtype = id_dtype(tokenizer)
    separator = np.array([tokenizer.end], dtype)
    counts: dict[str, StreamCounts] = {}
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode([document.text for _, document in batch])
        for (name, document), ids in zip(batch, encoded, strict=True):
            if document.ids is None:
                text_bytes = len(document.text.encode())
            else:
                ids = document.ids
                text_bytes = tokenizer.count_bytes(ids)
            if not len(ids):
                continue
            row = ids.astype(dtype)
            before = counts.get(name, StreamCounts(0, 0, 0))
            if before.documents:
                row = np.concatenate([separator, row])
                text_bytes += 1
            write(name, row)
            counts[name] = StreamCounts(
                before.documents + 1, before.tokens + len(row), before.text_bytes + text_bytes
            )
            if progress is not None:
                progress(name, counts[name])
    return counts


def encode_in_memory(
    documents: Iterator[tuple[str, Document]], tokenizer: Tokenizer
) -> dict[str, TokenStream]:
    """The streams of the sets that have tokens, tokenised now."""
    rows = defaultdict(list)
    counts = encode_sets(documents, tokenizer, lambda name, ids: rows[name].append(ids))
    return {
        name: TokenStream(np.concatenate(rows[name]), tokenizer.vocab, sizes.text_bytes)
        for name, sizes in counts.items()
    }
