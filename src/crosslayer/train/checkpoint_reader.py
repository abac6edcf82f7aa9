"""Reads what `torch.distributed.checkpoint` wrote, and runs no code that the files name.

torch pickles a description of the checkpoint to the file .metadata, and values that are no tensors
to the files of the ranks. Its own reader would call whatever such a pickle names. Here a pickle can
make the classes of a description, numbers, text, containers and tensors, and nothing else.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

# the classes of .metadata, as torch 2.13 writes it
_CLASSES: tuple[type, ...] = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
)


def _memory_format(_: Any, name: str) -> Any:
    return metadata._MEM_FORMAT_ENCODING[name]


_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    # an early Python 3.11 pickles a member of an enumeration as getattr(class, name)
    ("builtins", "getattr"): _memory_format,
    # where the checkpoint was written, which nobody needs; pathlib._local is that of Python 3.13
    ("pathlib", "PosixPath"): lambda *parts: None,
    ("pathlib._local", "PosixPath"): lambda *parts: None,
}


_PythonUnpickler: Any = pickle._Unpickler  # the one of which an opcode can be replaced


class CheckpointReader(dcp.FileSystemReader):
    """A reader of a checkpoint's folder, for `torch.distributed.checkpoint.load`.

    Raises:
        pickle.UnpicklingError: the description is none, or would run code.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        with open(folder / ".metadata", "rb") as file:
            self._metadata = _MetadataUnpickler(file).load()
        if not isinstance(self._metadata, metadata.Metadata):
            raise pickle.UnpicklingError(".metadata is no description of a checkpoint")
        self._metadata.storage_meta = metadata.StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._metadata


class CheckpointPlanner(dcp.DefaultLoadPlanner):
    """A planner for `torch.distributed.checkpoint.load` that reads plain values alone."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            plain_value = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            name = read_item.dest_index.fqn
            raise pickle.UnpicklingError(f"{name} is not a plain value") from None
        # torch's method unpickles anything, so it gets what was found here
        copy = io.BytesIO()
        torch.save(plain_value, copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


class _MetadataUnpickler(_PythonUnpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which it must not contain")

    def load_build(self) -> None:
        """Set attributes, of an instance alone: those of a class or a function are everyone's."""
        if not isinstance(self.stack[-2], _CLASSES):
            raise pickle.UnpicklingError(f".metadata changes {self.stack[-2]!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
