"""Batches of a text for analyses: a stated number of sequences, read as far as needed."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.readers import Document
from ..validation import check_positive
from .observation import ModelInputs

_SINK_TEXTS = (".", "\n")


def make_text_batches(
    tokenizer: Any, documents: Iterable[Document], sequences: int, context: int, batch_size: int
) -> list[ModelInputs]:
    """Documents cut into sequences of at most `context` tokens, padded on the right.

    Args:
        tokenizer: of transformers.
        documents: texts, or ids of this tokenizer. No more are read than the sequences need.
        sequences: the number of sequences.
        context: tokens in a sequence.
        batch_size: sequences in a batch.

    Raises:
        ValueError: a number is not positive, or the documents have no two tokens.
    """
    check_positive(sequences=sequences, context=context, batch_size=batch_size)
    rows: list[Any] = []
    for document in documents:
        ids = document.ids
        if ids is None:
            ids = tokenizer.encode(document.text, add_special_tokens=False)
        for start in range(0, len(ids), context):
            row = ids[start : start + context]
            if len(row) > 1:  # one token has no next token to predict
                rows.append(row)
        if len(rows) >= sequences:
            break
    if not rows:
        raise ValueError("the text has no sequence of two tokens")
    rows = rows[:sequences]
    batches = []
    for start in range(0, len(rows), batch_size):
        batches.append(_pad_rows(rows[start : start + batch_size]))
    return batches


def find_sink_ids(tokenizer: Any) -> set[int]:
    """Tokens that attract attention without content: BOS, "." and "\\n" (MUDD, section 3.4)."""
    sinks = set()
    if tokenizer.bos_token_id is not None:
        sinks.add(tokenizer.bos_token_id)
    for text in _SINK_TEXTS:
        # The token of the text alone, and the one after a word: SentencePiece has both.
        for context in (text, f"a{text}"):
            ids = tokenizer.encode(context, add_special_tokens=False)
            if ids and tokenizer.decode(ids[-1:]).strip(" ") == text:
                sinks.add(ids[-1])
    return sinks


def _pad_rows(rows: list[Any]) -> ModelInputs:
    ids = [torch.as_tensor(np.asarray(row, np.int64)) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
    }
