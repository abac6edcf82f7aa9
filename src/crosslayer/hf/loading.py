"""Checkpoint folders: a config.json, and weights of exactly the model that it describes.

Nothing in a folder decides what code runs. Weights are safetensors. The model's class is one of
those that transformers has for the config's model type, or a diffusers model of a known family.
`auto_map`, which names code of the folder's own, is not followed.
"""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..connection import Connection
from ..errors import error_in_one_line, error_with_class
from ..files import read_json
from ..hub import check_model_source, download_files
from ..run_folders import CONFIG_FILE
from ..validation import check_option_type, did_you_mean
from .config import check_model_sizes
from .families import FAMILIES
from .registration import (
    MODEL_TYPE_PREFIX,
    SavedConfig,
    check_connection_keys,
    host_config_dict,
    names_connection,
    register_with_diffusers,
)
from .weights import check_weights, is_connection_key, read_host_dtype

_ADAPTER_FILE = "adapter_config.json"  # of PEFT
# Options of `from_pretrained` that say where its folder is.
_PLACE_OPTIONS = (
    "revision", "subfolder", "cache_dir", "token", "force_download", "local_files_only"
)  # fmt: skip
# Options of `from_pretrained` that have one value here: a model is complete, and runs no code of a
# folder.
_FIXED_OPTIONS = {
    "use_safetensors": True,
    "trust_remote_code": False,
    "ignore_mismatched_sizes": False,
    "output_loading_info": False,
}


def _hub_files(variant: str | None = None) -> list[str]:
    """Patterns of a model's files on the Hub, except its tokenizer's."""
    suffix = f".{variant}" if variant else ""
    names = [f"{name}{suffix}" for name in ("model", "diffusion_pytorch_model")]
    ends = (".safetensors", "-*.safetensors")  # of one file, and of shards
    return ["*.json", *[name + end for name in names for end in ends]]


def from_pretrained(path: str | Path, **options: Any) -> Any:
    """Load a saved connected model with its class: complete, or not at all.

    It differs from the class's own `from_pretrained`, which works too, in three ways: missing
    weights are an error, only safetensors are read, and no code of the folder is run.

    Args:
        path: a folder that `save_pretrained` wrote, or a model's name on the Hub.
        options: those of the class's `from_pretrained`, for example dtype, device_map or revision.

    Returns:
        The connected model, in eval mode.

    Raises:
        ValueError: the folder has no connected model, or its weights are damaged, incomplete or
            another model's.
    """
    for name, fixed in _FIXED_OPTIONS.items():
        given = options.pop(name, fixed)
        if given not in (fixed, None):
            raise ValueError(f"crosslayer.from_pretrained takes only {name}={fixed}, got {given!r}")
    place = {name: options.pop(name) for name in _PLACE_OPTIONS if name in options}
    folder = find_folder(path, _hub_files(options.get("variant")), **place)
    _check_no_adapter(folder)
    config_dict = read_json(folder / CONFIG_FILE)
    check_connection_keys(config_dict, folder)
    if not names_connection(config_dict):
        raise ValueError(
            f"{folder} names no connection; load the plain model with transformers and call connect"
        )
    cls = _saved_class(config_dict, folder)
    dtype = options.pop("torch_dtype", options.pop("dtype", None))
    if "_class_name" not in config_dict:
        if "config" not in options:
            config, options = read_config(folder, **options)
            options["config"] = config
        return load_complete(cls, folder, dtype=dtype, **options)
    register_with_diffusers()
    model = load_complete(cls, folder, **options)
    if dtype == "auto":
        dtype = read_host_dtype(folder, options.get("variant"))
    # While loading, diffusers would cast the connections too; `to` keeps them in float32.
    return model if dtype is None else model.to(dtype)


