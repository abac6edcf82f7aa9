"""The tensor functions that the methods share. The torch reference here is the definition of each."""

from .attend import attend_ahead, attend_merge, depth_attention, depth_scores
from .dispatch import use_kernels, uses_kernel
from .gate import gate_pool, gate_streams
from .mix import depth_mix
from .norm import add_norm
from .products import mix_streams, project_tall
from .sinkhorn import sinkhorn
from .streams import depth_connection, expand_to_streams, width_connection, write_norm_project

__all__ = [
    "add_norm",
    "attend_ahead",
    "attend_merge",
    "depth_attention",
    "depth_connection",
    "depth_mix",
    "depth_scores",
    "expand_to_streams",
    "gate_pool",
    "gate_streams",
    "mix_streams",
    "project_tall",
    "sinkhorn",
    "use_kernels",
    "uses_kernel",
    "width_connection",
    "write_norm_project",
]
