"""Tiny models with a byte tokenizer, and log-probabilities one sequence at a time."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

import crosslayer
from tests.hf.backbones import llama

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer(end: str | None = END_OF_TEXT) -> PreTrainedTokenizerFast:
    """One token for each byte, and perhaps one that ends a text, with id 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def tiny_model(spec: str | None = None, context: int = 64, vocab: int = 257):
    """A small Llama, connected if a spec is given, with perturbed weights."""
    model = llama(vocab_size=vocab, max_position_embeddings=context)
    if spec is not None:
        crosslayer.connect(model, spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def log_probabilities(model, tokens: list[int]) -> torch.Tensor:
    """Of every token after the first, in a batch of its own."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
