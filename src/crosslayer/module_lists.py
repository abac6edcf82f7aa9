"""Modules within a module, and lists of layers."""

from typing import Any

from torch import nn


def has_children(module: nn.Module) -> bool:
    """Whether a module contains others."""
    return any(True for _ in module.children())


def has_numbered_layers(modules: nn.ModuleDict) -> bool:
    """Whether the keys are the numbers of layers, as in torchtitan."""
    return len(modules) > 0 and all(key.isdecimal() for key in modules)


def list_layers(layers: Any) -> list[Any]:
    """The members of an `nn.ModuleList`, of an `nn.Sequential`, or of an `nn.ModuleDict` with the
    layers' numbers as keys, as torchtitan has it.
    """
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)
