"""Files and datasets to documents. `datasets` reads them; every error becomes one line."""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import error_in_one_line
from ..files import list_files, parse_json
from ..hub import NO_NETWORK
from ..validation import did_you_mean, has_surrogate

_SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js",
    ".jsonl", ".parquet",
)  # fmt: skip
_COMPRESSIONS = (".gz", ".zst")
_ZSTANDARD_MISSING = ".zst files need the package zstandard: pip install zstandard"
_FEW_ZEROS = 100  # A text may have some.
_ZSTD_CHUNK = 2**16  # bytes
_PARQUET_ROWS = 1000  # read at once
_READ_COLUMNS = ("text", "label")


class Document(NamedTuple):
    """A text, or the token ids of one. The hash of its name decides whether it is held out.

    The label is that of a row with a field "label"; `crosslayer inspect` compares labels.
    """

    name: str
    text: str
    ids: np.ndarray | None = None
    label: str = ""

    @property
    def length(self) -> int:
        """Characters, or token ids."""
        return len(self.text if self.ids is None else self.ids)

    def cut(self, start: int, end: int | None = None) -> "Document":
        """Its characters or ids from `start` to `end`."""
        if self.ids is None:
            return self._replace(text=self.text[start:end])
        return self._replace(ids=self.ids[start:end])


