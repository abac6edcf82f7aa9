"""Token ids to evaluate or inspect a model on: files of them, or the validation sets of a folder
that `crosslayer data prepare` made.
"""

from collections.abc import Iterator

from .prepared import open_prepared
from .readers import Document
from .sources import TRAIN_SET, TextSource
from .token_files import read_token_documents, read_token_ids
from .token_streams import TokenStream
from .tokenizing import Tokenizer, split_at


def has_token_ids(place: str) -> bool:
    """Whether a source holds token ids, which the functions below read."""
    return TextSource.parse(place).kind in ("tokens", "prepared")


def read_id_sets(place: str, tokenizer: Tokenizer) -> dict[str, TokenStream]:
    """The sets of a source by name.

    Args:
        place: files, whose ids are one set; or a prepared folder, whose validation sets are called
            FOLDER@SET.
        tokenizer: that made them.

    Raises:
        ValueError: they are no ids of this tokenizer.
    """
    source = TextSource.parse(place)
    if source.kind == "tokens":
        ids = read_token_ids(place, tokenizer)
        return {place: TokenStream(ids, tokenizer.vocab, tokenizer.count_bytes(ids))}
    prepared = open_prepared(source.path)
    if not prepared.tokenizer.has_ids_of(tokenizer):
        raise ValueError(
            f"{place}: prepared with the tokenizer {prepared.tokenizer.name}, whose ids are not "
            f"those of {tokenizer.name}"
        )
    return {f"{place}@{name}": s for name, s in prepared.streams.items() if name != TRAIN_SET}


def read_id_documents(place: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a source, as ids: of all files, or of a prepared folder's validation sets.

    Raises:
        ValueError: they are no ids of this tokenizer.
    """
    if TextSource.parse(place).kind == "tokens":
        yield from read_token_documents(place, tokenizer)
        return
    for name, stream in read_id_sets(place, tokenizer).items():
        for ids in split_at(stream.all_ids(), tokenizer.end):
            yield Document(name, "", ids)
