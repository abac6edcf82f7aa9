"""Where the documents are, read line by line, with what is wrong said in one line."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS: dict[str, tuple[type, str]] = {
    "label": (int, "a number"), "choices": (list, "a list of texts"), "contexts": (list, "a list of texts")
}  # fmt: skip
VARIABLE = "CROSSLAYER_DATA"  # the folder that holds eval/


def folder(given: str | Path | None) -> Path:
    """The folder of the tasks' files: the one given, or the environment's."""
    if given is None and not os.environ.get(VARIABLE):
        raise ValueError(
            f"the tasks need their documents: name their folder with --data, or set {VARIABLE} to its parent"
        )
    found = Path(given) if given is not None else Path(os.environ[VARIABLE]) / "eval"
    if not found.is_dir():
        raise ValueError(f"{found}: no such folder")
    return found


def find(data: Path, name: str, fields: str) -> Path:
    """A task's file, every line of which has been checked."""
    file = next(
        (f for f in (data / f"{name}.jsonl", data / f"{name}.jsonl.gz") if f.is_file()), None
    )
    if file is None:
        raise ValueError(f"{data}: has no {name}.jsonl or {name}.jsonl.gz")
    number = 0
    for number, record in records(file):
        for field in fields.split():
            kind, expected = KINDS.get(field, (str, "a text"))
            if field not in record:
                raise ValueError(f"{file}: line {number} lacks {field}; it has {', '.join(record)}")
            value = record[field]
            if not isinstance(value, kind) or (
                isinstance(value, list) and not all(isinstance(v, str) and v for v in value)
            ):
                raise ValueError(
                    f"{file}: line {number} has {field} {value!r}, expected {expected}"
                )
        answers = len(record.get("contexts") or record.get("choices") or "ny")
        if "label" in fields.split() and not 0 <= record["label"] < answers:
            raise ValueError(
                f"{file}: line {number} has label {record['label']} and {answers} answers"
            )
    if not number:
        raise ValueError(f"{file}: empty")
    return file


def records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl or .jsonl.gz file with their line numbers.

    Raises:
        ValueError: it cannot be read, or a line is not a JSON object.
    """
    number = 0
    try:
        with (
            gzip.open(file, "rt", encoding="utf8")
            if file.suffix == ".gz"
            else file.open(encoding="utf8") as lines
        ):
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise ValueError(
                            f"{file}: line {number} is {type(value).__name__}, expected an object"
                        )
                    yield number, value
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: line {number} is not JSON ({error})") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None


def digest(*parts: bytes) -> str:
    """What tells one content from another in a result."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]
