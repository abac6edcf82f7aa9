"""Text documents from files, the Hub or the standard library, one after another.

stdlib                                     the running interpreter's own library
novels/train.jsonl.gz                      a file, or a folder of files
datasets:Salesforce/wikitext,wikitext-2-raw-v1@validation     of the Hub, streamed
datasets:novels                            a folder that `datasets` can load or has saved
hf://datasets/allenai/OLMoE-mix-0924/data/wiki/*.json.gz      files of the Hub, or https://…
fineweb/train_*.bin                        token ids: a file, or those of a pattern
"""

import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from ..validation import did_you_mean
from .readers import Document, list_text_files, read_file, read_remote, read_rows
from .token_files import (
    TOKEN_SUFFIXES,
    check_token_files,
    list_token_files,
    read_token_documents,
    read_token_ids,
)
from .tokenizing import Tokenizer

CORPUS_FILE = "corpus.json"  # marks a folder that `crosslayer data prepare` made

TRAIN_SET = "train"
HELD_OUT = "held-out"
ALL_SETS = "mean"  # name of the group of all validation sets
TAKEN_NAMES = (TRAIN_SET, ALL_SETS, "training")  # "training loss" is a metric
VALID_SHARE = 0.05  # of the documents, by a hash of their names
_FEW_DOCUMENTS = 40  # fewer than these are split at their tail


@dataclass(frozen=True)
class TextSource:
    """Where documents come from, as `parse` reads it from what the user wrote.

    Args:
        kind: "stdlib"; "files"; "remote", files by a URL; "dataset", what `load_dataset` finds by
            name; "saved", a folder of `save_to_disk`; "tokens", files of token ids; "prepared", a
            folder that `crosslayer data prepare` wrote.
        path: the file, the folder, the URL, the pattern, or the name on the Hub.
        config: the configuration of a dataset with several.
        split: of a dataset.
    """

    kind: Literal["stdlib", "files", "remote", "dataset", "saved", "tokens", "prepared"]
    path: str = ""
    config: str | None = None
    split: str = TRAIN_SET

    @classmethod
    def parse(cls, place: str) -> "TextSource":
        """The source that `place` names.

        Raises:
            ValueError: nothing is named, or datasets: without OWNER/NAME.
        """
        if place == "stdlib":
            return cls("stdlib")
        path = place.removeprefix("datasets:")
        if not place.strip() or "\0" in place:
            raise ValueError(
                "a source of text must be stdlib, a file, a folder, datasets:OWNER/NAME or a URL, "
                f"got {place!r}"
            )
        if (Path(path) / CORPUS_FILE).is_file():
            return cls("prepared", path)
        if path == place:
            return cls(_kind_of_path(path), path)
        if path and Path(path).exists():  # the name of a folder may contain , and @
            return cls("saved" if _is_saved(path) else "dataset", path)
        # a name without an owner could be a format of `datasets`, such as pandas, which unpickles
        match = re.fullmatch(r"([^,@]+/[^,@]+)(?:,([^@]+))?(?:@(.+))?", path)
        if not match:
            raise ValueError(
                f"{place}: no such folder; expected datasets:OWNER/NAME[,CONFIG][@SPLIT]"
            )
        name, config, split = match.groups()
        kind: Literal["saved", "dataset"] = "saved" if _is_saved(name) else "dataset"
        return cls(kind, name, config, split or TRAIN_SET)


def read_documents(place: str) -> Iterator[Document]:
    """The documents of a source, without blank ones.

    In memory is one document at a time, or a thousand rows of a parquet file (up to 1 GiB of one on
    the Hub).

    A text file is one document. A line of a .jsonl or .json file is a string or an object with a
    field "text". A .parquet file or a dataset has a column "text". Files may end in .gz or .zst. In
    a folder, hidden files and folders are skipped, and .json files that are not compressed.

    Args:
        place: as at the top of this file.

    Raises:
        ValueError: the source does not exist, is empty, or is not text. Raised while reading.
    """
    source = TextSource.parse(place)
    if source.kind in ("prepared", "tokens"):
        raise ValueError(f"{place}: holds token ids, not text")
    if source.kind == "stdlib":
        documents = _read_stdlib()
    elif source.kind == "files":
        files = list_text_files(Path(place))
        documents = chain.from_iterable(read_file(file, name) for file, name in files)
    elif source.kind == "remote":
        documents = read_remote(place)
    else:
        documents = read_rows(place, source.path, lambda: _load_rows(source))
    is_empty = True
    for document in documents:
        if document.text.strip():
            is_empty = False
            yield document
    if is_empty:
        raise ValueError(f"{place}: empty")


def check_exists(place: str) -> None:
    """Raise a ValueError where a source is a file or folder that does not exist."""
    source = TextSource.parse(place)
    if source.kind == "tokens":
        list_token_files(source.path)
    elif source.kind == "files" and not Path(source.path).exists():
        list_text_files(Path(source.path))


def check_sources(sets: dict[str, str]) -> None:
    """Find what is wrong with local sources before any is read. Warn where sets share a file.

    Args:
        sets: sources by name, "train" among them.

    Raises:
        ValueError: there is no such file or folder, or a file of token ids cannot be one.
    """
    files = {name: _local_files(place) for name, place in sets.items()}
    of_training = files.pop(TRAIN_SET)
    for name, of_set in files.items():
        for file in sorted(of_set & of_training):
            warnings.warn(
                f"{file} is in the training data and in the validation set {name}", stacklevel=3
            )


