"""Perplexity of texts, and of target spans given their contexts.

A text is scored in windows of `context` tokens. Each window ends `stride` tokens after the previous
one and scores only these, so every token is scored once, with at least `context - stride` tokens
before it (fewer at the beginning). The default stride is the context, which gives the windows of
the harness's `loglikelihood_rolling`. The first token follows BOS, or EOS where the tokenizer has
no BOS; with neither it is not scored. Documents are independent. (`streams` joins them.)

In spans only the tokens of the target are scored: the evaluation of MUDD (arXiv 2502.12170, Table
3) on FLAN. Context and target are joined without a separator, so the file contains the space
between them. A context that does not fit is truncated on the left. A target longer than the context
is scored in pieces of half the context.
"""

import gzip
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ..files import parse_json
from ..validation import check_positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTEXT_KEYS = ("context", "input", "inputs")
TARGET_KEYS = ("target", "targets")


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


class SpanPerplexity(NamedTuple):
    """Losses of target spans.

    Args:
        spans: the number of spans.
        tokens: the number of target tokens scored.
        truncated: spans whose context and target are longer than the model's context.
        loss: nats a target token, all tokens weighted equally.
        perplexity: exp(loss).
        loss_by_span: the mean over spans of each span's loss.
        loss_by_span_stderr: its standard error; NaN for one span.
    """

    spans: int
    tokens: int
    truncated: int
    loss: float
    perplexity: float
    loss_by_span: float
    loss_by_span_stderr: float


class Span(NamedTuple):
    context: str
    target: str


class Window(NamedTuple):
    """Tokens of one forward pass. Only the target's tokens are scored."""

    context: list[int]
    target: list[int]


