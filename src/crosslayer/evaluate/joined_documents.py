"""Perplexity of documents as `crosslayer train` measures its validation loss.

The documents are one stream of tokens, with the token that ends a text between two of them. The
stream is cut into windows of context + 1 tokens without overlap. In each window all tokens but the
first are scored. The tokens after the last whole window are not scored.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..data.corpus import TokenWindows
from ..data.sampler import evenly_spaced
from ..data.token_streams import TokenStream
from ..validation import check_positive
from .language_models import check_context, end_tokens
from .perplexity import TextPerplexity
from .texts import EncodedText, encode_text
from .windows import ScoredWindow, log_likelihoods, nothing_to_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def joined_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Iterable[str | EncodedText],
    context: int | None = None,
    windows: int | None = None,
    batch_size: int = 8,
) -> TextPerplexity:
    """Perplexity of documents as one stream, like the validation loss of training.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        texts: the documents, as text or as ids of this tokenizer.
        context: tokens that the model sees at once; None is what its config says. A shorter stream
            is one window.
        windows: score only this many windows, at equal distances; None is all of them.
        batch_size: windows in a batch.

    Raises:
        ValueError: an argument is out of range, no token can be scored, or no token is known that
            separates documents.
    """
    context = check_context(model, context)
    if windows is not None:
        check_positive(windows=windows)
    documents = [encode_text(text, tokenizer) for text in texts]
    documents = [document for document in documents if len(document.ids)]
    ends = end_tokens(tokenizer, model)
    if not ends and len(documents) > 1:
        raise ValueError(
            "neither the tokenizer nor the model's generation config has a token that ends a text, "
            "to join documents with; score the documents separately"
        )
    stream = _join(documents, next(iter(ends), 0))
    if len(stream) < 2:
        raise ValueError(nothing_to_score(len(stream)))
    whole = TokenWindows(stream, min(context, len(stream) - 1))
    rows = [whole[i].tolist() for i in evenly_spaced(len(whole), windows or len(whole))]
    scores = log_likelihoods(model, [ScoredWindow(row[:1], row[1:]) for row in rows], batch_size)
    tokens = len(rows) * whole.context
    loss = -sum(scores) / tokens
    words = sum(document.words for document in documents)
    return TextPerplexity.of_loss(loss, tokens, len(stream), stream.text_bytes, words)


def _join(documents: list[EncodedText], separator: int) -> TokenStream:
    """The stream of documents, with a separator between two of them."""
    pieces: list[np.ndarray] = []
    for document in documents:
        pieces += [np.array([separator]), document.ids]
    ids = np.concatenate(pieces[1:]) if pieces else np.zeros(0, np.int64)
    text_bytes = sum(document.text_bytes for document in documents) + len(documents) - 1
    return TokenStream(ids, int(ids.max(initial=0)) + 1, text_bytes)