def list_text_files(path: Path) -> list[tuple[Path, str]]:
    """A file, or the text files of a folder, each with the name of its documents.

    Raises:
        ValueError: there is nothing, no text file, or what is neither a file nor a folder.
    """
    if path.is_file():
        return [(path, path.name)]
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: neither a regular file nor a folder")
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, ["stdlib", *siblings])
        raise ValueError(f"{path}: no such file or folder{hint}")
    files = [file for file in list_files(path) if _is_text_file(file.relative_to(path))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise ValueError(
            f"{path}: no text file in it (looked for {', '.join(_SUFFIXES)}, also compressed as "
            f"{' or '.join(_COMPRESSIONS)}); files of token ids are named by a pattern like *.bin"
        )
    return [(file, file.relative_to(path).as_posix()) for file in files]


def _is_text_file(file: Path) -> bool:
    """Whether a file of a folder is one of texts, by its path in the folder."""
    if any(part.startswith(".") for part in file.parts):  # a copy by an editor or a notebook
        return False
    if file.suffix.lower() == ".json":  # settings, as a rule
        return False
    suffix = _suffix(file)
    is_compressed = file.suffix.lower() in _COMPRESSIONS
    return suffix in _SUFFIXES and not (is_compressed and suffix == ".parquet")


def read_file(file: Path, name: str) -> Iterator[Document]:
    """The documents of a file. Each file is a separate dataset, so that an error names it.

    Raises:
        ValueError: the file cannot be read.
    """
    if "::" in str(file):
        raise ValueError(f"{file}: a path with :: cannot be read; rename it")
    if file.suffix.lower() == ".parquet":
        rows = _rows(str(file), lambda: _parquet_rows(file))
        return _text_column(str(file), name, rows)
    if file.suffix.lower() == ".zst":
        _check_zstd(file)
    return _read_pattern(str(file), name, escape(str(file)))  # the library takes a pattern


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. `datasets` would let Arrow decode up to 1 GiB ahead of them."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        columns = opened.schema_arrow.names
        if "text" in columns:  # else the error names all
            columns = [name for name in columns if name in _READ_COLUMNS]
        for batch in opened.iter_batches(_PARQUET_ROWS, columns=columns):
            yield from batch.to_pylist()


def read_remote(pattern: str) -> Iterator[Document]:
    """The documents of files by a URL: https://…, or hf://datasets/OWNER/NAME/PATTERN.

    Raises:
        ValueError: they cannot be read.
    """
    if pattern.lower().endswith(".zst") and not find_spec("zstandard"):
        raise ValueError(f"{pattern}: {_ZSTANDARD_MISSING}")
    return _read_pattern(pattern, pattern, pattern)


def read_rows(subject: str, name: str, load: Callable[[], Iterable[Any]]) -> Iterator[Document]:
    """The documents of a dataset, from its column "text".

    Args:
        subject: for errors.
        name: of the documents; the number of their row is added.
        load: returns the rows.

    Raises:
        ValueError: the dataset cannot be read, or a row has no text.
    """
    return _text_column(subject, name, _rows(subject, load))


def _suffix(file: Path) -> str:
    """The suffix before that of a compression, in lower case. A .json has a document a line."""
    name = file.with_suffix("") if file.suffix.lower() in _COMPRESSIONS else file
    suffix = name.suffix.lower()
    return ".jsonl" if suffix == ".json" else suffix


def _read_pattern(subject: str, name: str, pattern: str) -> Iterator[Document]:
    import datasets

    suffix = _suffix(Path(pattern))
    # a URL may end in a query, or in a pattern like *.json*
    ending = re.search(r"\.(jsonl?|parquet)\b[^/]*$", pattern, re.IGNORECASE)
    if "://" in pattern and ending:
        suffix = ".parquet" if ending[1].lower() == "parquet" else ".jsonl"
    options: dict[str, Any] = {"split": "train", "streaming": True, "data_files": pattern}
    builder = "parquet" if suffix == ".parquet" else "text"
    if builder == "parquet":
        options["batch_size"] = _PARQUET_ROWS  # by default a row group, and a file may have none
    else:
        options["sample_by"] = "line" if suffix == ".jsonl" else "document"
    rows = _rows(subject, lambda: datasets.load_dataset(builder, **options))
    # The builder "json" would infer the type of every field from the first lines, and stop where
    # a field that nobody reads has another type.
    if suffix == ".jsonl":
        rows = _parse_lines(subject, rows)
    elif builder == "text":
        rows = _check_text(subject, rows)
    return _text_column(subject, name, rows)


def _check_zstd(file: Path) -> None:
    """Raise where a .zst file is cut off, which `datasets` takes for its end."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{file}: {_ZSTANDARD_MISSING}") from None
    frame = zstandard.ZstdDecompressor().decompressobj()
    with file.open("rb") as stream:
        try:
            while chunk := stream.read(_ZSTD_CHUNK):
                while chunk:
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                    frame.decompress(chunk)
                    chunk = frame.unused_data
        except zstandard.ZstdError as error:
            raise ValueError(f"{file}: cannot be read ({error_in_one_line(error)})") from None
    if not frame.eof:
        raise ValueError(f"{file}: cannot be read (it ends within compressed data)")


def _rows(subject: str, load: Callable[[], Iterable[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a dataset. Every error of the library becomes a ValueError of one line."""
    try:
        yield from load()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{subject}: not UTF-8 text (it has a byte 0x{byte:02x})") from None
    except Exception as error:  # the library and its file systems raise classes of every kind
        # the HTTP library, and so the class, depends on huggingface_hub's version
        if isinstance(error, ConnectionError) or type(error).__name__ == "ConnectError":
            raise ValueError(f"{subject}: {NO_NETWORK}") from None
        reason = error_in_one_line(error)
        if "zst" in reason and not find_spec("zstandard"):
            reason = _ZSTANDARD_MISSING
        raise ValueError(f"{subject}: cannot be read ({reason})") from None


def _parse_lines(subject: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        line = _without_mark(row["text"]).strip()
        value = parse_json(line or '""', f"{subject}: line {number}", object)
        yield value if isinstance(value, dict) else {"text": value}


def _check_text(subject: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Raise a ValueError for binary numbers, which may be valid UTF-8 with many zeros."""
    for row in rows:
        if row["text"].count("\0") > max(_FEW_ZEROS, len(row["text"]) / 10):
            raise ValueError(
                f"{subject}: not text, as many of its bytes are zero; files of token ids are "
                "called .npy or .bin"
            )
        yield row | {"text": _without_mark(row["text"])}


def _without_mark(text: str) -> str:
    """Without the byte order mark that some editors write at the start of a file."""
    return text.removeprefix("\ufeff")


def _text_column(subject: str, name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        if "text" not in row:
            hint = did_you_mean("text", row)
            columns = ", ".join(row) or "none"
            raise ValueError(
                f'{subject}: row {number} has no column "text"{hint}; its columns: {columns}'
            )
        text = row["text"]
        # a surrogate from a JSON escape cannot be written as UTF-8
        if not isinstance(text, str) or has_surrogate(text):
            found = reprlib.repr(text)
            raise ValueError(
                f"{subject}: row {number} of its column text is {found}, not Unicode text"
            )
        label = row.get("label")
        label = str(label) if isinstance(label, str | int) else ""
        yield Document(f"{name}:{number}", text, label=label)
