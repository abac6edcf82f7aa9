"""The search of an arm's learning rate: a grid of factors, extended at its edges.

A connection may train best at another rate than its baseline. Each arm's rates are tried at 1/2, 1
and 2 times those of the recipe. While the best factor is at an edge of those tried, the next one
beyond it is tried.
"""

import dataclasses
import math

from .recipe import Arm
from .settings import Optimization

FIRST_FACTORS = (0.5, 1.0, 2.0)
# All that a search may try.
FACTORS = tuple(2.0**power for power in range(-5, 6))
RATES = ("lr", "muon_lr")


def scale_rates(arm: Arm, optimization: Optimization, factor: float) -> Arm:
    """An arm with its learning rates times a factor, and a name that says so.

    Args:
        arm: of a recipe.
        optimization: of this arm.
        factor: the arm itself is at 1.
    """
    if factor == 1:
        return arm
    rates = {"lr": optimization.lr * factor}
    if optimization.optimizer == "muon":
        rates["muon_lr"] = optimization.muon_lr * factor
    name = scaled_name(arm.name, factor)
    return dataclasses.replace(arm, name=name, options={**arm.options, **rates})


def scaled_name(name: str, factor: float) -> str:
    """The name of an arm whose learning rates are multiplied by a factor."""
    return name if factor == 1 else f"{name} at {factor:g} × lr"


def next_factor(losses: dict[float, float]) -> float | None:
    """The factor to try next, or None where the best one is between two others.

    Args:
        losses: of the factors that were tried; infinite where training diverged.
    """
    for factor in FIRST_FACTORS:
        if factor not in losses:
            return factor
    best = best_factor(losses)
    for beyond in (best / 2, best * 2):
        if beyond not in losses and beyond in FACTORS and math.isfinite(losses[best]):
            return beyond
    return None


def best_factor(losses: dict[float, float]) -> float:
    """The factor with the lowest loss; 1 where none was tried."""
    return min(losses, key=losses.__getitem__, default=1.0)
