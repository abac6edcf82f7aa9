"""Training seen from run folders: curves, spikes, what a loss costs, and scaling laws.

Papers: Hyper-Connections (arXiv 2409.19606, Figures 1, 5, 9-11, 15-18), DenseFormer (arXiv
2402.02622, Figures 3, 4), MUDDFormer (arXiv 2502.12170, Figures 1, 3 and 4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from ..files import parse_json

METRICS_FILE = "metrics.jsonl"
# A step is a spike where its loss is above the running mean by this many running deviations.
SPIKE_DEVIATIONS = 5.0


@dataclass
class TrainingCurve:
    """What a run logged.

    Attributes:
        steps: at which a training loss was logged.
        losses: of training at these steps, nats a token.
        tokens_per_second: at these steps.
        valid: (step, loss) of each validation set, by its name.
    """

    steps: list[int]
    losses: list[float]
    tokens_per_second: list[float]
    valid: dict[str, list[tuple[int, float]]]


@dataclass
class PowerLaw:
    """L = a · x^(−b), fitted to log L by least squares.

    Attributes:
        a: the factor.
        b: the exponent.
        error: standard deviation of the residuals of log L; 0 for two points.
    """

    a: float
    b: float
    error: float

    def predict(self, x: float) -> float:
        """The loss at a size or an amount of compute x."""
        return self.a * x**-self.b


@dataclass
class ComputeMultiplier:
    """How many times as much compute the baseline needs for the same loss.

    Attributes:
        value: the geometric mean over the points.
        low, high: its 95 % interval from the points and from the fit's residuals.
    """

    value: float
    low: float
    high: float


def read_training_curve(folder: Path) -> TrainingCurve:
    """The curve of a run's metrics.jsonl. A torn last line, of a run that was killed, is left out.

    Raises:
        ValueError: the folder has no metrics, or a line is damaged.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected the folder of a run")
    curve = TrainingCurve([], [], [], {})
    lines = path.read_text("utf8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        row = parse_json(line, f"{path}: line {number}", dict)
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{path}: line {number}: has no step")
        if isinstance(row.get("loss"), int | float):
            curve.steps.append(row["step"])
            curve.losses.append(row["loss"])
            curve.tokens_per_second.append(row.get("tokens_per_second", math.nan))
        for key, value in row.items():
            if key.endswith(" loss") and isinstance(value, int | float):
                curve.valid.setdefault(key.removesuffix(" loss"), []).append((row["step"], value))
    return curve


def smooth_losses(losses: Sequence[float], decay: float = 0.99) -> list[float]:
    """The running mean Σ decay^(t−s) L_s / Σ decay^(t−s) of a curve.

    0.99 in Hyper-Connections' figures of language models, 0.999 in those of ViT.
    """
    smoothed = []
    total = weight = 0.0
    for loss in losses:
        total = decay * total + loss
        weight = decay * weight + 1
        smoothed.append(total / weight)
    return smoothed


def find_spikes(losses: Sequence[float], decay: float = 0.9, burn_in: int = 50) -> list[int]:
    """The places of losses far above the running mean (`SPIKE_DEVIATIONS`), after `burn_in` ones.

    Consecutive places are one spike, whose first place is returned.
    """
    mean, variance = losses[0], 0.0
    spikes: list[int] = []
    above_before = False
    for place, loss in enumerate(losses):
        shift = loss - mean
        is_above = place >= burn_in and shift > SPIKE_DEVIATIONS * math.sqrt(variance)
        if is_above and not above_before:
            spikes.append(place)
        above_before = is_above
        if not is_above:  # a spike does not move the mean that it is measured from
            mean += (1 - decay) * shift
            variance = decay * (variance + (1 - decay) * shift * shift)
    return spikes


def cost_to_loss(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost (steps, tokens or seconds) at which a curve first reaches a loss.

    Between two points the curve is a line. None where it does not reach the loss.
    """
    for place, loss in enumerate(losses):
        if loss > target:
            continue
        if place == 0:
            return costs[0]
        before = losses[place - 1]
        share = (before - target) / (before - loss)
        return costs[place - 1] + share * (costs[place] - costs[place - 1])
    return None


def loss_at_cost(costs: Sequence[float], losses: Sequence[float], cost: float) -> float | None:
    """The loss of a curve at a cost, by linear interpolation; None outside the curve."""
    if not costs or not costs[0] <= cost <= costs[-1]:
        return None
    return float(numpy.interp(cost, costs, losses))


def speedup_to_loss(
    costs: Sequence[float],
    losses: Sequence[float],
    baseline_costs: Sequence[float],
    baseline_losses: Sequence[float],
) -> float | None:
    """The baseline's final cost over the cost at which a run reaches its final loss.

    The "1.8 × faster" of Hyper-Connections, Figure 1. None where the run does not reach it.
    """
    cost = cost_to_loss(costs, losses, baseline_losses[-1])
    return None if cost is None else baseline_costs[-1] / cost


def fit_power_law(sizes: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """The power law through losses of models of several sizes (MUDD, Figure 3).

    Raises:
        ValueError: fewer than two different sizes, or a number is not positive.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(losses):
        raise ValueError(f"expected losses of at least two sizes, got sizes {list(sizes)}")
    if min(*sizes, *losses) <= 0:
        raise ValueError("sizes and losses must be positive")
    x, y = numpy.log(sizes), numpy.log(losses)
    slope, intercept = numpy.polyfit(x, y, 1)
    freedom = len(x) - 2
    residuals = y - (slope * x + intercept)
    error = math.sqrt(float(residuals @ residuals) / freedom) if freedom else 0.0
    return PowerLaw(math.exp(intercept), -float(slope), error)


def estimate_multiplier(
    baseline: PowerLaw, sizes: Sequence[float], losses: Sequence[float]
) -> ComputeMultiplier:
    """The compute multiplier of a method over a baseline's law ("1.89 ×", MUDD, section 3.1).

    Args:
        baseline: fitted over compute or size.
        sizes: the method's.
        losses: the method's.
    """
    logs = []
    for size, loss in zip(sizes, losses, strict=True):
        equal_size = (baseline.a / loss) ** (1 / baseline.b)
        logs.append(math.log(equal_size / size))
    mean = sum(logs) / len(logs)
    spread = sum((value - mean) ** 2 for value in logs) / max(len(logs) - 1, 1)
    from_fit = (baseline.error / baseline.b) ** 2
    deviation = math.sqrt((spread + from_fit) / len(logs))
    return ComputeMultiplier(
        math.exp(mean), math.exp(mean - 1.96 * deviation), math.exp(mean + 1.96 * deviation)
    )
