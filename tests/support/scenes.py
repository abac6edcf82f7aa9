"""A folder of small valid inputs, and for every command a line that reads some of them."""

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from crosslayer.cli.main import main
from tests.evaluate.tiny_models import byte_tokenizer, tiny_model, write_lines

GOLDEN = Path(__file__).parent.parent / "golden"
PUBLISHED = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
SHAPE = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "8", "--batch", "2"]
RUN = {
    "layers": 1, "dim": 16, "heads": 2, "context": 8, "batch": 2, "steps": 2, "evals": 1,
    "eval_batches": 1, "save_every": 1, "data": "text.txt", "valid": {"stories": "stories.jsonl"},
    "model_config": {"tie_word_embeddings": True}, "betas": [0.9, 0.95], "loggers": [],
}  # fmt: skip
ARMS = ["prenorm", {"name": "M", "connection": "mudd(dilation=1)", "paper": {"loss": 2.5}}]


class Scene(NamedTuple):
    """A command line that works, and the files that it reads."""

    words: tuple[str, ...]
    files: tuple[str, ...] = ()  # files, or folders of them


MODEL = ("model",)
SCENES = {
    "train": Scene(("train", "recipe.yaml", "--arm", "M", "--out", "run"), ("recipe.yaml", "run")),
    "train without a recipe": Scene(
        ("train", "--arm", "mudd", "--data", "prepared", "--steps", "1", "--evals", "1", *SHAPE),
        ("prepared",),
    ),
    "compare": Scene(
        ("compare", "recipe.yaml", "--out", "comparison"), ("recipe.yaml", "comparison")
    ),
    "cost": Scene(
        ("cost", "--vocab", "64", "--arms", "mudd(dilation=1)", "hyper(streams=2)", *SHAPE)
    ),
    "data prepare": Scene(
        [
            "data",
            "prepare",
            "stories.jsonl",
            "--out",
            "new",
            "--tokenizer",
            "tokenizer",
            "--valid.a=text.txt",
        ],
        ("stories.jsonl", "text.txt", "tokenizer"),
    ),
    "data show": Scene(("data", "show", "prepared"), ("prepared",)),
    "eval": Scene(
        [
            "eval",
            "model",
            "--text",
            "text.txt",
            "--spans",
            "spans.jsonl",
            "--context",
            "16",
            "--out",
            "new",
        ],
        ("model", "text.txt", "spans.jsonl"),
    ),
    "inspect": Scene(
        [
            "inspect",
            "model",
            "run",
            "--data",
            "text.txt",
            "--sequences",
            "2",
            "--context",
            "8",
            "--sections",
            "cosines,training",
            "--out",
            "new",
        ],
        ("model", "text.txt", "run"),
    ),
    "generate": Scene(["generate", "model", "ab", "--max-new-tokens", "2"], MODEL),
    "convert": Scene(["convert", "published", "new"], ("published",)),
}


def write_inputs(folder: Path) -> None:
    """The valid inputs of every scene."""
    lines = [{"text": f"{i}: a fox and {i * i} dogs.\n" * 3} for i in range(50)]
    write_lines(folder / "stories.jsonl", lines)
    (folder / "text.txt").write_text("".join(line["text"] for line in lines))
    write_lines(folder / "spans.jsonl", [{"context": "Is it? Answer:", "target": " yes"}] * 3)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RUN, "arms": ARMS}))
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    tiny_model("mudd(dilation=2)").save_pretrained(folder / "model")
    for file in (folder / "tokenizer").iterdir():
        shutil.copyfile(file, folder / "model" / file.name)
    (folder / "published").mkdir()
    weights = folder / "published" / "model.safetensors"
    shutil.copyfile(GOLDEN / f"{PUBLISHED}.params.safetensors", weights)
    config = json.loads((GOLDEN / f"{PUBLISHED}.json").read_text())["config"]
    (folder / "published" / "config.json").write_text(json.dumps(config))
    with working_in(folder), contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "prepare", "stories.jsonl", "--out", "prepared"]) == 0
        assert main([*SCENES["train"].words]) == 0
        shutil.rmtree("run/model")
        assert main([*SCENES["compare"].words]) == 0
        results = json.loads(Path("comparison/results.json").read_text())
        results["runs"].pop()
        Path("comparison/results.json").write_text(json.dumps(results))


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """In the folder, with nothing on standard input."""
    before, stdin = os.getcwd(), sys.stdin
    os.chdir(folder)
    sys.stdin = io.StringIO("")
    try:
        yield
    finally:
        os.chdir(before)
        sys.stdin = stdin
