"""A corpus that was tokenised once, in a folder that training maps into memory.

`datasets.DatasetDict.save_to_disk` writes the folder: a dataset for each set of documents, with a
row for each document and its ids in the column "tokens". Beside them are the tokenizer.json, where
there is one, and corpus.json with the source, the tokenizer and the sizes.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import error_in_one_line
from ..files import new_folder, read_json, write_json
from ..validation import check_counts, check_non_negative, check_positive
from .sources import (
    CORPUS_FILE,
    TRAIN_SET,
    check_regular_files,
    check_sources,
    name_sets,
    read_sets,
    set_names,
    training_texts,
)
from .token_streams import ProgressCallback, StreamCounts, TokenStream, encode_sets, id_dtype
from .tokenizing import TOKENIZER_FILE, Tokenizer, load_tokenizer

_FORMAT = "crosslayer tokens 2"
BUFFERED_ROWS = 64  # of each set in memory
ROW_TOKENS = 2**20  # at most; Arrow counts the tokens of the buffered rows in 32 bits


class PreparedCorpus(NamedTuple):
    """What a prepared folder holds."""

    source: str
    tokenizer: Tokenizer
    streams: dict[str, TokenStream]
    counts: dict[str, StreamCounts]


def prepare_corpus(
    source: str,
    tokenizer: str,
    folder: str | Path,
    valid: dict[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> PreparedCorpus:
    """Tokenise a source into a new folder, in bounded memory.

    The work is done in `folder`.part, which is renamed when it is complete. A preparation that was
    interrupted starts over.

    Args:
        source: of the training documents, and of the held-out ones where `valid` names none.
        tokenizer: what `load_tokenizer` takes.
        folder: new or empty.
        valid: sources of validation sets by name.
        progress: called after every document.

    Raises:
        ValueError: the source or the tokenizer is wrong, or the folder is in use.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = Path(folder)
    sets = name_sets(source, valid)
    check_sources(sets)
    with new_folder(folder) as work:
        trained = load_tokenizer(tokenizer, lambda: training_texts(sets))
        files = {name: str(work / f"{name}.arrow") for name in set_names(sets)}
        # `map` and `from_generator` fill one dataset from a pass over the source. This fills all,
        # "train" and "held-out", because a source on the Hub should be read once.
        features = datasets.Features(tokens=datasets.List(datasets.Value(id_dtype(trained).name)))
        with ExitStack() as stack:
            writers = {}
            for name, file in files.items():
                writer = ArrowWriter(features=features, path=file, writer_batch_size=BUFFERED_ROWS)
                writers[name] = stack.enter_context(writer)

            def write_document(name: str, ids: np.ndarray) -> None:
                for start in range(0, len(ids), ROW_TOKENS):
                    writers[name].write({"tokens": ids[start : start + ROW_TOKENS]})

            counts = encode_sets(read_sets(sets, trained), trained, write_document, progress)
            for name, writer in writers.items():
                if name not in counts:
                    raise ValueError(f"{source}: too little text, its set {name} is empty")
                writer.finalize()
        written = {name: datasets.Dataset.from_file(file) for name, file in files.items()}
        datasets.DatasetDict(written).save_to_disk(str(work))
        for file in files.values():
            Path(file).unlink()
        streams = _open_streams(work, trained, counts, digests={})
        _write_description(work, source, trained, counts, streams)
    return open_prepared(folder)


def open_prepared(folder: str | Path) -> PreparedCorpus:
    """A prepared folder, memory-mapped. Its sizes are compared with corpus.json.

    Raises:
        ValueError: not a prepared folder, or damaged.
    """
    folder = Path(folder)
    if not (folder / CORPUS_FILE).is_file():
        raise ValueError(f"{folder}: not a prepared corpus, it has no {CORPUS_FILE}")
    try:
        description = read_json(folder / CORPUS_FILE)
        if description["format"] != _FORMAT:
            raise ValueError(f"its format is {description['format']!r}, expected {_FORMAT!r}")
        tokenizer = _open_tokenizer(folder, description["tokenizer"])
        counts = _open_counts(description["sets"])
        streams = _open_streams(folder, tokenizer, counts, description["digests"])
        return PreparedCorpus(str(description["source"]), tokenizer, streams, counts)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # of JSON, of `datasets`, and of Arrow beneath it
        reason = error_in_one_line(error)
        raise ValueError(f"{folder}: damaged, prepare it again ({reason})") from None


def find_tokenizer_name(place: str) -> str | None:
    """The name of the tokenizer of a source that is a prepared folder; None for any other source.

    A damaged folder has none either: `open_prepared` says what is wrong with it.
    """
    file = Path(place.removeprefix("datasets:")) / CORPUS_FILE
    if not file.is_file():
        return None
    try:
        name = read_json(file)["tokenizer"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _open_counts(description: dict[str, dict[str, int]]) -> dict[str, StreamCounts]:
    counts = {}
    for name, sizes in description.items():
        check_counts(**sizes)
        counts[name] = StreamCounts(**sizes)
    if TRAIN_SET not in counts:
        raise ValueError(f"it has no set {TRAIN_SET}")
    return counts


def _open_streams(
    folder: Path, tokenizer: Tokenizer, counts: dict[str, StreamCounts], digests: dict[str, str]
) -> dict[str, TokenStream]:
    import datasets

    check_regular_files(folder)
    saved = datasets.load_from_disk(str(folder))
    streams = {}
    for name, sizes in counts.items():
        digest = digests.get(name)
        if digest is not None and not isinstance(digest, str):
            raise ValueError(f"the digest of its set {name} is {digest!r}")
        stream = TokenStream(saved[name], tokenizer.vocab, sizes.text_bytes, digest)
        if len(stream) != sizes.tokens:
            raise ValueError(f"set {name} has {len(stream)} tokens, expected {sizes.tokens}")
        streams[name] = stream
    return streams


def _write_description(
    folder: Path,
    source: str,
    tokenizer: Tokenizer,
    counts: dict[str, StreamCounts],
    streams: dict[str, TokenStream],
) -> None:
    if tokenizer.definition is not None:
        (folder / TOKENIZER_FILE).write_text(tokenizer.definition, "utf8")
    description = {
        "format": _FORMAT,
        "source": source,
        "tokenizer": {
            "name": tokenizer.name,
            "vocab": tokenizer.vocab,
            "end": tokenizer.end,
            "digest": tokenizer.digest,
        },
        "sets": {name: sizes._asdict() for name, sizes in counts.items()},
        "digests": {name: stream.digest for name, stream in streams.items()},
    }
    write_json(folder / CORPUS_FILE, description)


def _open_tokenizer(folder: Path, description: dict[str, Any]) -> Tokenizer:
    file = folder / TOKENIZER_FILE
    definition = file.read_text("utf8") if file.is_file() else None
    digest = description.pop("digest")
    check_positive(vocab=description["vocab"])
    check_non_negative(end=description["end"])
    tokenizer = Tokenizer(**description, definition=definition)
    if tokenizer.digest != digest:
        raise ValueError(f"{TOKENIZER_FILE} is missing, or is not the one of the preparation")
    return tokenizer
