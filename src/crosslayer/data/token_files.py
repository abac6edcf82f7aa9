"""Files of token ids, as other pretraining code saves them. All are memory-mapped.

train.bin    16-bit numbers and nothing else: nanoGPT's
train.bin    256 32-bit numbers before the ids: llm.c's and modded-nanogpt's
val.npy      a file of numpy; or 16-bit numbers and nothing else: OLMo's
"""

import glob
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import error_in_one_line
from .readers import Document, list_text_files
from .tokenizing import Tokenizer, find_ids, split_ids

TOKEN_SUFFIXES = (".npy", ".bin")
_RAW_DTYPE = np.dtype("<u2")  # of a file without a header
_NUMPY_START = b"\x93NUMPY"
# llm.c's header: the kind of the ids, its version, their number, and zeros
_LLM_C_HEADER = 256  # 32-bit numbers
_LLM_C_KINDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # GPT-2's and Llama 3's: version, dtype


def list_token_files(place: str) -> list[Path]:
    """A file of token ids, or those that a pattern with *, ? or [] matches.

    They are in the order of their names, where numbers count as numbers.

    Raises:
        ValueError: there is none.
    """
    path = Path(place)
    if path.exists() or not glob.has_magic(place):
        return [file for file, _ in list_text_files(path)]
    files = [Path(name) for name in glob.glob(place, recursive=True)]
    if not files:
        raise ValueError(f"{place}: no file has such a name")
    return sorted(files, key=lambda path: (_natural_order(path), str(path)))


def _natural_order(path: Path) -> list[tuple[str, int]]:
    """Sorts a_2 before a_10, and both before b_1."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]


def read_token_ids(place: str, tokenizer: Tokenizer) -> np.ndarray:
    """All ids of a source, [tokens].

    Raises:
        ValueError: a file has other content than ids of this tokenizer.
    """
    return _join([_open_ids(file, tokenizer) for file in list_token_files(place)])


def read_token_documents(place: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a source: what is between two separators, and is not empty.

    A document may begin in one file and end in the next one. Its name is that of the file in which
    it ends, with its number there.

    Raises:
        ValueError: a file has other content than ids of this tokenizer.
    """
    files = list_token_files(place)
    begun: list[np.ndarray] = []  # the pieces of a document that has not ended
    is_divided = False
    for file in files:
        ids = _open_ids(file, tokenizer)
        ends = list(find_ids(ids, tokenizer.end))
        is_divided = is_divided or bool(ends)
        if file == files[-1]:
            ends.append(len(ids))
        start = 0
        for number, end in enumerate(ends, start=1):
            document = _join([*begun, ids[start:end]])
            begun = []
            start = end + 1
            if len(document):
                yield Document(f"{file.name}:{number}", "", document)
        begun.append(ids[start:])
    if not is_divided:
        warnings.warn(
            f"{place} has no separator of the tokenizer {tokenizer.name}, the id {tokenizer.end}, "
            "so it is one document",
            stacklevel=2,
        )


def check_token_files(place: str) -> None:
    """Open every file of a source, so that a wrong one is found before the first is read."""
    for file in list_token_files(place):
        _map_ids(file)


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    """The pieces as one array. A single piece is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    dtype = np.result_type(*pieces)
    if dtype.kind == "f":  # of uint64 and int64, whose ids fit in both
        dtype = np.dtype(np.int64)
    return np.concatenate(pieces, dtype=dtype, casting="unsafe")


def _open_ids(file: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a file, [tokens] of whole numbers, each one of the tokenizer's."""
    ids = _map_ids(file)
    if tokenizer.vocab > np.iinfo(ids.dtype).max + 1:
        raise ValueError(
            f"{file}: its numbers have {8 * ids.dtype.itemsize} bits, too few for the "
            f"{tokenizer.vocab} ids of the tokenizer {tokenizer.name}; save wider ones with "
            "numpy.save"
        )
    for chunk in split_ids(ids):
        for number in (int(chunk.max()), int(chunk.min())):
            if not 0 <= number < tokenizer.vocab:
                raise ValueError(
                    f"{file}: has the id {number}, but the tokenizer {tokenizer.name} has "
                    f"{tokenizer.vocab} ids; the file was made with another tokenizer"
                )
    return ids


def _map_ids(file: Path) -> np.ndarray:
    """The numbers of a file.

    Raises:
        ValueError: it is of no kind that this file names, or cut off.
    """
    if file.with_suffix(".idx").is_file():
        raise ValueError(
            f"{file}: there is an .idx beside it, so it is Megatron's, which is not read; prepare "
            "the text that it was made of"
        )
    try:
        if file.exists() and not file.is_file():  # a pipe would wait for ever
            raise ValueError("not a regular file")
        with file.open("rb") as stream:
            start = stream.read(4 * _LLM_C_HEADER)
        if start.startswith(_NUMPY_START):
            ids = np.load(file, mmap_mode="r", allow_pickle=False)
        elif (dtype := _read_header(start, file.stat().st_size)) is not None:
            ids = np.memmap(file, dtype, mode="r", offset=len(start))
        else:
            ids = np.memmap(file, _RAW_DTYPE, mode="r")
            _check_width(ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise ValueError(f"it has {ids.dtype} {list(ids.shape)}, expected one row of integers")
    except (OSError, ValueError, EOFError) as error:
        reason = error_in_one_line(error)
        raise ValueError(f"{file}: cannot be read as token ids ({reason})") from None
    return ids


def _read_header(start: bytes, size: int) -> np.dtype | None:
    """The type of the ids after llm.c's header; None for a file without one.

    Args:
        start: the first bytes of a file, as many as the header has.
        size: of the file, in bytes.
    """
    if not size:
        raise ValueError("it is empty")
    numbers = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
    kind = int(numbers[0]) if len(numbers) else 0
    is_whole = len(numbers) == _LLM_C_HEADER
    if kind not in _LLM_C_KINDS:
        if is_whole and not numbers[3:].any():
            raise ValueError(f"it has a header of an unknown kind, {kind}")
        if size % _RAW_DTYPE.itemsize:
            raise ValueError(f"it has {size} bytes, expected 16-bit numbers")
        return None
    if not is_whole:
        raise ValueError("it ends within its header")
    version = _LLM_C_KINDS[kind][0]
    dtype = np.dtype(_LLM_C_KINDS[kind][1])
    if numbers[1] != version:
        raise ValueError(f"its version is {numbers[1]}, expected {version}")
    found = (size - len(start)) / dtype.itemsize
    if found != numbers[2] or not found:
        raise ValueError(f"it has {found:g} ids, its header says {numbers[2]}")
    return dtype


def _check_width(ids: np.ndarray) -> None:
    """Raise for numbers of 32 or 64 bits, which read as 16 bits are zero at every second place."""
    first = ids[: 2**16]
    if len(first) < 8:
        return
    zeros = [np.mean(first[place::2] == 0) for place in (0, 1)]
    if zeros[1] > 0.9 > zeros[0]:
        raise ValueError(
            "every second 16-bit number is 0, as in a file of wider numbers; save them with "
            "numpy.save"
        )
