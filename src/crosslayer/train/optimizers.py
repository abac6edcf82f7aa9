"""A run's optimizers and its learning rates, which depend on the step's number alone."""

import math

import torch
from torch import nn

from ..optim import param_groups
from .settings import OptimizationSettings
from .weight_averages import track_averages


def build_optimizers(
    model: nn.Module, settings: OptimizationSettings
) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the 2-d matrices of the layers and, last in the list, AdamW for all other
    parameters.
    """
    groups = param_groups(
        model,
        settings.lr,
        settings.weight_decay,
        settings.connection_lr_scale,
        settings.embedding_lr_scale,
    )
    if settings.optimizer == "muon":
        muon_groups = [{**group, "lr": settings.muon_lr} for group in groups if group["muon"]]
        adamw_groups = [group for group in groups if not group["muon"]]
    else:
        muon_groups = []
        adamw_groups = groups

    optimizers: list[torch.optim.Optimizer] = []
    if muon_groups:
        optimizers.append(
            torch.optim.Muon(
                muon_groups, settings.muon_lr, settings.weight_decay, settings.momentum
            )
        )
    optimizers.append(
        torch.optim.AdamW(adamw_groups, settings.lr, settings.betas, settings.eps, fused=True)
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        if settings.ema is not None:
            track_averages(optimizer, settings.ema)
    return optimizers


def warmup_steps(settings: OptimizationSettings) -> float:
    """The steps of the warm-up, at least 1."""
    if settings.warmup >= 1:
        return settings.warmup
    # 100 · 0.29 is a little less than 29 in floating point.
    return max(1, int(settings.steps * settings.warmup + 1e-9))


def lr_schedule(step: int, settings: OptimizationSettings) -> float:
    """Learning rate of a step (from 0) as a share of its peak: linear warm-up, constant where
    `decay_ratio` says so, then down to `floor`.
    """
    warmup = warmup_steps(settings)
    if step < warmup:
        return (step + 1) / warmup
    decay_start = warmup
    if settings.decay_ratio is not None:
        decay_start = max(warmup, round(settings.steps * (1 - settings.decay_ratio)))
    progress = max(0, step - decay_start) / max(1, settings.steps - decay_start)
    if settings.decay == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        share = 1 - progress
    return settings.floor + (1 - settings.floor) * share


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], step: int, settings: OptimizationSettings
) -> None:
    """Set the learning rate of every group for a step (from 0)."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * lr_schedule(step, settings)
