"""Another connection for a model of transformers or diffusers, leaving its classes, module paths and state-dict keys as
they are."""

from . import autoload
from .checkpoint import from_pretrained
from .connect import connect
from .disconnect import disconnect

__all__ = ["connect", "disconnect", "from_pretrained"]

autoload.watch()
