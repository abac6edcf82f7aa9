"""What a connection costs before it is trained: parameters, FLOPs, memory traffic and activation
memory.

    from crosslayer.cost import GPUS, estimate_cost
    from crosslayer.hf.config import make_config

    config = make_config("llama", layers=24, dim=2048, heads=16)
    cost = estimate_cost("mudd", config, batch=8, context=2048)
    cost.bandwidth_bound_seconds(GPUS["H100"])

`estimate.py` counts on the meta device, FLOPs by the formulas of `flops.py`. `memory.py` simulates
the peak of activation memory there.
"""

from .estimate import (
    GPU,
    GPUS,
    Cost,
    ModelCost,
    activation_bytes,
    build_on_meta,
    count_parameters,
    estimate_cost,
    estimate_costs,
    measure_cost,
)
from .flops import flop_counter
from .memory import PeakMemory, estimate_peak_memory, measure_peak_memory

__all__ = [
    "GPU",
    "GPUS",
    "Cost",
    "ModelCost",
    "PeakMemory",
    "activation_bytes",
    "build_on_meta",
    "count_parameters",
    "estimate_cost",
    "estimate_costs",
    "estimate_peak_memory",
    "flop_counter",
    "measure_cost",
    "measure_peak_memory",
]
