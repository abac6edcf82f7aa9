"""The few tensor functions all methods are made of. The torch reference here is the definition of each."""

from .attend import attend, attend_ahead, attend_merge, scores
from .gate import gate, gate_pool
from .mix import mix
from .norm import add, add_layer_norm, add_norm, project, rms, rstd, wide
from .sinkhorn import sinkhorn
from .streams import carry, deposit, probe, repeat, streams

__all__ = [
    "add", "add_layer_norm", "add_norm", "attend", "attend_ahead", "attend_merge", "carry", "deposit", "gate",
    "gate_pool", "mix", "probe", "project", "repeat", "rms", "rstd", "scores", "sinkhorn", "streams", "wide",
]  # fmt: skip
