"""What `save_pretrained` refuses: models that would be loaded from their folder as another model.

A config names the connection of its model. transformers builds a model with its parts, such as an
encoder. Each part that is a headless model is connected if its config names a connection
(`registration.py`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..sites import plan_layers
from ..spec import make
from .attach import is_connected, ports_of_sites


def refuse_what_cannot_be_loaded(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `save` so that it raises a ValueError for a model that its folder could not express."""

    @functools.wraps(save)
    def refusing_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_hf_peft_config_loaded", False):  # Else the adapter alone is saved.
            _check_configs(self)
            for path, module in self.named_modules():
                if is_connected(module):
                    _check_layers(path, module)
        return save(self, *args, **kwargs)

    return refusing_save


def _check_configs(model: Any) -> None:
    """Raise a ValueError unless the saved configs name the connections of all connected parts, and
    of no other part.
    """
    connected = {module: path for path, module in model.named_modules() if is_connected(module)}
    kept = set()
    remedy = "save its state_dict, and connect the same parts again before you load it"
    if not connected:
        remedy = (
            "the config is also a connected model's; build each model with its own, "
            "copy.deepcopy(config)"
        )
    for path, part in model.named_modules():
        if not _is_named(part, model.config):
            continue
        connected_within = {module for module in part.modules() if module in connected}
        if not connected_within:
            raise ValueError(
                f"cannot save the model: {path or type(part).__name__} is not connected, but its "
                f"config names {part.config.crosslayer!r}, so a loaded model would differ; {remedy}"
            )
        others = [m for m in connected_within if m.connection_spec != part.config.crosslayer]
        if others:
            raise ValueError(
                f"cannot save the model: the config of {path or type(part).__name__} names "
                f"{part.config.crosslayer!r}, and {connected[others[0]] or 'it'} is connected with "
                f"{others[0].connection_spec!r}; give each its own config, or {remedy}"
            )
        kept |= connected_within
    for part, path in connected.items():
        if part not in kept:
            raise ValueError(
                "cannot save the model: no config that is saved with it names the connection of "
                f"{path or type(part).__name__}, {part.connection_spec!r}; connect the whole model "
                f"where connect takes it; else {remedy}"
            )


def _is_named(part: Any, saved: PreTrainedConfig) -> bool:
    """Whether a part is connected while a model is built from a saved config."""
    if not isinstance(part, PreTrainedModel) or part.base_model is not part:
        return False
    spec = getattr(part.config, "crosslayer", None)
    if spec is None:
        return False
    # Some hosts give a part a copy of what is saved.
    return any(
        type(config) is type(part.config) and getattr(config, "crosslayer", None) == spec
        for config in nested_configs(saved)
    )


def nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and those within it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def _check_layers(path: str, part: Any) -> None:
    """Raise a ValueError where layers were removed and the readout has weights for each of them."""
    built = len(part.wiring.of_layers)
    left = len(part.wiring.find_layers(part))
    if left < built and _readout_shapes(part, left) != _readout_shapes(part, built):
        raise ValueError(
            f"cannot save the model: {path or type(part).__name__} has {left} of the {built} "
            f"layers that it was connected with, and the readout of {part.connection_spec!r} has "
            "weights for all of them; remove layers before connect"
        )


def _readout_shapes(part: Any, layers: int) -> dict[str, torch.Size]:
    """The shapes of a readout's parameters after a number of layers."""
    *_, site = plan_layers([ports_of_sites(layer) for layer in part.wiring.of_layers[:layers]])
    with torch.device("meta"):
        readout = make(part.connection_spec)(site, part.wiring.dim, lambda port: nn.Identity())
    return {name: parameter.shape for name, parameter in readout.named_parameters()}
