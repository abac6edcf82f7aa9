"""Connections for models of transformers and diffusers, which keep their classes, module paths and
state-dict keys.

Words of this package: the host is the model that is connected, and its backbone the module that
owns the layers. The wiring of a layer says how its attention, MLP and norms are joined to the
residual stream. A row is the wiring of a family, written down in `families`. A shadow is a module
that runs its class's `forward` with stand-ins for the modules that it calls (see `shadow`).

Importing this package registers connected models with transformers (see `registration`).
"""

from .connect import connect
from .disconnect import disconnect
from .loading import from_pretrained
from .registration import SavedConfig, register_with_transformers
from .reset import reset_connections

__all__ = ["SavedConfig", "connect", "disconnect", "from_pretrained", "reset_connections"]

register_with_transformers()
