"""What the training loop reads: windows of tokens to train on, and validation sets by name.

corpus = load_corpus("stdlib", context=256)
sampler = ResumableSampler(len(corpus.train), seed=0, batch=8, start=step)
for batch in DataLoader(corpus.train, batch_size=8, sampler=sampler):  # [8 257], endless
    ...
"""

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset

from ..files import short_digest
from ..validation import check_positive
from .prepared import open_prepared
from .sources import (
    TRAIN_SET,
    TextSource,
    check_sources,
    name_sets,
    read_sets,
    set_names,
    training_texts,
)
from .token_streams import TokenStream, encode_in_memory
from .tokenizing import BYTE_TOKENIZER, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TokenWindows(Dataset[Tensor]):
    """A stream cut into windows of context + 1 tokens without overlap, [context + 1] int64 each."""

    tokens: TokenStream
    context: int

    def __len__(self) -> int:
        return len(self.tokens) // (self.context + 1)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens.window(index * (self.context + 1), self.context + 1)


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation.

    Args:
        train: windows of the training tokens.
        valid: windows of each validation set.
        tokenizer: of all of them.
    """

    train: TokenWindows
    valid: dict[str, TokenWindows]
    tokenizer: Tokenizer

    @property
    def digest(self) -> str:
        """Identifies every token, whether tokenised now or read from a prepared folder."""
        parts = [self.tokenizer.digest]
        for name, windows in [(TRAIN_SET, self.train), *sorted(self.valid.items())]:
            parts.append(f"{name} {windows.tokens.digest}")
        return short_digest(" ".join(parts))

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Of each validation set. Bits a token divided by it are bits a byte."""
        return {name: w.tokens.text_bytes / len(w.tokens) for name, w in self.valid.items()}


def load_corpus(
    source: str, context: int, tokenizer: str | None = None, valid: dict[str, str] | None = None
) -> Corpus:
    """The training and validation data of a source, tokenised now or read from a prepared folder.

    Args:
        source: what `read_documents` takes, files of token ids, or a folder that `crosslayer data
            prepare` made.
        context: tokens per sequence.
        tokenizer: what `load_tokenizer` takes; by default that of a prepared folder, and otherwise
            bytes. Another one than that of a prepared folder is refused.
        valid: sources of validation sets by name. Without any, a part of the source is "held-out".
            A prepared folder has its own sets; these are added to them.

    Raises:
        ValueError: the source, the tokenizer or a validation set is wrong, or is too short.
    """
    check_positive(context=context)
    sets = name_sets(source, valid)
    check_sources(sets)  # before a tokenizer is downloaded
    parsed = TextSource.parse(source)
    if parsed.kind == "prepared":
        streams, loaded = _open_with_sets(parsed.path, tokenizer, valid or {})
        names = [*streams, *(name for name in valid or {} if name not in streams)]
    else:
        loaded = load_tokenizer(tokenizer or BYTE_TOKENIZER, lambda: training_texts(sets))
        streams = encode_in_memory(read_sets(sets, loaded), loaded)
        names = set_names(sets)
    windows = {}
    for name in names:
        length = len(streams[name]) if name in streams else 0
        if length <= context:
            unit = "bytes" if loaded.definition is None else "tokens"
            raise ValueError(
                f"{source}: its set {name} has {length} {unit}, fewer than the {context} + 1 of "
                "one window"
            )
        windows[name] = TokenWindows(streams[name], context)
    return Corpus(windows.pop(TRAIN_SET), windows, loaded)


def _open_with_sets(
    folder: str, tokenizer: str | None, valid: dict[str, str]
) -> tuple[dict[str, TokenStream], Tokenizer]:
    """The sets of a prepared folder, and further validation sets tokenised now."""
    prepared = open_prepared(folder)
    known = prepared.tokenizer
    tokenizer = tokenizer or known.name
    is_same = tokenizer == known.name
    if not is_same and tokenizer != BYTE_TOKENIZER and not tokenizer.startswith("bpe:"):
        is_same = known.has_ids_of(load_tokenizer(tokenizer))
    if not is_same:
        raise ValueError(
            f"{folder}: prepared with the tokenizer {known.name}, not {tokenizer}; name that one, "
            "or none"
        )
    for name in valid:
        if name in prepared.streams:
            raise ValueError(f"{folder}: has a set {name} already; choose another name")
    return prepared.streams | encode_in_memory(read_sets(valid, known), known), known
