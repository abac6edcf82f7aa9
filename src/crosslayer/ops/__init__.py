"""The tensor functions that the methods share. Their torch references here are the definition."""

from .attention import depth_attention, depth_scores
from .gate import gate_pool, gate_streams
from .hyper import CoefficientMap, dynamic_coefficients, hyper_connection
from .mix import depth_mix
from .norm import add_norm
from .products import mix_streams, project_tall
from .project import write_norm_project
from .single_pass import single_pass_connection
from .sinkhorn import sinkhorn
from .streams import collapse_streams, depth_connection, expand_to_streams, width_connection

__all__ = [
    "CoefficientMap",
    "add_norm",
    "collapse_streams",
    "depth_attention",
    "depth_connection",
    "depth_mix",
    "depth_scores",
    "dynamic_coefficients",
    "expand_to_streams",
    "gate_pool",
    "gate_streams",
    "hyper_connection",
    "mix_streams",
    "project_tall",
    "single_pass_connection",
    "sinkhorn",
    "width_connection",
    "write_norm_project",
]
