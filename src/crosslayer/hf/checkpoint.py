"""Checkpoint folders: config.json and safetensors, single or sharded. No pickle is ever loaded."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..hub import NO_NETWORK, check_model_source
from .registration import host_config_dict, register_with_diffusers

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILES = "*.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
_PICKLE_SUFFIXES = ("bin", "pt", "pth", "ckpt")


def from_pretrained(path: str | Path, **options: Any) -> Any:
    """Load a saved connected model, of its own class: complete, or not at all.

    It differs from the class's own `from_pretrained`, which works too, in two ways: missing weights
    are an error, and only safetensors are read.

    Args:
        path: a folder that `save_pretrained` wrote, or a model's name on the Hub.
        options: those of the class's `from_pretrained`, for example dtype or device_map.

    Returns:
        The connected model, in eval mode.

    Raises:
        ValueError: the folder has no connected model, or its weights are damaged, incomplete or
            another model's.
    """
    check_model_source(path)
    folder = Path(path)
    if not folder.is_dir():
        folder = _download_folder(str(path))
    config_dict = read_json(folder / "config.json")
    cls = _saved_class(config_dict, folder)
    check_weights(folder)
    dtype = options.pop("torch_dtype", options.pop("dtype", None))
    is_diffusers_model = "_class_name" in config_dict
    if is_diffusers_model:
        register_with_diffusers()
    else:
        if "config" not in options:
            # The host's class itself would warn of another model type in config.json.
            config, options = cls.config_class.from_dict(
                host_config_dict(config_dict), return_unused_kwargs=True, **options
            )
            options["config"] = config
        options["dtype"] = dtype
    model, info = cls.from_pretrained(
        folder,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    _check_loading_info(info, folder)
    if is_diffusers_model and dtype is not None:
        # While loading, diffusers would cast the connections too; `to` keeps them in float32.
        model = model.to(dtype)
    return model


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: there is no such file, or it contains no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got a {type(content).__name__}")
    return content


def check_weights(folder: Path) -> None:
    """Raise a ValueError where the folder's weights are not complete safetensors files."""
    for path in _weight_files(folder):
        with _open_safetensors(path):
            pass


class FolderWeights:
    """The tensors in a folder. Their shapes are read at once, from the headers of the files.

    Args:
        folder: has one safetensors file, or several with an index.

    Attributes:
        shapes: the shape of each tensor, by name.

    Raises:
        ValueError: there is no safetensors file, one is truncated, the index and the files
            disagree, or a tensor is not of floating point (a quantised checkpoint).
    """

    def __init__(self, folder: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = _weight_files(folder)
        self._file_of: dict[str, Path] = {}
        for path in self._files:
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    self._add_tensor(name, path, file.get_slice(name))
        for index in folder.glob(_INDEX_FILES):
            indexed = set(read_json(index).get("weight_map", {}))
            differing = sorted(indexed.symmetric_difference(self._file_of))
            if differing:
                raise ValueError(f"{index.name} and the files disagree about {differing[0]!r}")

    def read(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU."""
        tensors: dict[str, Tensor] = {}
        for path in self._files:
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    tensors[name] = file.get_tensor(name)
        return tensors

    def _add_tensor(self, name: str, path: Path, header: Any) -> None:
        if name in self._file_of:
            raise ValueError(f"{name!r} is in both {self._file_of[name].name} and {path.name}")
        dtype = header.get_dtype()
        if dtype not in _FLOAT_DTYPES:
            raise ValueError(f"{name!r} is {dtype}, expected one of {', '.join(_FLOAT_DTYPES)}")
        self._file_of[name] = path
        self.shapes[name] = tuple(header.get_shape())


def _weight_files(folder: Path) -> list[Path]:
    for index in folder.glob(_INDEX_FILES):
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ValueError(f"{folder} has {len(files)} safetensors files but no index of them")
    for suffix in _PICKLE_SUFFIXES:
        for path in sorted(folder.glob(f"*.{suffix}")):
            raise ValueError(
                f"{path.name} is a pickle, which can run code and is never loaded; "
                "convert it where you trust it: safetensors.torch.save_file("
                f'torch.load(path, weights_only=True), "{WEIGHTS_FILE}")'
            )
    raise ValueError(f"{folder} has no {WEIGHTS_FILE}")


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
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is truncated or not safetensors ({reason})") from error


def _download_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except LocalEntryNotFoundError:
        raise ValueError(f"{name}: no such folder; {NO_NETWORK}") from None
    except (HFValidationError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name}: no such folder, and no such model on the Hub ({type(error).__name__})"
        ) from None


def _saved_class(config: dict[str, Any], folder: Path) -> Any:
    """The class that config.json names, of transformers or diffusers."""
    configs = [config, *config.values()]
    if not any("crosslayer" in part for part in configs if isinstance(part, dict)):
        raise ValueError(
            f"{folder} names no connection; load the plain model with transformers and call connect"
        )
    if "_class_name" in config:
        library = importlib.import_module("diffusers")
        name = config["_class_name"]
    else:
        library = importlib.import_module("transformers")
        name = (config.get("architectures") or ["none"])[0]
    if not hasattr(library, name):
        raise ValueError(
            f"{folder} is of the class {name!r}, which this {library.__name__} does not have"
        )
    return getattr(library, name)


def _check_loading_info(info: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError where the folder's tensors are not exactly those of the model."""
    count = 0
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = info.get(f"{kind}_keys")
        if keys:
            # A key of another size comes with both sizes.
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            problems.append(f"{kind} {first!r}")
            count += len(keys)
    if problems:
        listed = ", ".join(problems)
        raise ValueError(f"the weights in {folder} are not this model's: {listed} ({count} in all)")
