"""Decoding one sequence with a static cache, a token a call, beside PreNorm's."""

from collections.abc import Iterator

import torch
from transformers import StaticCache

from benchmarks.beside import pairs
from benchmarks.body import model, tokens
from benchmarks.clock import Calls
from benchmarks.rows import Row
from benchmarks.settings import Settings

COLUMNS = (
    "arm", "layers", "cache", "D", "dtype", "variant", "ms a token", "spread ms", "tokens/s", "of PreNorm", "rounds",
)  # fmt: skip
PROMPT, TOKENS = 16, 32  # before the first measured token, and in one measured call


def measure(settings: Settings) -> Iterator[Row]:
    for shape, _, own, prenorm in pairs(settings, build, settings.arms, "model"):
        ms, spread, slower = own.ms("tokens"), own.spread("tokens"), own.ratio(prenorm, "tokens")
        yield shape | {
            "cache": settings.context, "ms a token": ms and ms / TOKENS, "spread ms": spread and spread / TOKENS,
            "tokens/s": ms and TOKENS / (1e-3 * ms), "of PreNorm": slower and 1 / slower,
        }  # fmt: skip


def build(arm: str, D: int, settings: Settings, variant: str) -> Calls:
    settings.hurry()
    talker = model(arm, D, settings).eval()
    step = talker
    if variant == "compiled":  # as transformers' own `generate` does on a GPU
        step = torch.compile(
            talker, fullgraph=True, mode="reduce-overhead" if settings.device == "cuda" else None
        )
    # a call goes on where the one before it stopped; the attention runs over all of the cache wherever that is
    room = PROMPT + TOKENS * (settings.rounds + 3)
    cache = StaticCache(config=talker.config, max_cache_len=max(settings.context, room))
    with torch.no_grad():
        token = talker(tokens(settings, 1, PROMPT), past_key_values=cache).logits[:, -1:].argmax(-1)
    at = torch.full((1, 1), PROMPT, device=settings.on)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        for _ in range(TOKENS):
            token = step(token, past_key_values=cache, position_ids=at).logits[:, -1:].argmax(-1)
            at.add_(1)

    return {"tokens": decode}
