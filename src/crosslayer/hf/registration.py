"""What transformers and diffusers are taught: to build a connected model from a saved config.

A saved connected model is its host's checkpoint with the connections' parameters, and
`"crosslayer": "mudd"` in config.json. transformers without crosslayer would load that folder as the
plain host and silently drop the connections. Therefore config.json gives the model type as
"crosslayer-llama", and its `auto_map` refers to `crosslayer_model.py` in the same folder, which
imports crosslayer. In a process without crosslayer the Auto classes refuse the folder; with
`trust_remote_code=True` they import crosslayer, or say that it is missing. Only a host class called
by name, like `LlamaForCausalLM.from_pretrained`, and diffusers' classes still load the host's
weights there, and report the others as unexpected.

Importing `crosslayer.hf` calls `register_with_transformers`. It registers the saved model types
with `AutoConfig`, patches five methods for which transformers has no registration, and filters one
warning. diffusers gets one patch, if it is imported already or as soon as crosslayer meets a
diffusers model. PEFT's are in `adapters`.
"""

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers import HfQuantizer

from ..partitioned import without_partitioning
from ..spec import make
from ..validation import check_positive
from .adapters import refuse_to_drop_connections, register_with_imported_peft
from .attach import attach_connections, find_backbone
from .host_quirks import apply_host_quirks
from .qkv import plain_fused_projections
from .saving import nested_configs, refuse_what_cannot_be_loaded
from .sharding import keep_parameters_apart

MODEL_TYPE_PREFIX = "crosslayer-"
_REMOTE_FILE = "crosslayer_model.py"
_REMOTE_CODE = '''"""A model connected by crosslayer, which must be installed to load it."""

from crosslayer.hf import SavedConfig  # noqa: F401
'''


# transformers' warning where a class of a host, like `LlamaConfig`, reads a saved connected model
_TYPES_DIFFER = re.compile(
    rf"You are using a model of type `{MODEL_TYPE_PREFIX}(?P<saved>\S+)` to instantiate a model of "
    r"type `(?P=saved)`"
)


class SavedConfig:
    """Reads the config of a saved connected model, and returns the config of its host's class.

    `AutoConfig` finds it under every model type with our prefix, and in a process without
    crosslayer through `auto_map`. The config that it returns has the keys that name the connection,
    so the model built from it is connected.
    """

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        check_connection_keys(config_dict, "config.json")
        host_dict = host_config_dict(config_dict)
        return CONFIG_MAPPING[host_dict["model_type"]].from_dict(host_dict, **options)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Any:
        """What transformers calls where `trust_remote_code=True` found this class."""
        config_dict, options = PreTrainedConfig.get_config_dict(path, **options)
        return cls.from_dict(config_dict, **options)

    @classmethod
    def register_for_auto_class(cls, *_: Any) -> None:
        """Nothing: transformers need not copy this class's code into saved folders."""


@functools.cache
def register_with_transformers() -> None:
    """Make transformers read, build and write connected models. A second call changes nothing."""
    # All types, not only our families: a vision-language model may have a connected part.
    for model_type in list(CONFIG_MAPPING.keys()):
        AutoConfig.register(MODEL_TYPE_PREFIX + model_type, SavedConfig)
    # transformers has no hook between building a model and loading its weights.
    PreTrainedModel.post_init = _connect_before_post_init(PreTrainedModel.post_init)
    # transformers has no hook for what a config writes: the model type is that of its class.
    PreTrainedConfig.to_json_file = _mark_after_writing(PreTrainedConfig.to_json_file)
    # transformers has no hook before it writes a folder.
    PreTrainedModel.save_pretrained = refuse_what_cannot_be_loaded(PreTrainedModel.save_pretrained)
    # The adapters of transformers' own `add_adapter` are saved by this method.
    PreTrainedModel.get_adapter_state_dict = refuse_to_drop_connections(
        PreTrainedModel.get_adapter_state_dict
    )
    # transformers has no hook between building a model and quantising it.
    quantising = _quantise_fused_projections(HfQuantizer.preprocess_model)
    HfQuantizer.preprocess_model = quantising
    logging.getLogger("transformers.configuration_utils").addFilter(_keeps_record)
    register_with_imported_peft()
    if "diffusers" in sys.modules:
        register_with_diffusers()


@functools.cache
def register_with_diffusers() -> None:
    """Make diffusers build connected models from saved configs. A second call changes nothing.

    Whatever meets a diffusers model calls it, because importing diffusers takes seconds.
    """
    from diffusers import ConfigMixin

    # diffusers has no registry of models, nor a hook between building one and loading weights.
    from_config = _connect_after_from_config(ConfigMixin.from_config.__func__)
    ConfigMixin.from_config = classmethod(from_config)


def _keeps_record(record: logging.LogRecord) -> bool:
    """False for the warning that a host's class may not fit its own saved connected model."""
    return _TYPES_DIFFER.match(record.getMessage()) is None


