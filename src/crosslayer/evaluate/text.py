"""Perplexity of a text, and of target spans only.

A text is scored in windows of the model's `context` tokens, each window `stride` tokens further than the one before and
scoring only those: every token once, with at least `context - stride` tokens before it (fewer only at the beginning).
With the default, a stride of the whole context, these are the windows of the harness's `loglikelihood_rolling`. The
first token follows BOS, or EOS where the tokenizer has no BOS; with neither it is not scored. Documents do not see each
other.

    loss             nats a token                     perplexity       its exponential
    bits_per_byte    over the text's UTF-8 bytes      word_perplexity  over the pieces between white space

Spans are documents with a context and a target, of which only the target's tokens are scored: what MUDD (arXiv
2502.12170, Table 3) measures on FLAN. The target follows its context as the file has it, so the space between belongs
to one of them. A context that does not fit is cut from the left; a target longer than the window is scored in parts of
half a window, each with as much before it as fits.

    loss             nats a target token, all tokens alike      perplexity    its exponential
    loss_by_example  the mean over examples of each one's loss, with its standard error
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .harness import prefix
from .records import records

Window = tuple[list[int], list[int]]  # what is seen, what is scored after it


def score(lm: Any, windows: list[Window]) -> list[float]:
    """The log-likelihood of each window's scored tokens, in nats."""
    # the harness reuses logits among requests of one context and mistakes those that begin elsewhere in it
    cached, lm.logits_cache = lm.logits_cache, False
    try:
        return [
            total for total, _ in lm._loglikelihood_tokens([(None, *window) for window in windows])
        ]
    finally:
        lm.logits_cache = cached


def rolling(tokens: list[int], before: int | None, context: int, stride: int) -> list[Window]:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    if before is None:
        before, *tokens = tokens
    return [
        make_disjoint_window(w)
        for w in get_rolling_token_windows(tokens, before, context, context - stride + 1)
    ]


def perplexity(lm: Any, texts: Iterable[str], stride: int | None) -> dict[str, Any]:
    stride, before = stride or lm.max_length, prefix(lm)
    windows: list[Window] = []
    size = words = 0
    for text in texts:
        tokens = lm.tok_encode(text, add_special_tokens=False)
        windows += rolling(tokens, before, lm.max_length, stride) if tokens else []
        unscored = lm.tok_decode(tokens[:1]) if before is None else ""
        size += len(text.encode()) - len(unscored.encode())
        words += len(text.split())
    count = sum(len(scored) for _, scored in windows)
    if not count:
        raise ValueError("the text has no token to score")
    nats = -sum(score(lm, windows))
    return {
        "n": count,
        "metrics": {
            "loss": {"value": nats / count},
            "perplexity": {"value": exp(nats / count)},
            "bits_per_byte": {"value": nats / math.log(2) / size},
            "word_perplexity": {"value": exp(nats / max(words, 1))},
        },
    }


def span(lm: Any, context: str, target: str) -> Window:
    """The tokens of both, split as the harness splits them."""
    if context.strip():
        seen, scored = lm._encode_pair(context, target)
        return seen, scored
    before, tokens = prefix(lm), lm.tok_encode(context + target, add_special_tokens=False)
    return ([before], tokens) if before is not None else (tokens[:1], tokens[1:])


def parts(window: Window, context: int) -> Iterator[Window]:
    seen, scored = window
    tokens = seen + scored
    step = context if len(scored) <= context else context // 2
    for start in range(len(seen), len(tokens), step):
        end = min(start + step, len(tokens))
        yield tokens[max(0, end - context - 1) : start], tokens[start:end]


def examples(file: Path) -> list[tuple[str, str]]:
    """The contexts and targets of a .jsonl file."""
    found = []
    for number, record in records(file):
        context = next((record[k] for k in ("context", "input", "inputs") if k in record), None)
        target = next((record[k] for k in ("target", "targets") if k in record), None)
        if not isinstance(context, str) or not isinstance(target, str) or not target:
            raise ValueError(
                f'{file}: line {number} needs a "context" (or "input") and a "target" that is not empty, both text; '
                f"it has {', '.join(record)}"
            )
        found.append((context, target))
    if not found:
        raise ValueError(f"{file}: empty")
    return found


def spans(lm: Any, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    whole = [span(lm, context, target) for context, target in pairs]
    cut = sum(len(seen) + len(scored) > lm.max_length + 1 for seen, scored in whole)
    split = [list(parts(window, lm.max_length)) for window in whole]
    scores = iter(score(lm, [part for window in split for part in window]))
    nats = [-sum(next(scores) for _ in window) for window in split]
    counts = [len(scored) for _, scored in whole]
    if not sum(counts):
        raise ValueError("the spans have no token to score")
    each = [total / count for total, count in zip(nats, counts, strict=True) if count]
    loss, mean = sum(nats) / sum(counts), sum(each) / len(each)
    spread = (
        math.sqrt(sum((x - mean) ** 2 for x in each) / (len(each) - 1) / len(each))
        if len(each) > 1
        else None
    )
    return {
        "n": len(pairs),
        "tokens": sum(counts),
        "truncated": cut,
        "metrics": {
            "loss": {"value": loss},
            "perplexity": {"value": exp(loss)},
            "loss_by_example": {"value": mean, "stderr": spread},
        },
    }


def exp(x: float) -> float:
    return (
        math.exp(x) if x < 700 else math.inf
    )  # an untrained model's words can be longer than a float
