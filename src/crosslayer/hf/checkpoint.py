"""What a saved folder says of its connection, and loading it strictly.

A saved connected model is its host's checkpoint with the connection's parameters, and `"crosslayer": "mudd"` in
config.json. Where crosslayer is not imported, transformers would load that as the plain host and be fluently wrong. So
the file calls the model's type "crosslayer-llama" and refers to a line of code beside it that imports crosslayer:
without it the Auto classes refuse, and with `trust_remote_code=True` they load the model or say what to install. (A
host's class that is named outright still loads the host's part, with its report of unexpected tensors; so do
diffusers' classes.)
"""

import importlib
import json
from pathlib import Path
from typing import Any

from .weights_folder import check, read_json

PREFIX = "crosslayer-"
_PROBLEM_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")
CODE = '''"""The layers of this model are connected by crosslayer: pip install 'crosslayer[hf]'."""

from crosslayer.hf.saving import RemoteConfig  # noqa: F401
'''


def mark_config(file: Path) -> None:
    """Rewrite a config.json so that it is not taken for the plain host's."""
    config = json.loads(file.read_text())
    config["model_type"] = PREFIX + config["model_type"].removeprefix(PREFIX)
    config["auto_map"] = {"AutoConfig": "crosslayer_model.RemoteConfig"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (file.parent / "crosslayer_model.py").write_text(CODE)


def unmark_config(config: dict[str, Any]) -> dict[str, Any]:
    """The host's own config, with the keys that name the connection."""
    if str(config.get("model_type")).startswith(PREFIX):
        config = {**config, "model_type": config["model_type"].removeprefix(PREFIX)}
        config.pop("auto_map", None)
    return config


class RemoteConfig:
    """What `trust_remote_code=True` finds: by now crosslayer is imported, so the Auto classes know the rest."""

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path, **options)

    @classmethod
    def register_for_auto_class(cls, *_: Any) -> None:
        """There is no code of ours to be saved with a model."""


def from_pretrained(path: str | Path, **options: Any) -> Any:
    """A connected model as it was saved, of its own class; complete, or not at all.

    Unlike transformers' own `from_pretrained`, which works too once crosslayer is imported, it never fills in what is
    missing, and it reads safetensors alone: no pickle is loaded.

    Args:
        path: a folder that `save_pretrained` wrote, or a model's name on the hub.
        options: of the class's `from_pretrained`, like dtype or device_map.

    Raises:
        ValueError: there is no connected model, or its weights are damaged, incomplete or another model's.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = download_folder(str(path))
    cls = find_saved_class(folder)
    check(folder)
    # diffusers would cast the connections too; a connected model's own `to` keeps them float32
    options["dtype"] = options.pop("torch_dtype", options.get("dtype"))
    dtype = options.pop("dtype") if cls.__module__.startswith("diffusers") else None
    model, info = cls.from_pretrained(
        folder,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    wrong = [
        f"{kind[:-5]} {min(map(_key_name, info[kind]))!r}"
        for kind in _PROBLEM_KINDS
        if info.get(kind)
    ]
    if wrong:
        count = sum(len(info.get(kind) or ()) for kind in _PROBLEM_KINDS)
        raise ValueError(
            f"the weights in {folder} are not this model's: {', '.join(wrong)} ({count} in all)"
        )
    return model if dtype is None else model.to(dtype)


def download_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name}: no such folder, and no such model on the hub ({type(error).__name__})"
        ) from None


def find_saved_class(folder: Path) -> Any:
    """The class that config.json names, transformers' or diffusers'."""
    config = read_json(folder / "config.json")
    if not any(
        "crosslayer" in part for part in (config, *config.values()) if isinstance(part, dict)
    ):
        raise ValueError(
            f"{folder} names no connection; load the plain model with transformers and call connect"
        )
    library = importlib.import_module("diffusers" if "_class_name" in config else "transformers")
    name = config.get("_class_name") or (config.get("architectures") or ["none"])[0]
    if not hasattr(library, name):
        raise ValueError(
            f"{folder} is of the class {name!r}, which this {library.__name__} does not have"
        )
    return getattr(library, name)


def _key_name(key: Any) -> str:
    return key if isinstance(key, str) else key[0]  # of the wrong size: with both
