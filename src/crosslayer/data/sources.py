"""Text documents from files, the Hub or the standard library, one after another.

stdlib                                     the running interpreter's own library
novels/train.jsonl.gz                      a file, or a folder of files
datasets:Salesforce/wikitext,wikitext-2-raw-v1@validation     of the Hub, streamed
datasets:novels                            a folder that `datasets` can load or has saved
"""

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..hub import NO_NETWORK
from ..validation import did_you_mean

SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js",
    ".jsonl", ".parquet",
)  # fmt: skip
COMPRESSIONS = (".gz", ".zst")
CORPUS_FILE = "corpus.json"  # marks a folder that `crosslayer data prepare` made

TRAIN, HELD_OUT = "train", "held-out"
VALID_SHARE = 0.05  # of the documents, by a hash of their names
FEW_DOCUMENTS = 40  # fewer than these are split at their tail


class Document(NamedTuple):
    """A text. The hash of its name decides whether it is held out."""

    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """Where documents come from, parsed once from what the user wrote.

    Args:
        spec: the string as the user wrote it.
        kind: "stdlib"; "files"; "dataset", what `load_dataset` finds by name; "saved", a folder of
            `save_to_disk`; "prepared", a folder of token ids.
        path: the file, the folder, or the name on the Hub.
        config: the configuration of a dataset with several.
        split: of a dataset.
    """

    spec: str
    kind: Literal["stdlib", "files", "dataset", "saved", "prepared"]
    path: str = ""
    config: str | None = None
    split: str = TRAIN

    @classmethod
    def parse(cls, spec: str) -> "Source":
        """The source that `spec` names. Raises a ValueError for datasets: without a name."""
        if spec == "stdlib":
            return cls(spec, "stdlib")
        path = spec.removeprefix("datasets:")
        if (Path(path) / CORPUS_FILE).is_file():
            return cls(spec, "prepared", path)
        if path == spec:
            return cls(spec, "saved" if _is_saved(path) else "files", path)
        if path and Path(path).exists():  # the name of a folder may contain , and @
            return cls(spec, "saved" if _is_saved(path) else "dataset", path)
        match = re.fullmatch(r"([^,@]+)(?:,([^@]+))?(?:@(.+))?", path)
        if not match:
            raise ValueError(f"{spec}: expected datasets:NAME[,CONFIG][@SPLIT]")
        name, config, split = match.groups()
        return cls(spec, "saved" if _is_saved(name) else "dataset", name, config, split or TRAIN)


def read_documents(spec: str) -> Iterator[Document]:
    """The documents of a source, without blank ones. A document is the largest thing in memory.

    A text file is one document. A line of a .jsonl file is a string or an object with a field
    "text". A .parquet file or a dataset has a column "text". Files may end in .gz or .zst.

    Args:
        spec: as at the top of this file.

    Raises:
        ValueError: the source does not exist, is empty, or is not text. Raised while reading.
    """
    source = Source.parse(spec)
    if source.kind == "prepared":
        raise ValueError(f"{spec}: holds prepared token ids, not text")
    if source.kind == "stdlib":
        documents = _read_stdlib()
    elif source.kind == "files":
        files = _list_files(Path(spec))
        documents = chain.from_iterable(
            _text_column(str(file), name, _file_rows(file)) for file, name in files
        )
    else:
        documents = _text_column(spec, source.path, _rows(spec, lambda: _load_rows(source)))
    is_empty = True
    for document in documents:
        if document.text.strip():
            is_empty = False
            yield document
    if is_empty:
        raise ValueError(f"{spec}: empty")


def check_exists(spec: str) -> None:
    """Raise a ValueError where a source is a file or folder that does not exist."""
    source = Source.parse(spec)
    if source.kind == "files" and not Path(source.path).exists():
        _list_files(Path(source.path))


def name_sets(source: str, valid: dict[str, str] | None) -> dict[str, str]:
    """The sources of "train" and of the validation sets by name.

    Raises:
        ValueError: a validation set is called train, or cannot name a folder.
    """
    for name in valid or {}:
        if name == TRAIN or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{name!r} cannot name a validation set: "
                "expected letters, digits, - and _, and not train"
            )
    return {TRAIN: source} | (valid or {})


def set_names(sets: dict[str, str]) -> list[str]:
    """The names of the sets that `read_sets` gives for these sources."""
    return [TRAIN, HELD_OUT] if sets.keys() == {TRAIN} else list(sets)


def read_sets(sets: dict[str, str]) -> Iterator[tuple[str, Document]]:
    """Each document with the name of its set.

    Args:
        sets: sources by name. Where "train" is alone, a part of it is "held-out".
    """
    if sets.keys() == {TRAIN}:
        yield from split_held_out(read_documents(sets[TRAIN]))
        return
    for name, spec in sets.items():
        for document in read_documents(spec):
            yield name, document


