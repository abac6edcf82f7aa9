"""Perplexity of target spans given their contexts.

Only the tokens of the target are scored: the evaluation of MUDD (arXiv 2502.12170, Table 3) on
FLAN. Context and target are joined without a separator, so the file contains the space between
them. A context that does not fit is truncated on the left. A target longer than the context is
scored in pieces of half the context.
"""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..files import parse_json
from ..intervals import estimate_mean
from ..losses import exp_or_inf
from ..validation import has_surrogate
from .language_models import check_context, encode_without_end, find_first_token
from .windows import ScoredWindow, log_likelihoods, split_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONTEXT_KEYS = ("context", "input", "inputs")
_TARGET_KEYS = ("target", "targets")


class SpanPerplexity(NamedTuple):
    """Losses of target spans.

    Args:
        spans: the number of spans with a token to score. A target that the tokenizer joins to the
            last token of its context has none.
        tokens: the number of target tokens scored.
        truncated: spans whose context and target are longer than the model's context.
        loss: nats a target token, all tokens weighted equally.
        perplexity: exp(loss).
        loss_by_span: the mean over spans of each span's loss.
        loss_by_span_stderr: its standard error; None for one span.
    """

    spans: int
    tokens: int
    truncated: int
    loss: float
    perplexity: float
    loss_by_span: float
    loss_by_span_stderr: float | None


class Span(NamedTuple):
    """A context and the text after it, whose tokens are scored."""

    context: str
    target: str


def span_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    spans: Sequence[Span],
    context: int | None = None,
    batch_size: int = 8,
) -> SpanPerplexity:
    """Perplexity of the targets of spans.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        spans: contexts and targets.
        context: tokens that the model sees at once; None is what its config says.
        batch_size: windows in a batch.

    Raises:
        ValueError: the context is out of range, or no token can be scored.
    """
    context = check_context(model, context)
    first_token = find_first_token(tokenizer, model)
    encoded = [_encode_span(tokenizer, first_token, span) for span in spans]
    windows_of_span = [split_window(window, context) for window in encoded]
    windows = [window for pieces in windows_of_span for window in pieces]
    scores = iter(log_likelihoods(model, windows, batch_size))
    nats = 0.0
    losses = []  # of each span
    for pieces in windows_of_span:
        count = sum(len(window.target) for window in pieces)
        span_nats = -sum(next(scores) for _ in pieces)
        nats += span_nats
        if count > 0:
            losses.append(span_nats / count)
    if not losses:
        raise ValueError("the spans have no token to score")
    tokens = sum(len(window.target) for window in windows)
    by_span = estimate_mean(losses)
    return SpanPerplexity(
        spans=len(losses),
        tokens=tokens,
        truncated=sum(len(seen) + len(target) > context + 1 for seen, target in encoded),
        loss=nats / tokens,
        perplexity=exp_or_inf(nats / tokens),
        loss_by_span=by_span.mean,
        loss_by_span_stderr=by_span.error if len(losses) > 1 else None,
    )


def read_spans(file: str | Path) -> list[Span]:
    """The spans of a .jsonl or .jsonl.gz file: "context" (or "input") and "target", both text, on
    each line.

    Raises:
        ValueError: the file cannot be read, or a line has no such fields.
    """
    path = Path(file)
    if path.exists() and not path.is_file():  # a pipe would wait for someone to write to it
        raise ValueError(f"{path}: cannot be read (not a file)")
    spans = []
    try:
        open_text = gzip.open if path.suffix == ".gz" else open
        with open_text(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}: line {number}"
                    spans.append(_parse_span(parse_json(line, place, dict), place))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not spans:
        raise ValueError(f"{path}: empty")
    return spans


def _encode_span(
    tokenizer: "PreTrainedTokenizerBase", first_token: int | None, span: Span
) -> ScoredWindow:
    """Tokenize as the harness does: both together, with the context's trailing space given to the
    target. A token that the tokenizer puts after a text is left out, unlike there.
    """
    context = span.context.rstrip()
    # a tokenizer may have no token for what it holds, like a soft hyphen
    context_tokens = encode_without_end(tokenizer, context) if context else []
    if not context_tokens:
        tokens = tokenizer.encode(span.context + span.target, add_special_tokens=False)
        if first_token is not None:
            return ScoredWindow([first_token], tokens)
        return ScoredWindow(tokens[:1], tokens[1:])
    tokens = encode_without_end(tokenizer, span.context + span.target)
    return ScoredWindow(context_tokens, tokens[len(context_tokens) :])


def _parse_span(record: dict[str, object], place: str) -> Span:
    context = next((record[key] for key in _CONTEXT_KEYS if key in record), None)
    target = next((record[key] for key in _TARGET_KEYS if key in record), None)
    texts = [text for text in (context, target) if isinstance(text, str)]
    if any(has_surrogate(text) for text in texts):
        raise ValueError(f"{place} has half of a surrogate pair, which is no text")
    if not isinstance(context, str) or not isinstance(target, str) or not target:
        raise ValueError(
            f'{place} needs a "context" (or "input") and a non-empty "target", both text; '
            f"it has {', '.join(record)}"
        )
    return Span(context, target)