def text_perplexity(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Iterable[str],
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> TextPerplexity:
    """Perplexity of documents.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        texts: the documents.
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
    first_token = _first_token(tokenizer, model)
    windows: list[Window] = []
    scored_bytes = words = 0
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        scored_bytes += len(text.encode())
        words += len(text.split())
        if first_token is not None:
            tokens = [first_token, *tokens]
        else:
            scored_bytes -= len(tokenizer.decode(tokens[:1]).encode())
        windows += rolling_windows(tokens, context, stride)
    count = sum(len(window.target) for window in windows)
    if count == 0:
        raise ValueError("the text has no token to score")
    nats = -sum(log_likelihoods(model, windows, batch_size))
    return TextPerplexity(
        tokens=count,
        loss=nats / count,
        perplexity=finite_exp(nats / count),
        bits_per_byte=nats / math.log(2) / scored_bytes,
        word_perplexity=finite_exp(nats / max(words, 1)),
    )


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
    first_token = _first_token(tokenizer, model)
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
    stderr = math.nan
    if len(losses) > 1:
        stderr = statistics.stdev(losses) / math.sqrt(len(losses))
    return SpanPerplexity(
        spans=len(spans),
        tokens=tokens,
        truncated=sum(len(seen) + len(target) > context + 1 for seen, target in encoded),
        loss=nats / tokens,
        perplexity=finite_exp(nats / tokens),
        loss_by_span=sum(losses) / len(losses),
        loss_by_span_stderr=stderr,
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
        with open_text(path, "rt", encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}: line {number}"
                    spans.append(_parse_span(parse_json(line, place, dict), place))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not spans:
        raise ValueError(f"{path}: empty")
    return spans


def check_context(model: "PreTrainedModel", context: int | None) -> int:
    """The context given, or that of the model's config; a ValueError where it is none or out of
    range.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        context = limit
    if context is None:
        raise ValueError("the model's config has no max_position_embeddings; name a context")
    if context < 2 or (limit is not None and context > limit):
        raise ValueError(f"context must be from 2 to the model's {limit}, got {context}")
    return context


def rolling_windows(tokens: list[int], context: int, stride: int) -> list[Window]:
    """Windows that score every token but the first once.

    Args:
        tokens: the first is only seen.
        context: tokens that the model sees at once.
        stride: tokens that a window scores; the first window scores `context` of them.
    """
    windows = []
    start = 1
    end = min(context + 1, len(tokens))
    while start < len(tokens):
        windows.append(Window(tokens[max(0, end - context - 1) : start], tokens[start:end]))
        start = end
        end = min(end + stride, len(tokens))
    return windows


def split_window(window: Window, context: int) -> list[Window]:
    """Windows that fit in `context` and score every target token once, each with all the context
    that fits.
    """
    tokens = window.context + window.target
    piece = context if len(window.target) <= context else context // 2
    windows = []
    for start in range(len(window.context), len(tokens), piece):
        end = min(start + piece, len(tokens))
        windows.append(Window(tokens[max(0, end - context - 1) : start], tokens[start:end]))
    return windows


@torch.no_grad()
def log_likelihoods(
    model: "PreTrainedModel", windows: Sequence[Window], batch_size: int
) -> list[float]:
    """The log-likelihood of each window's target, in nats. Computed in float32 from the logits."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    check_positive(batch_size=batch_size)
    # Longest first: windows of a batch are of similar length, and a lack of memory shows at once.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].context + windows[i].target))
    scores = [0.0] * len(windows)
    was_training = model.training
    model.eval()
    # disable=None: only on a terminal
    for start in tqdm(range(0, len(order), batch_size), "perplexity", unit="batch", disable=None):
        batch = order[start : start + batch_size]
        # The last token is predicted, never seen. Padding on the right changes nothing before it.
        inputs = [torch.tensor((windows[i].context + windows[i].target)[:-1]) for i in batch]
        padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(model.device)
        log_probabilities = F.log_softmax(model(padded).logits, dim=-1, dtype=torch.float32)
        for row, i in enumerate(batch):
            target = torch.tensor(windows[i].target, device=model.device)
            positions = slice(len(inputs[row]) - len(target), len(inputs[row]))
            of_target = log_probabilities[row, positions].gather(-1, target[:, None])
            scores[i] = of_target.sum().item()
    model.train(was_training)
    return scores


def end_tokens(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> list[int]:
    """The tokens that end a text: the tokenizer's, or those of the model's config, or none."""
    given = tokenizer.eos_token_id
    if given is None:
        given = getattr(model.generation_config, "eos_token_id", None)
    ends = given if isinstance(given, list) else [given]
    return [token for token in ends if isinstance(token, int)]


def _first_token(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> int | None:
    """The token before a text: BOS, or one that ends a text where there is no BOS, or None."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return next(iter(end_tokens(tokenizer, model)), None)


def _encode_span(
    tokenizer: "PreTrainedTokenizerBase", first_token: int | None, span: Span
) -> Window:
    """Tokenize as the harness does: both together, with the context's trailing space given to the
    target.
    """
    context = span.context.rstrip()
    if not context:
        tokens = tokenizer.encode(span.context + span.target, add_special_tokens=False)
        if first_token is not None:
            return Window([first_token], tokens)
        return Window(tokens[:1], tokens[1:])
    context_tokens = tokenizer.encode(context)
    tokens = tokenizer.encode(span.context + span.target)
    return Window(context_tokens, tokens[len(context_tokens) :])


def _parse_span(record: dict[str, object], place: str) -> Span:
    context = next((record[key] for key in CONTEXT_KEYS if key in record), None)
    target = next((record[key] for key in TARGET_KEYS if key in record), None)
    if not isinstance(context, str) or not isinstance(target, str) or not target:
        raise ValueError(
            f'{place} needs a "context" (or "input") and a non-empty "target", both text; '
            f"it has {', '.join(record)}"
        )
    return Span(context, target)


def finite_exp(x: float) -> float:
    # Words can be so unlikely to an untrained model that their perplexity is no float.
    return math.exp(x) if x < 700 else math.inf
