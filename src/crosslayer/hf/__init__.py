"""Connections for models of transformers and diffusers, which keep their classes, module paths and
state-dict keys.

Importing this package registers connected models with transformers (see `registration`).
"""

from .checkpoint import from_pretrained
from .connect import connect
from .disconnect import disconnect
from .registration import SavedConfig, register_with_transformers

__all__ = ["SavedConfig", "connect", "disconnect", "from_pretrained"]

register_with_transformers()
