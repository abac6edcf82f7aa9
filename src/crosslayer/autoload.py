"""Teach transformers to read our key in config.json, without importing transformers before anyone else does.

A saved connected model is its host's checkpoint with `"crosslayer": "mudd"` in config.json. When transformers builds a
model from such a config, the connections must be there before the weights are loaded: so `PreTrainedModel.post_init`,
which every model calls at the end of its `__init__`, connects it.
"""

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "transformers.modeling_utils"
BODY = ("crosslayer_rope", "crosslayer_qk_norm")  # what published checkpoints' bodies have, see `convert.body`


def patch(modeling_utils: ModuleType) -> None:
    post_init = modeling_utils.PreTrainedModel.post_init

    @functools.wraps(post_init)
    def connecting_post_init(self: Any) -> None:
        arm = getattr(self.config, "crosslayer", None)
        # the innermost model, which owns the layers, is built first; the models around it find it connected
        if arm is not None and self.base_model is self:
            from .hf import connect

            connect(self, arm)
        if self.base_model is self and any(getattr(self.config, key, None) for key in BODY):
            from .convert.body import adapt

            adapt(self)
        post_init(self)

    modeling_utils.PreTrainedModel.post_init = connecting_post_init


class Watcher(MetaPathFinder):
    """Patches the module right after its import, once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def watch() -> None:
    if MODULE in sys.modules:
        patch(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, Watcher())
