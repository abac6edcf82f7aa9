"""What the training loop reads: windows of tokens to train on, and validation sets by name.

data = corpus("stdlib", context=256)
order = Order(len(data.train), seed=0, batch=8, start=step)
for batch in DataLoader(data.train, batch_size=8, sampler=order):  # [8 257], endless
    ...
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from .prepared import BUSY, CORPUS, Tokens, learn, open_prepared
from .sampler import BatchSampler
from .shards import Shard, pack
from .sources import HELD_OUT, TRAIN, gathered, named_apart, parts
from .tokenizing import Tokenizer, load_tokenizer

__all__ = ["HELD_OUT", "BatchSampler", "Corpus", "Windows", "corpus"]


@dataclass(frozen=True)
class Windows(Dataset[Tensor]):
    """A stream cut into windows of context + 1 tokens without overlap, [context + 1] int64 each."""

    tokens: Tokens
    context: int

    def __len__(self) -> int:
        return len(self.tokens) // (self.context + 1)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.tokens.window(index * (self.context + 1), self.context + 1)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to be judged by.

    Args:
        name: the source.
        train: windows of the training tokens.
        valid: windows of each validation set.
        tokenizer: of all of them.
    """

    name: str
    train: Windows
    valid: dict[str, Windows]
    tokenizer: Tokenizer

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab

    @property
    def digest(self) -> str:
        """Identifies every token of it, wherever it was read from."""
        sets = ((TRAIN, self.train), *sorted(self.valid.items()))
        tokens = " ".join(f"{name} {windows.tokens.digest}" for name, windows in sets)
        return hashlib.sha256(f"{self.tokenizer.digest} {tokens}".encode()).hexdigest()[:16]

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Of each validation set: a loss in bits a token divided by it is in bits a byte."""
        return {name: w.tokens.text_bytes / len(w.tokens) for name, w in self.valid.items()}

    @property
    def entropy(self) -> dict[str, float]:
        """Order-0 entropy of each validation set's tokens, in bits a byte of its text."""
        return {
            name: w.tokens.entropy / self.bytes_per_token[name] for name, w in self.valid.items()
        }


def load_corpus(
    source: str, context: int, tokenizer: str = "bytes", valid: dict[str, str] | None = None
) -> Corpus:
    """The training and validation data of a source: read and tokenised now, or prepared in a folder.

    Args:
        source: what `sources.documents` takes, or a folder that `crosslayer data prepare` made.
        context: tokens a sequence.
        tokenizer: "bytes", "bpe:4096", or a path to a tokenizer.json; a prepared folder's must be the same.
        valid: sources of validation sets by their names. Without any, a part of the source is "held-out"; with some,
            all of it is trained on. A prepared folder keeps those that it has.

    Raises:
        ValueError: the source, the tokenizer or a validation set is not as it should be, or too small for the context.
    """
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    valid = valid or {}
    folder = Path(source)
    if (folder / CORPUS).exists() or (folder / BUSY).exists():
        kind, sets = opened(folder, tokenizer, valid)
    else:
        kind = learn(tokenizer, source, valid)
        sets = in_memory(pack(parts(source, valid), kind), kind)
    names = (TRAIN, *([name for name in (*sets, *valid) if name != TRAIN] or [HELD_OUT]))
    windows = {
        name: Windows(sets.get(name, Tokens((), kind.vocab, kind.name)), context) for name in names
    }
    for name, cut in windows.items():
        if not len(cut):
            which = {TRAIN: "training part", HELD_OUT: "validation part"}.get(
                name, f"validation set {name}"
            )
            unit = "tokens" if kind.definition else "bytes"
            raise ValueError(
                f"{source}: its {which} has {len(cut.tokens)} {unit}, fewer than one context of {context} and the next"
            )
    return Corpus(source, windows.pop(TRAIN), windows, kind)


def opened(folder: Path, asked: str, valid: dict[str, str]) -> tuple[Tokenizer, dict[str, Tokens]]:
    """A prepared folder's sets, and those that are tokenised now to be beside them."""
    prepared = open_prepared(folder)
    kind = prepared.tokenizer
    same = (
        asked == kind.name
        if asked.startswith(("bytes", "bpe:"))
        else load_tokenizer(asked).digest == kind.digest
    )
    if not same:
        raise ValueError(f"{folder}: prepared with the tokenizer {kind.name}, asked for {asked}")
    for name in named_apart(valid):
        if name in prepared.sets:
            raise ValueError(
                f"{folder}: has a validation set {name} already; name the other one differently"
            )
    return kind, {**prepared.sets, **in_memory(pack(gathered(valid), kind), kind)}


def in_memory(shards: Iterable[tuple[str, Shard]], kind: Tokenizer) -> dict[str, Tokens]:
    found: dict[str, list[Shard]] = {}
    for name, shard in shards:
        found.setdefault(name, []).append(shard)
    return {name: Tokens(tuple(several), kind.vocab, kind.name) for name, several in found.items()}
