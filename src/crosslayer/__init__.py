"""What connects the layers of a Transformer, as one library. See `crosslayer.connection` first."""

from typing import TYPE_CHECKING, Any

from . import autoload
from .connection import Connection, Site, plan
from .optim import param_groups
from .registry import available, make

if TYPE_CHECKING:
    from .hf import connect, disconnect, from_pretrained

__version__ = "0.1.0"
__all__ = [
    "Connection",
    "Site",
    "__version__",
    "available",
    "connect",
    "disconnect",
    "from_pretrained",
    "make",
    "param_groups",
    "plan",
]

autoload.watch()


def __getattr__(name: str) -> Any:
    # importing crosslayer imports torch alone; transformers waits until it is asked for
    if name in {"connect", "disconnect", "from_pretrained"}:
        from . import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'crosslayer' has no attribute {name!r}")