def rebuild_connections(backbone: Any, config: dict[str, Any]) -> None:
    """Connect a freshly built backbone as its config says.

    Args:
        backbone: a model of transformers or diffusers, or a part of one.
        config: the content of its config.json, which names the connection.

    Raises:
        ValueError: the config names no known connection, its widths are wrong, or the backbone
            cannot be connected.
    """
    spec = make(config["crosslayer"])
    widths = config.get("crosslayer_widths")
    if widths is not None and not isinstance(widths, list):
        raise ValueError(f"crosslayer_widths must be a list of one width a layer, got {widths!r}")
    check_positive(**{f"crosslayer_widths[{i}]": width for i, width in enumerate(widths or [])})
    with without_partitioning():
        owner, wiring = find_backbone(backbone)
        if "wiring" in vars(owner):  # A module within this one owns the layers, and came before it.
            return
        attach_connections(owner, wiring, spec, widths)
        apply_host_quirks(backbone)


def _mark_config(file: Path) -> None:
    """Rewrite a config.json as a connected model's, and write the file that it refers to."""
    config = json.loads(file.read_text())
    config["model_type"] = MODEL_TYPE_PREFIX + config["model_type"]
    config["auto_map"] = {"AutoConfig": f"{Path(_REMOTE_FILE).stem}.{SavedConfig.__name__}"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (file.parent / _REMOTE_FILE).write_text(_REMOTE_CODE)


def host_config_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the host's model type, and with the keys that name the connection."""
    host_dict = {key: value for key, value in config_dict.items() if key != "auto_map"}
    host_dict["model_type"] = str(config_dict.get("model_type")).removeprefix(MODEL_TYPE_PREFIX)
    return host_dict


def names_connection(config_dict: dict[str, Any]) -> bool:
    """Whether a config, or that of a part of its model, names a connection."""
    return any("crosslayer" in part for part in _nested_dicts(config_dict))


def check_connection_keys(config_dict: dict[str, Any], source: str | Path) -> None:
    """Check how a config names the connections of its model and of its parts.

    Args:
        config_dict: of config.json.
        source: its folder, for the message.

    Raises:
        ValueError: the config is a connected model's, but does not name the connection.
    """
    parts = list(_nested_dicts(config_dict))
    specs = [part["crosslayer"] for part in parts if "crosslayer" in part]
    is_marked = str(config_dict.get("model_type")).startswith(MODEL_TYPE_PREFIX)
    is_marked |= any(str(key).startswith("crosslayer_") for part in parts for key in part)
    if is_marked and not specs:
        raise ValueError(
            f"{source} is of a connected model, but has lost the key 'crosslayer' that names its "
            "connection"
        )
    for spec in specs:
        if not isinstance(spec, str) or not spec:
            raise ValueError(
                f"{source}: 'crosslayer' must name a connection, like \"mudd(dilation=2)\", "
                f"got {spec!r}"
            )


def _nested_dicts(config_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and those within it, as they are in config.json."""
    yield config_dict
    for value in config_dict.values():
        if isinstance(value, dict):
            yield from _nested_dicts(value)


def _connect_before_post_init(post_init: Callable[..., None]) -> Callable[..., None]:
    """Connect a model at the end of its `__init__`, before transformers loads its weights."""

    @functools.wraps(post_init)
    def connecting_post_init(self: Any) -> None:
        _restore_model_type(self.config)
        # The base model owns the layers and is built first. The models around it find it connected.
        owns_connection = bool(getattr(self.config, "crosslayer", None)) and self.base_model is self
        if owns_connection:
            rebuild_connections(self, vars(self.config))
        post_init(self)
        if owns_connection:
            keep_parameters_apart(self)  # The models around it add what it says to their own plans.

    return connecting_post_init


def _quantise_fused_projections(preprocess_model: Callable[..., Any]) -> Callable[..., Any]:
    """Let quantisers replace fused projections: some replace modules of nn.Linear itself alone."""

    @functools.wraps(preprocess_model)
    def preprocess_connected_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with plain_fused_projections(model):
            return preprocess_model(self, model, *args, **kwargs)

    return preprocess_connected_model


def _restore_model_type(config: Any) -> None:
    """Undo `_mark_config` in a config that a host class called by name has read."""
    if str(vars(config).get("model_type")).startswith(MODEL_TYPE_PREFIX):
        keys = {**config.to_dict(), "model_type": config.model_type}
        check_connection_keys(keys, "config.json")
        of_host = config.model_type.removeprefix(MODEL_TYPE_PREFIX)
        del config.model_type
        if config.model_type != of_host:  # a class that reads configs of several types
            config.model_type = of_host
        vars(config).pop("auto_map", None)


def _mark_after_writing(to_json_file: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(to_json_file)
    def marking_to_json_file(self: Any, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        to_json_file(self, json_file_path, *args, **kwargs)
        # Where only a part of the model is connected, the part's config within this one says so.
        if any(getattr(config, "crosslayer", None) for config in nested_configs(self)):
            _mark_config(Path(json_file_path))

    return marking_to_json_file


def _connect_after_from_config(from_config: Callable[..., Any]) -> Callable[..., Any]:
    """Connect a diffusers model once it is built, before diffusers loads its weights."""

    @functools.wraps(from_config)
    def connecting_from_config(cls: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(config, dict) or not config.get("crosslayer"):
            return from_config(cls, config, *args, **kwargs)
        host_config = {k: v for k, v in config.items() if not k.startswith("crosslayer")}
        built = from_config(cls, host_config, *args, **kwargs)
        model = built[0] if isinstance(built, tuple) else built
        rebuild_connections(model, config)
        return built

    return connecting_from_config
