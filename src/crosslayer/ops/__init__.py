"""The few tensor functions all methods are made of. The torch reference here is the definition of each."""

from .attend import attend, attend_ahead, attend_merge, scores
from .dispatch import runs
from .gate import gate, gate_pool
from .mix import mix
from .norm import Following, add, add_norm, follow, rms, rstd
from .products import mixtures, project, wide
from .sinkhorn import sinkhorn
from .streams import carry, deposit, probe, repeat

__all__ = [
    "Following", "add", "add_norm", "attend", "attend_ahead", "attend_merge", "carry", "deposit", "follow", "gate",
    "gate_pool", "mix", "mixtures", "probe", "project", "repeat", "rms", "rstd", "runs", "scores", "sinkhorn", "wide",
]  # fmt: skip