def _local_files(place: str) -> set[Path]:
    """The files of a source on this machine, opened where they are token ids."""
    source = TextSource.parse(place)
    files: list[Path] = []
    if source.kind == "tokens":
        check_token_files(place)
        files = list_token_files(place)
    elif source.kind == "files":
        files = [file for file, _ in list_text_files(Path(place))]
    return {file.resolve() for file in files}


def name_sets(source: str, valid: dict[str, str] | None) -> dict[str, str]:
    """The sources of "train" and of the validation sets by name.

    Raises:
        ValueError: a validation set has one of `TAKEN_NAMES`, or cannot name a folder.
    """
    for name in valid or {}:
        if name in TAKEN_NAMES or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{name!r} cannot name a validation set: "
                "expected letters, digits, _, - and ., with none of the last two first, and not "
                f"{', '.join(TAKEN_NAMES)}"
            )
    return {TRAIN_SET: source} | (valid or {})


def set_names(sets: dict[str, str]) -> list[str]:
    """The names of the sets that `read_sets` gives for these sources."""
    return [TRAIN_SET, HELD_OUT] if _is_held_out(sets) else list(sets)


def _is_held_out(sets: dict[str, str]) -> bool:
    """Whether a part of the training data is the validation set."""
    return sets.keys() == {TRAIN_SET}


def read_sets(sets: dict[str, str], tokenizer: Tokenizer) -> Iterator[tuple[str, Document]]:
    """Each document with the name of its set.

    Token ids to train on are split into documents. Those of a validation set are one document, so
    that the set is what its author made it.

    Args:
        sets: sources by name. Where "train" is alone, a part of it is "held-out".
        tokenizer: of their token ids.
    """
    for name, place in sets.items():
        if TextSource.parse(place).kind != "tokens":
            documents = read_documents(place)
        elif name == TRAIN_SET:
            documents = read_token_documents(place, tokenizer)
        else:
            ids = read_token_ids(place, tokenizer)
            documents = iter([Document(Path(place).name, "", ids)])
        if _is_held_out(sets):
            yield from split_held_out(documents)
        else:
            yield from ((name, document) for document in documents)


def training_texts(sets: dict[str, str]) -> Iterator[str]:
    """The texts that `read_sets` gives for "train".

    Raises:
        ValueError: they are token ids already.
    """
    if TextSource.parse(sets[TRAIN_SET]).kind in ("prepared", "tokens"):
        raise ValueError(f"{sets[TRAIN_SET]}: holds token ids; name the tokenizer that made them")
    documents = read_documents(sets[TRAIN_SET])
    if not _is_held_out(sets):
        return (document.text for document in documents)
    return (document.text for name, document in split_held_out(documents) if name == TRAIN_SET)


def split_held_out(documents: Iterator[Document]) -> Iterator[tuple[str, Document]]:
    """Each document with "train" or "held-out", by the hash of its name.

    A document added to a source moves no other. Few documents are split at their tail instead.
    """
    first = list(islice(documents, _FEW_DOCUMENTS))
    if len(first) < _FEW_DOCUMENTS:
        yield from _split_tail(first)
        return
    limit = VALID_SHARE
    while not any(_hash_share(document.name) <= limit for document in first):
        more = list(islice(documents, _FEW_DOCUMENTS))
        if not more:  # the source ends, and none would be held out
            limit = min(_hash_share(document.name) for document in first)
        first += more
    for document in chain(first, documents):
        yield HELD_OUT if _hash_share(document.name) <= limit else TRAIN_SET, document


def _hash_share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(name.encode("utf8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def _split_tail(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Hold out the last share of all characters or ids. The cut may fall within a document."""
    total = sum(document.length + 1 for document in documents) - 1
    left = int(total * (1 - VALID_SHARE))
    for document in documents:
        for name, part in ((TRAIN_SET, document.cut(0, left)), (HELD_OUT, document.cut(left))):
            if part.length:
                yield name, part
        left = max(left - document.length - 1, 0)


def _read_stdlib() -> Iterator[Document]:
    """The running interpreter's library without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not excluded & set(parts):
            yield Document("/".join(parts), path.read_text("utf8", errors="replace"))


def _load_rows(source: TextSource) -> Any:
    """One split of a dataset: streamed, or memory-mapped where `save_to_disk` wrote it."""
    import datasets

    if source.kind == "dataset":
        path = source.path
        if Path(path).exists():  # a bare name like text or csv would be a format of `datasets`
            path = str(Path(path).resolve())
        return datasets.load_dataset(path, source.config, split=source.split, streaming=True)
    check_regular_files(Path(source.path))
    saved = datasets.load_from_disk(source.path)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if source.split not in saved:
        hint = did_you_mean(source.split, saved)
        raise ValueError(f"no split {source.split!r}{hint}; its splits: {', '.join(saved)}")
    return saved[source.split]


def _kind_of_path(path: str) -> Literal["remote", "tokens", "saved", "files"]:
    if "://" in path:
        return "remote"
    if path.lower().endswith(TOKEN_SUFFIXES) and not Path(path).is_dir():
        return "tokens"
    return "saved" if _is_saved(path) else "files"


def check_regular_files(folder: Path) -> None:
    """Raise a ValueError for a pipe or a device in a folder: Arrow would wait for ever for it."""
    for path in folder.rglob("*"):
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{path.relative_to(folder)} is neither a file nor a folder")


def _is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((Path(path) / file).is_file() for file in ("dataset_dict.json", "state.json"))
