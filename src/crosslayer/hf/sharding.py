"""What transformers is told of the connections' own parameters: they are float32, and FSDP2 shards
them on their own.

FSDP2 needs one dtype in each of its groups. In a half-precision model a connection's own parameters
are float32, and the norms that it owns have the dtype of the host.
"""

import re
from typing import Any

from ..connection import Connection
from .host_norms import OwnedNorm
from .layers import ConnectedLayer

_FREES_WEIGHTS = "free_full_weight"  # after use, in the terms of transformers' plans


def keep_parameters_apart(model: Any) -> None:
    """Name the connections in a transformers model's plan for FSDP2 and in its list of float32
    parameters. A second call changes nothing.
    """
    if not hasattr(model, "_keep_in_fp32_modules_strict"):
        return
    plan, float32_names = _own_entries(model)
    model._keep_in_fp32_modules_strict = float32_names | set(
        model._keep_in_fp32_modules_strict or ()
    )
    if getattr(model, "_fsdp_plan", None):
        model._fsdp_plan = {**model._fsdp_plan, **plan}


def forget_parameters_apart(model: Any) -> None:
    """Undo `keep_parameters_apart`, while the connections are still there."""
    if not hasattr(model, "_keep_in_fp32_modules_strict"):
        return
    plan, float32_names = _own_entries(model)
    model._keep_in_fp32_modules_strict = (
        set(model._keep_in_fp32_modules_strict or ()) - float32_names
    )
    if getattr(model, "_fsdp_plan", None):
        model._fsdp_plan = {k: v for k, v in model._fsdp_plan.items() if k not in plan}


def _own_entries(model: Any) -> tuple[dict[str, str], set[str]]:
    """What the plan for FSDP2 and the list of float32 parameters get for the connections."""
    plan: dict[str, str] = {}
    float32_names: set[str] = set()
    for path, module in model.named_modules():
        # The next layer reads through the last norm of a post-norm layer.
        if isinstance(module, ConnectedLayer) and module.wiring.last_norm:
            plan[_without_numbers(f"{path}.{module.wiring.last_norm}")] = _FREES_WEIGHTS
        if isinstance(module, OwnedNorm):
            plan[_without_numbers(path)] = _FREES_WEIGHTS
        if not isinstance(module, Connection):
            continue
        for name, _ in module.named_parameters(recurse=False):
            plan[_without_numbers(path)] = _FREES_WEIGHTS
            # without the layer's number, like "connections.0.W1"
            float32_names.add(re.sub(r".*\b(?=connections?\b)", "", f"{path}.{name}"))
    return plan, float32_names


def _without_numbers(path: str) -> str:
    return re.sub(r"\.\d+\b", ".*", path)
