"""The weights in a folder: safetensors files, single or sharded. No pickle is ever loaded."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import error_in_one_line
from ..files import read_json

WEIGHTS_FILE = "model.safetensors"
_SINGLE_FILE = "model{suffix}.safetensors"
_INDEX_FILES = "*.safetensors.index{suffix}.json"
_FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def is_connection_key(key: str) -> bool:
    """Whether a key of a state dict is that of a connection in a connected model."""
    return re.search(r"\.connections?\.", key) is not None


def check_weights(folder: Path, variant: str | None) -> None:
    """Raise a ValueError where the folder's weights are not complete safetensors files, or where
    two of them have one tensor, of which the loader would take either.
    """
    file_of: dict[str, Path] = {}
    for path in _weight_files(folder, variant):
        with _open_safetensors(path) as file:
            _note_names(file.keys(), path, file_of)


def read_tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a folder, by name, from the headers of the files.

    Args:
        folder: has one safetensors file, or several with an index.

    Raises:
        ValueError: there is no safetensors file, one is truncated, the index and the files
            disagree, or a tensor is not of floating point (a quantised checkpoint).
    """
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, Path] = {}
    for path in _weight_files(folder):
        with _open_safetensors(path) as file:
            names = file.keys()
            _note_names(names, path, file_of)
            for name in names:
                header = file.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _FLOAT_DTYPES:
                    known = ", ".join(_FLOAT_DTYPES)
                    raise ValueError(f"{path}: {name!r} is {dtype}, expected one of {known}")
                shapes[name] = tuple(header.get_shape())
    index = _find_index(folder)
    if index is not None:
        indexed = set(read_json(index).get("weight_map", {}))
        differing = sorted(indexed.symmetric_difference(file_of))
        if differing:
            raise ValueError(f"{index} and the files disagree about {differing[0]!r}")
    return shapes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder by name, on the CPU. `read_tensor_shapes` has accepted it."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    return tensors


def read_host_dtype(folder: Path, variant: str | None) -> torch.dtype | None:
    """The dtype in which a host's weights are saved: that of the first floating tensor.

    Connections' tensors do not count. They are float32 in any model.

    Args:
        folder: has weights that `check_weights` has accepted.
        variant: of the names of the files, as in transformers.
    """
    for path in _weight_files(folder, variant):
        with _open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118
                dtype = _FLOAT_DTYPES.get(file.get_slice(key).get_dtype())
                if dtype is not None and not is_connection_key(key):
                    return dtype
    return None


def _note_names(names: Iterable[str], path: Path, file_of: dict[str, Path]) -> None:
    """Note the file of each tensor; raise a ValueError for one that another file has."""
    for name in names:
        if name in file_of:
            raise ValueError(f"{path}: {name!r} is in {file_of[name].name}, too")
        file_of[name] = path


def _weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    # A variant's file is beside the others: model.fp16.safetensors.
    suffix = f".{variant}" if variant else ""
    index = _find_index(folder, suffix)
    if index is not None:
        return _indexed_files(index)
    single = folder / _SINGLE_FILE.format(suffix=suffix)
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    of_variant = [file for file in files if Path(file.stem).suffix == suffix]
    files = of_variant or files
    if len(files) == 1:
        return files
    if files:
        raise ValueError(f"{folder} has {len(files)} safetensors files but no index of them")
    pickles = [path for path in sorted(folder.iterdir()) if path.suffix in _PICKLE_SUFFIXES]
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code and is never loaded; "
            "convert it where you trust it: safetensors.torch.save_file("
            f'torch.load(path, weights_only=True), "{WEIGHTS_FILE}")'
        )
    raise ValueError(f"{folder} has no {WEIGHTS_FILE}")


def _find_index(folder: Path, suffix: str = "") -> Path | None:
    """The index of a folder's shards. transformers takes one file where there is one, and may leave
    an index beside it.
    """
    if (folder / _SINGLE_FILE.format(suffix=suffix)).exists():
        return None
    return next(folder.glob(_INDEX_FILES.format(suffix=suffix)), None)


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    # A name in the index may not lead out of the folder.
    names = sorted({Path(str(name)).name for name in weight_map.values()})
    for name in names:
        if not (index.parent / name).is_file():
            raise ValueError(
                f"{index.parent} lacks the shard {name}, of {len(names)} in {index.name}"
            )
    return [index.parent / name for name in names]


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    if not path.is_file():  # a pipe would wait for someone to write to it
        raise ValueError(f"{path}: not a file")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = error_in_one_line(error)
        raise ValueError(f"{path} is truncated or not safetensors ({reason})") from error