def load_complete(cls: Any, folder: Path, **options: Any) -> Any:
    """A model of a class, with every weight from the folder and none left over.

    Args:
        cls: a class of models, or one of transformers' auto classes.
        folder: has the weights.
        options: of `cls.from_pretrained`.

    Raises:
        ValueError: the weights are damaged, incomplete or another model's.
    """
    _check_no_adapter(folder)
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise ValueError(f"{folder} holds a distributed checkpoint; save the whole model")
    check_weights(folder, options.get("variant"))
    try:
        model, info = cls.from_pretrained(
            folder,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of every kind, where a config's values do not fit together
        raise ValueError(f"{folder}: {_describe_loading_error(error)}") from error
    _check_loading_info(model, info, folder)
    return model


def read_config(folder: Path, **options: Any) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A transformers config, without what a folder must not choose.

    Args:
        folder: has a config.json.
        options: those that are keys of the config replace its values.

    Returns:
        The config, and the other options.

    Raises:
        ValueError: the model type is unknown, or transformers refuses a value.
    """
    config_dict = read_json(folder / CONFIG_FILE)
    check_connection_keys(config_dict, folder)
    _config_class(config_dict, folder)
    if config_dict["model_type"] not in CONFIG_MAPPING:  # a family of the user's own, connected
        AutoConfig.register(config_dict["model_type"], SavedConfig)
    try:
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, return_unused_kwargs=True, **options
        )
    except Exception as error:  # transformers raises classes of every kind
        raise ValueError(f"{folder / CONFIG_FILE}: {_describe_loading_error(error)}") from error
    try:
        check_model_sizes(config)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None
    for key in ("auto_map", "transformers_weights"):
        vars(config).pop(key, None)
    # An implementation may be the name of code on the Hub.
    config._attn_implementation = options.get("attn_implementation")
    config._experts_implementation = options.get("experts_implementation")
    return config, unused


def find_folder(
    path: str | Path,
    files: Sequence[str] = _hub_files(),
    expected: str = "folder",
    subfolder: str = "",
    **download: Any,
) -> Path:
    """A local folder, or the files of a name on the Hub: downloaded, or from the cache.

    Args:
        path: a folder or a name.
        files: patterns of the files to download.
        expected: what may be at a local path, for the message.
        subfolder: the folder in it that is meant.
        download: options of `snapshot_download`, like revision and cache_dir.

    Raises:
        ValueError: there is no such folder and no such name, or it is a training run's.
    """
    check_option_type("path", path, str | Path)
    if Path(path).is_dir():
        folder = Path(path, subfolder)
        check_model_source(folder, expected)
        return folder
    check_model_source(path, expected, subfolder=subfolder, **download)

    patterns = [Path(subfolder, file).as_posix() for file in (CONFIG_FILE, *files)]
    return download_files(str(path), patterns, expected, **download) / subfolder


def _check_no_adapter(folder: Path) -> None:
    if (folder / _ADAPTER_FILE).is_file():
        raise ValueError(
            f"{folder} holds an adapter of PEFT ({_ADAPTER_FILE}); connect its model as in "
            "training and load it with peft.PeftModel.from_pretrained, or merge it into its model "
            "and save that"
        )


def _describe_loading_error(error: Exception) -> str:
    if isinstance(error, ValueError):
        return error_in_one_line(error)
    return error_with_class(error)


def _saved_class(config_dict: dict[str, Any], folder: Path) -> Any:
    """The class that config.json names, if it is a model of a known family."""
    if "_class_name" in config_dict:
        library: Any = importlib.import_module("diffusers")
        name = config_dict["_class_name"]
        classes = {known: getattr(library, known) for known in FAMILIES if hasattr(library, known)}
    else:
        architectures = config_dict.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        config_class = _config_class(config_dict, folder)
        classes = {**_auto_classes(config_class), **_family_classes(config_class)}
    if not isinstance(name, str) or name not in classes:
        raise ValueError(
            f"{folder}: unknown class {name!r}{did_you_mean(name, classes)} in its config.json; "
            f"known for this type of model: {', '.join(classes)}; a class of your own loads the "
            "folder with its own from_pretrained"
        )
    return classes[name]


def _config_class(config_dict: dict[str, Any], folder: Path) -> Any:
    """The class of transformers' config for the model type in config.json."""
    if "model_type" not in config_dict:
        raise ValueError(
            f"{folder}: its config.json has no model_type, so it is no model of transformers"
        )
    model_type = host_config_dict(config_dict)["model_type"]
    if model_type not in CONFIG_MAPPING or model_type.startswith(MODEL_TYPE_PREFIX):
        own_code = ""
        if "auto_map" in config_dict:
            own_code = "; code that comes with a checkpoint (auto_map) is never run"
        raise ValueError(
            f"{folder}: unknown model type {model_type!r}"
            f"{did_you_mean(model_type, CONFIG_MAPPING.keys())} in its config.json{own_code}"
        )
    return CONFIG_MAPPING[model_type]


def _auto_classes(config_class: Any) -> dict[str, Any]:
    """The models of transformers' auto classes for a config, by the names of their classes."""
    classes = {}
    for mapping in vars(modeling_auto).values():
        if isinstance(mapping, _LazyAutoMapping) and config_class in mapping:
            found = mapping[config_class]
            for cls in found if isinstance(found, tuple | list) else [found]:
                classes[cls.__name__] = cls
    return classes


def _family_classes(config_class: Any) -> dict[str, Any]:
    """The models of a config in transformers' file of their family, by the names of their classes.

    No auto class has some of them, like CLIPVisionModelWithProjection.
    """
    path = config_class.__module__.replace(".configuration_", ".modeling_")
    if not path.startswith("transformers.models.") or find_spec(path) is None:
        return {}
    classes = {}
    for cls in vars(importlib.import_module(path)).values():
        is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
        if not is_model or cls.config_class is not config_class:
            continue
        if cls.forward is not PreTrainedModel.forward:  # not the base class of the family's models
            classes[cls.__name__] = cls
    return classes


def _check_loading_info(model: nn.Module, info: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError where the folder's tensors are not exactly those of the model.

    A plain model's folder may have parts that the model does not have, like a vision tower.
    """
    # A key of another size comes with both sizes.
    mismatched = [key for key, *_ in info.get("mismatched_keys", ())]
    unexpected = list(info.get("unexpected_keys", ()))
    if not any(isinstance(module, Connection) for module in model.modules()):
        of_connections = [key for key in unexpected if is_connection_key(key)]
        if of_connections:
            raise ValueError(
                f"{folder} has tensors of a connection, like {min(of_connections)!r} "
                f"({len(of_connections)} in all), but its config.json, or the config given, has no "
                "key 'crosslayer' that names the connection"
            )
        unexpected = [key for key in unexpected if _belongs_to(model, key)]
    kinds = {
        "missing": list(info.get("missing_keys", ())),
        "unexpected": unexpected,
        "mismatched": mismatched,
    }
    problems = [f"{kind} {min(keys)!r}" for kind, keys in kinds.items() if keys]
    if problems:
        count = sum(len(keys) for keys in kinds.values())
        raise ValueError(
            f"the weights in {folder} are not this model's: {', '.join(problems)} ({count} in all)"
        )


def _belongs_to(model: Any, key: str) -> bool:
    """Whether a tensor's name leads into a module of the model, further than its backbone."""
    backbone = getattr(model, "base_model", model)
    for root in (model, backbone):
        module = root
        for name in key.split("."):
            children = dict(module.named_children())
            if name not in children:
                break
            module = children[name]
        if module is not model and module is not backbone:
            return True
    return False
