"""A checkpoint's folder: config.json and safetensors, single or sharded. No pickle is ever loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

FLOATS = ("F64", "F32", "BF16", "F16")
SINGLE, INDEX = "model.safetensors", "*.safetensors.index.json"


def check(folder: Path) -> None:
    """Raise a ValueError where the weights are not whole files of safetensors."""
    for path in files(folder):
        with opened(path):
            pass


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got a {type(content).__name__}")
    return content


class Weights:
    """The tensors of a folder by name: their shapes from the files' headers at once, the tensors when asked.

    Raises:
        ValueError: there is no safetensors file, one is truncated, the index and the files disagree, or a tensor is
            not of floating point (a quantised checkpoint).
    """

    def __init__(self, folder: Path):
        self.files = files(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.home: dict[str, Path] = {}
        for path in self.files:
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if name in self.home:
                        raise ValueError(
                            f"{name!r} is in both {self.home[name].name} and {path.name}"
                        )
                    part = file.get_slice(name)
                    if part.get_dtype() not in FLOATS:
                        raise ValueError(
                            f"{name!r} is {part.get_dtype()}, expected one of {', '.join(FLOATS)}"
                        )
                    self.home[name], self.shapes[name] = path, tuple(part.get_shape())
        for index in folder.glob(INDEX):
            listed = set(read_json(index).get("weight_map", {}))
            if odd := sorted(listed.symmetric_difference(self.home)):
                raise ValueError(f"{index.name} and the files disagree about {odd[0]!r}")

    def read(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            with opened(path) as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors


def files(folder: Path) -> list[Path]:
    for index in folder.glob(INDEX):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index} has no weight_map")
        paths = [
            folder / name for name in sorted({Path(str(name)).name for name in shards.values()})
        ]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ValueError(
                f"{folder} lacks the shard {missing[0]}, of {len(paths)} in {index.name}"
            )
        return paths
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ValueError(f"{folder} has {len(found)} safetensors files but no index of them")
    pickles = sorted(
        path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}")
    )
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code and is never loaded; convert it where you trust it: "
            'safetensors.torch.save_file(torch.load(path, weights_only=True), "model.safetensors")'
        )
    raise ValueError(f"{folder} has no {SINGLE}")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not safetensors ({' '.join(str(error).split())})"
        ) from error
