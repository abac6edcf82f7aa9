"""Text documents from anywhere, one after another: nothing bigger than a document is ever in memory.

documents("stdlib")                                    the running interpreter's own library
documents("novels/train.jsonl.gz")                     a file, or a folder of files
documents("datasets:Salesforce/wikitext,wikitext-2-raw-v1@validation")   of the `datasets` library, streamed
"""

import codecs
import gzip
import hashlib
import json
import math
import re
import sysconfig
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from ..validation import did_you_mean

SUFFIXES = (
    ".txt", ".md", ".py", ".jsonl", ".json", ".rst", ".tex", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js",
)  # fmt: skip
PARQUET = ".parquet"
DATASETS = "datasets:"
PIECE = (
    2**24
)  # bytes of a text file that are one document; a longer file is several, cut at line ends
VALID_SHARE = 0.05  # of the documents, by a hash of their names
FEW = 40  # documents; fewer are split at their tail
TRAIN, HELD_OUT = "train", "held-out"


class Document(NamedTuple):
    name: str
    text: str


def documents(source: str) -> Iterator[Document]:
    """The documents of "stdlib", of a file or folder, or of datasets:NAME[,CONFIG][@SPLIT]; blank ones are left out.

    A file is text, .jsonl (a string or an object with "text" a line), either also .gz, or .parquet (a column "text").
    NAME is one of the Hub, streamed, or a folder that `datasets` can load or has saved; SPLIT is train by default.

    Raises:
        ValueError: nothing there, nothing in it, or not text. It comes when the documents are asked for.
    """
    if source == "stdlib":
        found = stdlib()
    elif source.startswith(DATASETS):
        found = of_datasets(source)
    else:
        found = of_files(Path(source))
    empty = True
    for document in found:
        if document.text.strip():
            empty = False
            yield document
    if empty:
        raise ValueError(f"{source}: empty")


def split(found: Iterator[Document]) -> Iterator[tuple[str, Document]]:
    """Which of them train and which are held out: by a hash of each one's name, or the tail where there are few."""
    first = list(islice(found, FEW))
    if len(first) < FEW:
        yield from tail(first)
        return
    limit = VALID_SHARE
    while not any(share(document.name) < limit for document in first):
        more = list(islice(found, FEW))
        if not more:  # none would be held out, so that the nearest is
            limit = math.nextafter(min(share(document.name) for document in first), 1)
        first += more
    for document in chain(first, found):
        yield HELD_OUT if share(document.name) < limit else TRAIN, document


def tail(few: list[Document]) -> Iterator[tuple[str, Document]]:
    """Cut where the last share of all characters begins, which may be amid a document."""
    left = int((sum(len(text) + 1 for _, text in few) - 1) * (1 - VALID_SHARE))
    for name, text in few:
        if text[:left]:
            yield TRAIN, Document(name, text[:left])
        if text[left:]:
            yield HELD_OUT, Document(name, text[left:])
        left = max(left - len(text) - 1, 0)


def share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return (
        int.from_bytes(hashlib.sha256(name.encode("utf8", "surrogateescape")).digest()[:4], "big")
        / 2**32
    )


def parts(source: str, valid: dict[str, str] | None = None) -> Iterator[tuple[str, Document]]:
    """Every document with the name of its set: "train", and "held-out" or the given validation sets.

    Where validation sets are given, all of `source` is trained on.
    """
    return gathered({TRAIN: source, **named_apart(valid)}) if valid else split(documents(source))


def gathered(sets: dict[str, str]) -> Iterator[tuple[str, Document]]:
    for name, source in sets.items():
        for document in documents(source):
            yield name, document


def named_apart(valid: dict[str, str]) -> dict[str, str]:
    """Validation sets whose names can be those of files, and are not the training set's."""
    for name in valid:
        if name == TRAIN or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{name!r} cannot name a validation set: expected letters, digits, - and _, and not train"
            )
    return valid