def training_texts(sets: dict[str, str]) -> Iterator[str]:
    """The texts that `read_sets` gives for "train"."""
    return (document.text for name, document in read_sets(sets) if name == TRAIN)


def split_held_out(documents: Iterator[Document]) -> Iterator[tuple[str, Document]]:
    """Each document with "train" or "held-out", by the hash of its name.

    A document added to a source moves no other. Few documents are split at their tail instead.
    """
    first = list(islice(documents, FEW_DOCUMENTS))
    if len(first) < FEW_DOCUMENTS:
        yield from _split_tail(first)
        return
    limit = VALID_SHARE
    while not any(_hash_share(document.name) <= limit for document in first):
        more = list(islice(documents, FEW_DOCUMENTS))
        if not more:  # the source ends, and none would be held out
            limit = min(_hash_share(document.name) for document in first)
        first += more
    for document in chain(first, documents):
        yield HELD_OUT if _hash_share(document.name) <= limit else TRAIN, document


def _hash_share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def _split_tail(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Hold out the last share of all characters. The cut may fall within a document."""
    total = sum(len(document.text) + 1 for document in documents) - 1
    left = int(total * (1 - VALID_SHARE))
    for name, text in documents:
        if text[:left]:
            yield TRAIN, Document(name, text[:left])
        if text[left:]:
            yield HELD_OUT, Document(name, text[left:])
        left = max(left - len(text) - 1, 0)


def _read_stdlib() -> Iterator[Document]:
    """The running interpreter's library without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not excluded & set(parts):
            yield Document("/".join(parts), path.read_text("utf8", errors="replace"))


def _list_files(path: Path) -> list[tuple[Path, str]]:
    """A file, or the text files of a folder, each with the name of its documents."""
    if path.is_file():
        return [(path, path.name)]
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, ["stdlib", *siblings])
        raise ValueError(f"{path}: no such file or folder{hint}")
    files = sorted(f for f in path.rglob("*") if _suffix(f) in SUFFIXES and f.is_file())
    if not files:
        raise ValueError(
            f"{path}: no text file in it (looked for {', '.join(SUFFIXES)}, also compressed as "
            f"{' or '.join(COMPRESSIONS)})"
        )
    return [(file, file.relative_to(path).as_posix()) for file in files]


def _suffix(file: Path) -> str:
    """The suffix before that of a compression."""
    return file.with_suffix("").suffix if file.suffix in COMPRESSIONS else file.suffix


def _file_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file. Each file is a dataset of its own, so that an error names it."""
    import datasets

    options: dict[str, Any] = {"split": "train", "streaming": True}
    options["data_files"] = escape(str(file))  # the library takes a pattern
    builder = "parquet" if _suffix(file) == ".parquet" else "text"
    if builder == "text":
        options["sample_by"] = "line" if _suffix(file) == ".jsonl" else "document"
    rows = _rows(str(file), lambda: datasets.load_dataset(builder, **options))
    # The builder "json" would infer the type of every field from the first lines, and stop where
    # a field that nobody reads has another type.
    return _parse_lines(str(file), rows) if _suffix(file) == ".jsonl" else rows


def _load_rows(source: Source) -> Any:
    """One split of a dataset: streamed, or memory-mapped where `save_to_disk` wrote it."""
    import datasets

    if source.kind == "dataset":
        return datasets.load_dataset(source.path, source.config, split=source.split, streaming=True)
    saved = datasets.load_from_disk(source.path)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if source.split not in saved:
        hint = did_you_mean(source.split, saved)
        raise ValueError(f"no split {source.split!r}{hint}; its splits: {', '.join(saved)}")
    return saved[source.split]


def _rows(subject: str, load: Callable[[], Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a dataset. Every error of the library becomes a ValueError of one line."""
    try:
        yield from load()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{subject}: not UTF-8 text (it has a byte 0x{byte:02x})") from None
    except ConnectionError:
        raise ValueError(f"{subject}: {NO_NETWORK}") from None
    except Exception as error:  # the library and its file systems raise classes of every kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{subject}: cannot be read ({reason})") from None


def _parse_lines(subject: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        try:
            value = json.loads(row["text"].strip() or '""')
        except json.JSONDecodeError as error:
            raise ValueError(f"{subject}: line {number} is not JSON ({error})") from None
        yield value if isinstance(value, dict) else {"text": value}


def _text_column(subject: str, name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        if "text" not in row:
            hint = did_you_mean("text", row)
            raise ValueError(
                f'{subject}: row {number} has no column "text"{hint}; its columns: {", ".join(row)}'
            )
        text = row["text"]
        # a surrogate from a JSON escape cannot be written as UTF-8
        if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):
            raise ValueError(
                f"{subject}: row {number} of its column text is {text!r:.40}, not Unicode text"
            )
        yield Document(f"{name}:{number}", text)


def _is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((Path(path) / file).is_file() for file in ("dataset_dict.json", "state.json"))
