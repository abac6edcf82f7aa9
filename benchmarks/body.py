"""Connections in a whole model, a llama of random weights: what `step`, `decode` and `memory` run."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

import crosslayer
from benchmarks.settings import Settings
from crosslayer.hf.config import make_config

HEAD = 128  # width of an attention head, or less in a narrow body


def config(D: int, settings: Settings) -> Any:
    body = {"max_position_embeddings": max(2048, settings.context)}
    return make_config("llama", settings.layers, D, max(1, D // HEAD), settings.vocab, body)


def model(arm: str, D: int, settings: Settings) -> Any:
    with torch.device(settings.on):
        host = AutoModelForCausalLM.from_config(
            config(D, settings), attn_implementation="sdpa", dtype=settings.type
        )
    return crosslayer.connect(host, arm)


def tokens(settings: Settings, batch: int, length: int) -> torch.Tensor:
    return torch.randint(settings.vocab, (batch, length), device=settings.on)
