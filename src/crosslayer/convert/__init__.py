"""Published checkpoints and other libraries' parameters, to ours and back.

`load` and `save` take whole checkpoints of MUDDFormer and MUDDPythia. Of connections alone, one module a library:
`denseformer` and `hyper_connections` (the packages of those names), `deepseek` (V4's and V4.1's `hc_*`) and `kimi`
(K3's attention residuals), each with a `load` that gives `Connections` and a `save` that takes them.
"""

from .published import load_published, open_model, save_published
from .rows import Connections, fill, own_states

__all__ = ["Connections", "fill", "load_published", "open_model", "own_states", "save_published"]