def stdlib() -> Iterator[Document]:
    """The running interpreter's own standard library, without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"} & set(
            names
        ):
            yield Document("/".join(names), path.read_text("utf8", errors="replace"))


def of_files(path: Path) -> Iterator[Document]:
    if not path.exists():
        near = path.parent.iterdir() if path.parent.is_dir() else ()
        raise ValueError(
            f"{path}: no such file or folder{did_you_mean(path.name, ['stdlib', *(p.name for p in near)])}"
        )
    if not path.is_dir():
        yield from read(path, path.name)
        return
    endings = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES), PARQUET)
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and file.name.endswith(endings)
    )
    if not files:
        raise ValueError(
            f"{path}: no text file in it (looked for *{', *'.join(SUFFIXES)}, each also .gz, and *{PARQUET})"
        )
    for file in files:
        yield from read(file, file.relative_to(path).as_posix())


def read(file: Path, name: str) -> Iterator[Document]:
    """The documents of one file, by its ending."""
    decode = lines if file.name.removesuffix(".gz").endswith(".jsonl") else pieces
    try:
        if file.suffix == PARQUET:
            yield from rows(file, name)
        else:
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
                yield from decode(stream, file, name)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None


def pieces(stream: BufferedIOBase, file: Path, name: str) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf8")()
    position, kept, number, last = 0, "", 0, False
    while not last:
        raw = stream.read(PIECE)
        last = len(raw) < PIECE
        begins = position - len(decoder.getstate()[0])  # a character may be cut between two pieces
        try:
            text = kept + decoder.decode(raw, final=last)
        except UnicodeDecodeError as error:
            raise not_text(file, begins + error.start, error) from None
        position += len(raw)
        cut = len(text) if last else text.rfind("\n") + 1 or len(text)
        yield Document(f"{name}:{number}" if number else name, text[:cut])
        kept, number = text[cut:], number + 1


def lines(stream: BufferedIOBase, file: Path, name: str) -> Iterator[Document]:
    position = 0
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf8")
        except UnicodeDecodeError as error:
            raise not_text(file, position + error.start, error) from None
        position += len(raw)
        if line.strip():
            yield Document(f"{name}:{number}", record(file, number, line))


def not_text(file: Path, position: int, error: UnicodeDecodeError) -> ValueError:
    return ValueError(
        f"{file}: not UTF-8 text (byte {position} is 0x{error.object[error.start]:02x})"
    )


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
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"{file}: line {number} is not Unicode text (half a surrogate pair, \\u{ord(half[0]):04x})"
        )
    return text


def rows(file: Path, name: str) -> Iterator[Document]:
    """The column "text" of a parquet file, a batch of rows at a time."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            has_text(str(file), table.schema_arrow.names)
            kind = table.schema_arrow.field("text").type
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if not isinstance(text, str):
                        raise ValueError(
                            f"{file}: row {number} of its column text is {kind} {text!r:.40}, not text"
                        )
                    yield Document(f"{name}:{number}", text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: not UTF-8 text (after row {number} of its column text, {error})"
        ) from None
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{file}: not a parquet file, or a broken one ({str(error).splitlines()[0]})"
        ) from None


def has_text(source: str, columns: list[str]) -> None:
    if "text" not in columns:
        raise ValueError(
            f'{source}: no column "text"{did_you_mean("text", columns)}; its columns: {", ".join(columns)}'
        )


def of_datasets(source: str) -> Iterator[Document]:
    asked = source.removeprefix(DATASETS)
    # a folder may have any name
    name, config, part = (
        (asked, None, None) if asked and Path(asked).exists() else named(source, asked)
    )
    number = 0
    try:
        found = loaded(name, config, part or TRAIN)
        if found.column_names is not None:  # a stream may not know them before its first row
            has_text(source, found.column_names)
        for row in found:
            number += 1
            has_text(source, list(row))
            if not isinstance(row["text"], str):
                raise ValueError(
                    f"row {number} of its column text is {row['text']!r:.40}, not text"
                )
            yield Document(f"{name}:{number}", row["text"])
    except (
        Exception
    ) as error:  # the library and the file systems beneath it raise whatever they like
        said = " ".join(str(error).split())
        if said.startswith(source):
            raise
        hint = "; HF_HUB_OFFLINE=0 lets it be fetched" if "OfflineModeIsEnabled" in said else ""
        raise ValueError(
            f"{source}: cannot be loaded ({said or type(error).__name__}){hint}"
        ) from None


def named(source: str, asked: str) -> tuple[str, str | None, str | None]:
    match = re.fullmatch(r"([^,@]+)(?:,([^@]+))?(?:@(.+))?", asked)
    if not match:
        raise ValueError(
            f"{source}: expected datasets:NAME, with ,CONFIG and @SPLIT after it where there are any"
        )
    return match[1], match[2], match[3]


def loaded(name: str, config: str | None, part: str) -> Any:
    """A split, streamed from where it is; one that `datasets` saved is memory-mapped."""
    import datasets

    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        found = datasets.load_from_disk(name)
        if isinstance(found, datasets.DatasetDict):
            if part not in found:
                raise ValueError(
                    f"no split {part!r}{did_you_mean(part, found)}; its splits: {', '.join(found)}"
                )
            return found[part]
        return found
    return datasets.load_dataset(name, config, split=part, streaming=True)
