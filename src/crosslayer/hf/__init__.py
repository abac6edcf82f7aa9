"""Another connection for a model of transformers or diffusers, leaving its classes, module paths and state-dict keys as
they are."""

from .attach import connect
from .saving import from_pretrained
from .undo import disconnect

__all__ = ["connect", "disconnect", "from_pretrained"]
