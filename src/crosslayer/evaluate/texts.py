"""Texts to score as token ids: those that a tokenizer makes of a text, or those of a file."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..data.token_streams import TokenStream
from ..data.tokenizing import Tokenizer, split_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedText(NamedTuple):
    """A text as token ids.

    Args:
        ids: [tokens].
        text_bytes: the UTF-8 bytes of the text, with one for each separator of documents in it.
        words: those of the text, which white space separates.
    """

    ids: np.ndarray
    text_bytes: int
    words: int


def encode_text(text: str | EncodedText, tokenizer: "PreTrainedTokenizerBase") -> EncodedText:
    """A text as ids of a tokenizer of transformers, without special tokens around it."""
    if isinstance(text, EncodedText):
        return text
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return EncodedText(np.array(ids, np.int64), len(text.encode()), len(text.split()))


def describe_stream(stream: TokenStream, tokenizer: Tokenizer) -> EncodedText:
    """A set of documents as one text.

    Args:
        stream: of the documents, with separators.
        tokenizer: that made its ids.
    """
    ids = stream.all_ids()
    documents = split_at(ids, tokenizer.end)
    words = sum(len(tokenizer.decode(document).split()) for document in documents)
    return EncodedText(ids, stream.text_bytes, words)


def describe_documents(stream: TokenStream, tokenizer: Tokenizer) -> list[EncodedText]:
    """Each document of a set.

    Args:
        stream: of the documents, with separators.
        tokenizer: that made its ids.
    """
    documents = []
    for ids in split_at(stream.all_ids(), tokenizer.end):
        words = len(tokenizer.decode(ids).split())
        documents.append(EncodedText(ids, tokenizer.count_bytes(ids), words))
    return documents
