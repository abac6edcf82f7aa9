"""Decoding of one sequence with a static cache, one token a call."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import StaticCache

from benchmarks.model import build_connected_llama
from benchmarks.paired import time_with_prenorm
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import WARMUP_CALLS, Calls, ratio_or_none

COLUMNS = (
    *("connection", "layers", "cache", "D", "dtype", "variant"),
    *("ms a token", "half IQR ms", "tokens/s", "of PreNorm", "PreNorm has kernels", "rounds"),
)
PROMPT_TOKENS = 16
TOKENS_PER_CALL = 32


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    for pair in time_with_prenorm(settings, build_calls, settings.specs, "model"):
        ms = pair.timings.median_ms("decode")
        half_iqr_ms = pair.timings.half_iqr_ms("decode")
        yield pair.row | {
            "cache": settings.context,
            "ms a token": ratio_or_none(ms, TOKENS_PER_CALL),
            "half IQR ms": ratio_or_none(half_iqr_ms, TOKENS_PER_CALL),
            "tokens/s": ratio_or_none(1e3 * TOKENS_PER_CALL, ms),
            "of PreNorm": ratio_or_none(1, pair.timings.paired_ratio(pair.prenorm, "decode")),
            "PreNorm has kernels": pair.prenorm_kernels,
        }


def build_calls(spec: str, D: int, settings: BenchmarkSettings, variant: str) -> Calls:
    model = build_connected_llama(spec, D, settings).eval()
    next_logits: Any = compile_decoding(model, settings.device) if variant == "compiled" else model
    # Each call continues the sequence. Attention always runs over the whole cache.
    most_tokens = PROMPT_TOKENS + TOKENS_PER_CALL * (settings.rounds + WARMUP_CALLS + 1)
    cache_tokens = max(settings.context, most_tokens)
    return {"decode": decoding(model, next_logits, cache_tokens, TOKENS_PER_CALL)}


def compile_decoding(model: nn.Module, device: str) -> Callable[..., Any]:
    """The model compiled for calls of one token; on a GPU as transformers compiles it."""
    mode = "reduce-overhead" if device == "cuda" else None
    return torch.compile(model, fullgraph=True, dynamic=False, mode=mode)


def decoding(
    model: Any, next_logits: Callable[..., Any], cache_tokens: int, tokens: int
) -> Callable[[], None]:
    """A call that decodes further tokens of one sequence with a static cache.

    Args:
        model: in evaluation mode; it reads the prompt.
        next_logits: the model, or what it was compiled to.
        cache_tokens: length of the cache.
        tokens: of a call.
    """
    device = next(model.parameters()).device
    cache = StaticCache(config=model.config, max_cache_len=cache_tokens)
    with torch.no_grad():
        prompt = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS), device=device)
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
    position = torch.full((1, 1), PROMPT_TOKENS, device=device)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        for _ in range(tokens):
            out = next_logits(token, past_key_values=cache, position_ids=position)
            token = out.logits[:, -1:].argmax(-1)
            position.add_(1)

    return decode
