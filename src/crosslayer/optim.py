"""How an optimizer should treat a model with connections."""

from typing import Any

import torch
from torch import Tensor, nn

from .connection import Connection


def param_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of `model` for any torch optimizer, each `{name, params, lr, weight_decay, muon}`.

    The body's matrices take weight decay, its vectors none. Of a connection, what the class names in `decayed` (what
    depends on the input) takes it and the static rest does not, and a class's `lr_factors` multiply the learning rate.
    `muon` marks the 2-d matrices of the body's layers: no embedding, no output head, and nothing of a connection, whose
    tables are 2-d without being maps between activations. Frozen parameters are left out.

    Args:
        model: any module; its connections are found.
        lr: the model's learning rate.
        weight_decay: of what takes it.
    """
    groups: dict[tuple[str, float, float, bool], list[nn.Parameter]] = {}
    own = {
        id(p)
        for m in model.modules()
        if isinstance(m, Connection)
        for p in m.parameters(recurse=False)
    }
    maps = {id(p) for p in layer_matrices(model)}
    seen: set[int] = set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in seen or not p.requires_grad:
                continue
            seen.add(id(p))
            if id(p) in own and isinstance(module, Connection):
                decays, factor = (
                    name in module.weight_decay_params,
                    module.lr_factors.get(name, 1.0),
                )
                kind, muon = "connection " + ("dynamic" if decays else "static"), False
            else:
                decays, factor, muon = p.dim() >= 2, 1.0, id(p) in maps
                kind = "matrices" if muon else "embeddings" if decays else "vectors"
            groups.setdefault((kind, lr * factor, weight_decay * decays, muon), []).append(p)
    return [
        {"name": kind, "params": params, "lr": rate, "weight_decay": decay, "muon": muon}
        for (kind, rate, decay, muon), params in groups.items()
    ]


def layer_matrices(model: nn.Module) -> list[Tensor]:
    """The 2-d weights in a model's lists of layers, but for embeddings there (DiT's blocks have one of the classes)."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    inside = [m for layers in lists for m in layers.modules() if not isinstance(m, nn.Embedding)]
    return [p for m in inside for p in m.parameters(recurse=False) if p.dim() == 2]


def zero_connection_updates(optimizer: torch.optim.Optimizer) -> None:
    """Keep connections as they are in this step, to start them later than the model (DenseFormer, Table 5).

    For an optimizer made of `param_groups`; call it between the backward pass and clipping. Gradient and rate are zero,
    which moves nothing, rather than switched off, which FSDP, DDP and compile would have to learn of; so neither
    clipping nor the optimizer's moments see them, and what decays waits too. The schedule is to set the rate anew.
    """
    for group in optimizer.param_groups:
        if group["name"].startswith("connection"):
            group["lr"] = 0.0
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()
