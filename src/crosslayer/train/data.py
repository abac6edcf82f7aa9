"""Text as bytes: read from anywhere, split without chance, cut into batches whose order depends on the seed alone."""

import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VALID_SHARE = 0.05  # of the documents, by a hash of their names
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".json", ".rst", ".tex", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js")


class Document(NamedTuple):
    name: str
    text: str


@dataclass(frozen=True)
class Text:
    """Bytes to train on and to be judged by, [N] uint8 each, documents separated by a zero byte."""

    name: str
    train: Tensor
    valid: Tensor

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.valid.numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def entropy(self) -> float:
        """Order-0 entropy of the validation bytes in bits: what a model that knows only letter frequencies reaches."""
        p = torch.bincount(self.valid.long(), minlength=256).double() / len(self.valid)
        return -(p * p.clamp_min(1e-300).log2()).sum().item()

    def batches(self, seed: int, batch: int, context: int) -> Iterator[Tensor]:
        """Endless [batch, context + 1] windows of the training bytes; the same for one seed, whoever asks."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(self.train, torch.randint(len(self.train) - context, (batch,), generator=generator), context)

    def held_out(self, batch: int, context: int, count: int) -> list[Tensor]:
        """Up to `count` batches of windows spread evenly over the validation bytes, without overlap."""
        total = min(batch * count, len(self.valid) // (context + 1))
        starts = torch.arange(total) * (len(self.valid) // total)
        return [windows(self.valid, part, context) for part in starts.split(batch)]


def windows(stream: Tensor, starts: Tensor, context: int) -> Tensor:
    return stream[starts[:, None] + torch.arange(context + 1)].long()


def load(source: str, context: int) -> Text:
    """The text `source` names: "stdlib", or a path to a text, .jsonl or .gz file or a folder of them.

    Raises:
        ValueError: nothing there, nothing in it, not text, or less of it than one context.
    """
    documents = list(stdlib() if source == "stdlib" else read(Path(source)))
    train, valid = split(documents)
    text = Text(source, *(stream(part) for part in (train, valid)))
    for part, tokens in (("training", len(text.train)), ("validation", len(text.valid))):
        if tokens < context + 1:
            raise ValueError(
                f"{source}: its {part} part has {tokens} bytes, fewer than one context of {context} and the next"
            )
    return text


def stdlib() -> Iterator[Document]:
    """The running interpreter's own standard library, without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"} & set(parts):
            yield Document("/".join(parts), path.read_text("utf8", errors="replace"))


def read(path: Path) -> Iterator[Document]:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.removesuffix(".gz").endswith(SUFFIXES))
        if not files:
            raise ValueError(f"{path}: no text file in it (looked for *{', *'.join(SUFFIXES)}, each also .gz)")
    found = False
    for file in files:
        for document in decode(file, file.relative_to(path).as_posix() if path.is_dir() else file.name):
            found = True
            yield document
    if not found:
        raise ValueError(f"{path}: empty")


def decode(file: Path, name: str) -> Iterator[Document]:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = raw.decode("utf8")
    except (OSError, EOFError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from None
    if not file.name.removesuffix(".gz").endswith(".jsonl"):
        if text.strip():
            yield Document(name, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Document(f"{name}:{number}", record(file, number, line))


def record(file: Path, number: int, line: str) -> str:
    """The text of one line of a .jsonl file: a string, or an object's field "text"."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: line {number} is not JSON ({error})") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        has = f"the fields {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f'{file}: line {number} has {has}, expected a string or a field "text"')
    return text


def split(documents: list[Document]) -> tuple[list[str], list[str]]:
    """Training and validation texts: by a hash of each document's name, or the tail where documents are few."""
    if len(documents) < 40:
        whole = "\0".join(document.text for document in documents)
        cut = int(len(whole) * (1 - VALID_SHARE))
        return [whole[:cut]], [whole[cut:]]
    parts: tuple[list[str], list[str]] = ([], [])
    for name, text in documents:
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
        parts[share < VALID_SHARE].append(text)
    return parts


def stream(texts: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("\0".join(texts).encode()), dtype=torch.uint8) if any(texts) else torch.empty(0)
