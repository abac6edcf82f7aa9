"""The optimizers of a run, and the learning rate of each group at each step, a function of the step alone."""

import torch
from torch import nn

from ..optim import param_groups
from .settings import DECAYS, Optimization


def build_optimizers(model: nn.Module, settings: Optimization) -> list[torch.optim.Optimizer]:
    """AdamW, after Muon for the 2-d matrices of the body's layers where it is asked for."""
    groups = param_groups(model, settings.lr, settings.weight_decay)
    matrices = [group for group in groups if group["muon"] and settings.optimizer == "muon"]
    rest = [group for group in groups if group not in matrices]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        matrices = [{**group, "lr": settings.muon_lr} for group in matrices]
        found.append(
            torch.optim.Muon(matrices, settings.muon_lr, settings.weight_decay, settings.momentum)
        )
    found.append(torch.optim.AdamW(rest, settings.lr, settings.betas, settings.eps, fused=True))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def schedule(step: int, settings: Optimization) -> float:
    """Share of the peak learning rate: a linear warm-up, then down to `floor`."""
    warmup = (
        settings.warmup if settings.warmup >= 1 else max(1, int(settings.steps * settings.warmup))
    )
    if step < warmup:
        return (step + 1) / warmup
    left = DECAYS[settings.decay]((step - warmup) / max(1, settings.steps - warmup))
    return settings.floor + (1 - settings.floor) * left


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], step: int, settings: Optimization
) -> None:
    """Learning rates of a step, from 0."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(step, settings)
