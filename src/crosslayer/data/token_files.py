"""Files of token ids, as pretraining code saves them. All are memory-mapped.

train.bin    16-bit numbers and nothing else: nanoGPT's
train.bin    256 32-bit numbers before the ids: llm.c's, of GPT-2 in 16 bits, of Llama 3 in 32
val.npy      a file of numpy; or 16-bit numbers and nothing else: OLMo's
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..validation import error_in_one_line
from .readers import Document, list_text_files

TOKEN_SUFFIXES = (".npy", ".bin")
NUMPY_START = b"\x93NUMPY"
# the first number of llm.c's header: the type of the ids
LLM_C_IDS = {20240520: "<u2", 20240801: "<u4"}
LLM_C_VERSION = 1
LLM_C_HEADER = 256  # 32-bit numbers: the above, the version, the number of ids, and zeros


def list_token_files(spec: str) -> list[Path]:
    """A file of token ids, or those that a pattern with * matches, in the order of their names.

    Raises:
        ValueError: there is none.
    """
    path = Path(spec)
    if path.is_file() or "*" not in path.name:
        return [file for file, _ in list_text_files(path)]
    files = sorted(file for file in path.parent.glob(path.name) if file.is_file())
    if not files:
        raise ValueError(f"{spec}: no file has such a name")
    return files


def read_token_ids(spec: str) -> Document:
    """All ids of a source, as one document."""
    pieces = [_map_token_ids(file) for file in list_token_files(spec)]
    ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Document(Path(spec).name, "", ids)


def read_token_documents(spec: str, separator: int) -> Iterator[Document]:
    """The documents of a source: what is between two separators, and is not empty.

    A document may begin in one file and end in the next one.
    """
    name = Path(spec).name
    number = 0
    begun: list[np.ndarray] = []  # the pieces of a document that has not ended
    for file in list_token_files(spec):
        ids = _map_token_ids(file)
        start = 0
        for end in _find(ids, separator):
            document = _join([*begun, ids[start:end]])
            begun = []
            start = end + 1
            if len(document):
                number += 1
                yield Document(f"{name}:{number}", "", document)
        begun.append(ids[start:])
    document = _join(begun)
    if len(document):
        yield Document(f"{name}:{number + 1}", "", document)


def _find(ids: np.ndarray, separator: int, chunk: int = 2**24) -> Iterator[int]:
    for start in range(0, len(ids), chunk):
        for place in np.flatnonzero(ids[start : start + chunk] == separator):
            yield start + int(place)


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    """Without a copy where there is one piece."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _map_token_ids(file: Path) -> np.ndarray:
    """The ids of a file, [tokens] of whole numbers.

    Raises:
        ValueError: it is of no kind that this file names, or cut off.
    """
    if file.with_suffix(".idx").is_file():
        raise ValueError(
            f"{file}: there is an .idx beside it, so it is Megatron's, which is not read; prepare "
            "the text that it was made of"
        )
    try:
        with file.open("rb") as stream:
            start = stream.read(4 * LLM_C_HEADER)
        if start.startswith(NUMPY_START):
            ids = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            ids = _map_numbers(file, start)
    except (OSError, ValueError, EOFError) as error:
        reason = error_in_one_line(error)
        raise ValueError(f"{file}: cannot be read as token ids ({reason})") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(f"{file}: expected one row of whole numbers, the token ids")
    return ids


def _map_numbers(file: Path, start: bytes) -> np.ndarray:
    size = file.stat().st_size
    dtype = np.dtype("<u2")
    if len(start) == 4 * LLM_C_HEADER:
        mark, version, count = (int(number) for number in np.frombuffer(start, "<i4")[:3])
        if mark in LLM_C_IDS:
            dtype = np.dtype(LLM_C_IDS[mark])
            if version != LLM_C_VERSION:
                raise ValueError(f"its version is {version}, expected {LLM_C_VERSION}")
            if len(start) + count * dtype.itemsize != size:
                found = (size - len(start)) / dtype.itemsize
                raise ValueError(f"it has {found:g} ids, its header says {count}")
            return np.memmap(file, dtype, mode="r", offset=len(start))
    if size % dtype.itemsize:
        raise ValueError(f"it has {size} bytes, expected 16-bit numbers")
    return np.memmap(file, dtype, mode="r")
