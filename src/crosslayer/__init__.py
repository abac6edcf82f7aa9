"""Residual connections for Transformers, behind one interface: see `crosslayer.connection`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .connection import Connection
from .kernel_switch import use_kernels
from .methods import available, register_connection
from .optim import param_groups
from .sites import Site, plan
from .spec import ConnectionSpec, make
from .stack import Stack

if TYPE_CHECKING:
    from .hf.connect import connect
    from .hf.disconnect import disconnect
    from .hf.loading import from_pretrained

__version__ = "0.2.0.dev0"
__all__ = [
    "Connection",
    "ConnectionSpec",
    "Site",
    "Stack",
    "__version__",
    "available",
    "connect",
    "disconnect",
    "from_pretrained",
    "make",
    "param_groups",
    "plan",
    "register_connection",
    "use_kernels",
]

_SUBPACKAGES = ("convert", "cost", "data", "evaluate", "hf", "inspect", "train")

use_kernels(None)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in _SUBPACKAGES if name in globals())])


def __getattr__(name: str) -> Any:
    # `import crosslayer` imports torch alone; transformers follows when one of these is used.
    if name in {"connect", "disconnect", "from_pretrained"}:
        from . import hf

        return getattr(hf, name)
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'crosslayer' has no attribute {name!r}")
