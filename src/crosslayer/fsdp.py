"""Parameters that FSDP2 has sharded: gathered where they are needed outside of a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that were given to `fully_shard`."""
    # known by their method, because torch's FSDPModule takes a while to import
    return [module for module in model.modules() if hasattr(module, "unshard")]


@contextmanager
def unsharded_modules(modules: Sequence[Any]) -> Iterator[None]:
    """Gather the parameters of sharded modules, and shard them again."""
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
