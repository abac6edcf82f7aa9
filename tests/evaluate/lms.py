"""Tiny models with tokenizers for the tests of evaluation, and what they read."""

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from crosslayer.evaluate import TASKS
from tests.hf.backbones import llama

DATA = os.environ.get("CROSSLAYER_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="CROSSLAYER_DATA names no folder")
END = "<|endoftext|>"


def byte_tokenizer(end: str | None = END) -> PreTrainedTokenizerFast:
    """A token a byte, and perhaps one that ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end)


def neox_tokenizer() -> PreTrainedTokenizerFast:
    file = Path(DATA) / "tokenizers" / "gpt_neox_20b_tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=END, eos_token=END)


def tiny(context: int = 64, vocabulary: int = 257):
    """A model whose scores are not all alike: its weights are shaken."""
    model = llama(vocab_size=vocabulary, max_position_embeddings=context)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def shake(model) -> None:
    """Move what a connection learns from where it starts."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".connection" in name:
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
                )


def log_probabilities(model, tokens: list[int]) -> torch.Tensor:
    """Of every token after the first, alone in its batch."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "seven",
    "lazy",
    "dogs",
    "while",
    "old",
    "cats",
    "watch",
    "it",
]


def small_rows(fields: str, count: int = 9) -> list[dict]:
    """Documents with these fields, no two alike."""

    def said(i: int, length: int) -> str:
        return " ".join(WORDS[(i * k * k + k) % len(WORDS)] for k in range(1, length + 1))

    answers = 5 if fields == "context choices label" else 2
    values = {
        "context": lambda i: f"{said(i, 4).capitalize()}. {said(i + 1, 2)}",
        "contexts": lambda i: [f"{said(i, 3)} {word}" for word in ("cats", "dogs")],
        "continuation": lambda i: said(i + 5, 2),
        "passage": lambda i: said(i, 6),
        "question": lambda i: said(i + 2, 3),
        "relation": lambda i: ("cause", "effect")[i % 2],
        "choices": lambda i: [said(i + j, 1 + j % 3).capitalize() for j in range(answers)],
        "target": lambda i: WORDS[i % len(WORDS)],
        "label": lambda i: i % answers % 2,
    }
    return [{"id": i} | {field: values[field](i) for field in fields.split()} for i in range(count)]


def small_folder(folder: Path) -> Path:
    """A folder of the tasks' files."""
    folder.mkdir()
    for task in TASKS.values():
        write_lines(folder / f"{task.file}.jsonl", small_rows(task.fields))
    return folder


def write_lines(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
