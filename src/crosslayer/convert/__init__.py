"""Published checkpoints and other libraries' parameters, converted in both directions.

`load_published` and `save_published` convert whole checkpoints of MUDDFormer and MUDDPythia.
Connections alone have one module for each library: `denseformer` and `hyper_connections` (the
packages of those names), `mhc_lite` (the repository of that name, mHC and mHC-lite), `deepseek`
(V4's and V4.1's `hc_*`) and `kimi` (K3's attention residuals).
Each has `load_connections`, which returns `ConnectionParameters`, and `save_connections`, its
inverse. `open_model` opens a model whatever its layout.
"""

from .pretrained import open_model, open_tokenizer
from .published import load_published, save_published
from .rows import ConnectionParameters, fill_connections, read_connections

__all__ = [
    "ConnectionParameters",
    "fill_connections",
    "load_published",
    "open_model",
    "open_tokenizer",
    "read_connections",
    "save_published",
]
