"""The few tensor functions all methods are made of. The torch reference here is the definition of each."""

from .attend import attend, attend_ahead, attend_merge, scores
from .dispatch import runs
from .gate import gate, gate_pool
from .mix import mix
from .norm import Following, add, add_norm, follow, project, rms, rstd, wide
from .sinkhorn import sinkhorn
from .streams import carry, deposit, probe, repeat, streams

__all__ = [
    "Following", "add", "add_norm", "attend", "attend_ahead", "attend_merge", "carry", "deposit", "follow", "gate",
    "gate_pool", "mix", "probe", "project", "repeat", "rms", "rstd", "runs", "scores", "sinkhorn", "streams", "wide",
]  # fmt: skip
