"""Teach transformers and diffusers to read our key in config.json, without importing them before anyone else does.

A saved connected model is its host's checkpoint with `"crosslayer": "mudd"` in config.json. When a model is built from
such a config, the connections must be there before the weights are loaded: so `PreTrainedModel.post_init`, which every
model calls at the end of its `__init__`, connects it, and so does diffusers' `from_config`.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def rebuild(body: Any, config: Any) -> None:
    from ..spec import make
    from .connect import attach_connections, find_backbone

    attach_connections(
        *find_backbone(body), make(config["crosslayer"]), config.get("crosslayer_widths")
    )
    if any(
        config.get(key) for key in ("crosslayer_rope", "crosslayer_qk_norm")
    ):  # of published checkpoints' bodies
        from .host_quirks import apply_host_quirks

        apply_host_quirks(body)


def connect_after_init(modeling_utils: ModuleType) -> None:
    post_init = modeling_utils.PreTrainedModel.post_init

    @functools.wraps(post_init)
    def connecting_post_init(self: Any) -> None:
        # the innermost model, which owns the layers, is built first; the models around it find it connected
        if getattr(self.config, "crosslayer", None) and self.base_model is self:
            rebuild(self, vars(self.config))
        post_init(self)

    modeling_utils.PreTrainedModel.post_init = connecting_post_init


def mark_saved_configs(configuration_utils: ModuleType) -> None:
    cls = configuration_utils.PreTrainedConfig
    write, read = cls.to_json_file, cls.get_config_dict.__func__

    @functools.wraps(write)
    def marking_write(self: Any, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        write(self, json_file_path, *args, **kwargs)
        # a part of a model, like the language model of another, has a config of its own within the whole's
        if any(getattr(config, "crosslayer", None) for config in (self, *vars(self).values())):
            from .checkpoint import mark_config

            mark_config(Path(json_file_path))

    @functools.wraps(read)
    def unmarking_read(owner: Any, *args: Any, **kwargs: Any) -> Any:
        from .checkpoint import unmark_config

        config, rest = read(owner, *args, **kwargs)
        return unmark_config(config), rest

    cls.to_json_file, cls.get_config_dict = marking_write, classmethod(unmarking_read)


def connect_after_config(configuration_utils: ModuleType) -> None:
    cls = configuration_utils.ConfigMixin
    from_config = cls.from_config.__func__

    @functools.wraps(from_config)
    def connecting_from_config(owner: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(config, dict) or not config.get("crosslayer"):
            return from_config(owner, config, *args, **kwargs)
        host = {key: value for key, value in config.items() if not key.startswith("crosslayer")}
        built = from_config(owner, host, *args, **kwargs)
        rebuild(built[0] if isinstance(built, tuple) else built, config)
        return built

    cls.from_config = classmethod(connecting_from_config)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.configuration_utils": mark_saved_configs,
    "transformers.modeling_utils": connect_after_init,
    "diffusers.configuration_utils": connect_after_config,
}


class Watcher(MetaPathFinder):
    """Patches a module right after its import, once."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def watch() -> None:
    for name, patch in PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            sys.meta_path.insert(0, Watcher(name))
