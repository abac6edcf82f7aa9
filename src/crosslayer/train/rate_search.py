"""The search of an arm's learning rate, on a grid of powers of two.

A connection may train best at another rate than its baseline. Each arm's rates are tried at those
of the recipe first, then at twice and at half the best ones so far. The search ends when both
neighbours of the best rates have been tried, so after three trials or more; or at the limit of
what is tried, 32 times the recipe's rates or a 32nd of them.
"""

import dataclasses
import math

from .recipe import Arm
from .settings import OptimizationSettings

# All that a search may try.
RATE_FACTORS = tuple(2.0**power for power in range(-5, 6))


def scale_rates(arm: Arm, optimization: OptimizationSettings, factor: float) -> Arm:
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


def names_at_rates(name: str) -> dict[str, float]:
    """All names that a search may give an arm, its own among them, with their factors."""
    return {scaled_name(name, factor): factor for factor in RATE_FACTORS}


def next_factor(losses: dict[float, float]) -> float | None:
    """The factor to try next, or None where both neighbours of the best one have been tried.

    Args:
        losses: of the factors that were tried; infinite where training diverged.
    """
    if not losses:
        return 1.0
    best = best_factor(losses)
    # a rate that has diverged does so at twice its value too
    neighbours = (best * 2, best / 2) if math.isfinite(losses[best]) else (min(losses) / 2,)
    for neighbour in neighbours:
        if neighbour in RATE_FACTORS and neighbour not in losses:
            return neighbour
    return None


def is_limit(factor: float) -> bool:
    """Whether a factor is at an end of the grid, so that a search stops though it may not be best.

    Args:
        factor: the best one of a search.
    """
    return factor in (RATE_FACTORS[0], RATE_FACTORS[-1])


def best_factor(losses: dict[float, float]) -> float:
    """The factor with the lowest loss; 1 where none was tried."""
    return min(losses, key=losses.__getitem__, default=1.0)
