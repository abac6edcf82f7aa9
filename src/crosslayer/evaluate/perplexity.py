"""Perplexity of texts.

A text is scored in windows of `context` tokens. Each window ends `stride` tokens after the previous
one and scores only these, so every token is scored once, with at least `context - stride` tokens
before it (fewer at the beginning). The default stride is the context, which gives the windows of
the harness's `loglikelihood_rolling`. The first token follows BOS, or EOS where the tokenizer has
no BOS; with neither it is not scored, and bytes and words are counted in proportion to the tokens
that are. Documents are independent. (joined_documents.py joins them.)
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

from ..losses import bits_per_byte, exp_or_inf
from .language_models import check_context, find_first_token
from .texts import EncodedText, encode_text
from .windows import (
    ScoredWindow,
    log_likelihoods,
    nothing_to_score,
    rolling_windows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TextPerplexity(NamedTuple):
    """Losses of a text.

    Args:
        tokens: the number of tokens scored.
        loss: nats a token.
        perplexity: exp(loss).
        bits_per_byte: over the UTF-8 bytes of the text.
        word_perplexity: over the words, which white space separates.
    """

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    word_perplexity: float

    @classmethod
    def of_loss(
        cls, loss: float, tokens: int, text_tokens: int, text_bytes: int, words: int
    ) -> Self:
        """What follows from the loss of a text.

        Args:
            loss: nats a token.
            tokens: the number of tokens scored.
            text_tokens: those of the whole text.
            text_bytes: of the whole text, in UTF-8.
            words: of the whole text.
        """
        return cls(
            tokens=tokens,
            loss=loss,
            perplexity=exp_or_inf(loss),
            bits_per_byte=bits_per_byte(loss, text_bytes / text_tokens),
            word_perplexity=exp_or_inf(loss * text_tokens / max(words, 1)),
        )


def text_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Iterable[str | EncodedText],
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> TextPerplexity:
    """Perplexity of documents.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        texts: the documents, as text or as ids of this tokenizer.
        context: tokens that the model sees at once; None is what its config says.
        stride: tokens between the ends of two windows; None is the context.
        batch_size: windows in a batch.

    Raises:
        ValueError: an argument is out of range, or no token can be scored.
    """
    context = check_context(model, context)
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be from 1 to the context of {context}, got {stride}")
    first_token = find_first_token(tokenizer, model)
    windows: list[ScoredWindow] = []
    text_bytes = words = text_tokens = 0
    for text in texts:
        encoded = encode_text(text, tokenizer)
        tokens = encoded.ids.tolist()
        text_bytes += encoded.text_bytes
        words += encoded.words
        text_tokens += len(tokens)
        if first_token is not None:
            tokens = [first_token, *tokens]
        windows += rolling_windows(tokens, context, stride)
    count = sum(len(window.target) for window in windows)
    if count == 0:
        raise ValueError(nothing_to_score(text_tokens))
    loss = -sum(log_likelihoods(model, windows, batch_size)) / count
    return TextPerplexity.of_loss(loss, count, text_tokens, text_bytes, words)
