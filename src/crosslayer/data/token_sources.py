"""Token ids to evaluate or inspect a model on: files of them, or the validation sets of a folder
that `crosslayer data prepare` made.
"""

from collections.abc import Iterator

import numpy as np

from .prepared import open_prepared
from .readers import Document
from .sources import TRAIN, Source
from .token_files import read_token_documents, read_token_ids
from .tokenizing import Tokenizer, split_at


def has_token_ids(spec: str) -> bool:
    """Whether a source holds token ids, which the functions below read."""
    return Source.parse(spec).kind in ("tokens", "prepared")


def read_id_sets(spec: str, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of a source by name, [tokens] each, with separators between documents.

    Args:
        spec: files, whose ids are one set; or a prepared folder, whose validation sets are called
            FOLDER@SET.
        tokenizer: that made them.

    Raises:
        ValueError: they are no ids of this tokenizer.
    """
    source = Source.parse(spec)
    if source.kind == "tokens":
        return {spec: read_token_ids(spec, tokenizer)}
    prepared = open_prepared(source.path)
    if prepared.tokenizer.digest != tokenizer.digest:
        raise ValueError(
            f"{spec}: prepared with the tokenizer {prepared.tokenizer.name}, which is not "
            f"{tokenizer.name}"
        )
    streams = {name: stream for name, stream in prepared.streams.items() if name != TRAIN}
    return {
        f"{spec}@{name}": np.concatenate(list(stream.pieces())) for name, stream in streams.items()
    }


def read_id_documents(spec: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of all sets of a source, as ids. No more of a file is read than is asked for.

    Raises:
        ValueError: they are no ids of this tokenizer.
    """
    if Source.parse(spec).kind == "tokens":
        yield from read_token_documents(spec, tokenizer)
        return
    for name, ids in read_id_sets(spec, tokenizer).items():
        for document in split_at(ids, tokenizer.end):
            yield Document(name, "", document)
