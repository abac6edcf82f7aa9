"""A llama with random weights and connections: the model of `step`, `decode` and `memory`."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

import crosslayer
from benchmarks.settings import BenchmarkSettings
from crosslayer.hf.config import make_config

HEAD_DIM = 128


def make_llama_config(D: int, settings: BenchmarkSettings) -> Any:
    """A configuration of width D with heads of width `HEAD_DIM`, or one head if D is less."""
    heads = max(1, D // HEAD_DIM)
    overrides = {"max_position_embeddings": max(2048, settings.context)}
    return make_config("llama", settings.layers, D, heads, settings.vocab, overrides)


def build_connected_llama(spec: str, D: int, settings: BenchmarkSettings) -> Any:
    with torch.device(settings.torch_device):
        model = AutoModelForCausalLM.from_config(
            make_llama_config(D, settings), attn_implementation="sdpa", dtype=settings.torch_dtype
        )
    return crosslayer.connect(model, spec)
