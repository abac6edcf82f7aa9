"""Training seen from run folders: curves, spikes, what a loss costs, and scaling laws.

Papers: Hyper-Connections (arXiv 2409.19606, Figures 1, 5, 9-11, 15-18), DenseFormer (arXiv
2402.02622, Figures 3, 4), MUDDFormer (arXiv 2502.12170, Figures 1, 3 and 4).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy

from ..files import parse_json
from ..intervals import MeanEstimate, mean_interval
from ..run_folders import METRICS_FILE

# A step is a spike where its loss is above the running mean by this many running deviations.
SPIKE_DEVIATIONS = 5.0
SPIKE_DECAY = 0.9  # of the running mean and variance, a loss
SPIKE_BURN_IN = 50  # the first losses, which fall steeply

CurvePoints = list[tuple[int, float]]  # (step, value)


@dataclass
class TrainingCurve:
    """What a run logged.

    Attributes:
        steps: at which a training loss was logged.
        losses: of training at these steps, nats a token. Those of skipped batches may be infinite
            or NaN.
        seconds: of training up to these steps, without evaluation. NaN where it was not logged.
        valid: (step, loss) of each validation set, by its name.
        accuracies: (step, accuracy) of each validation set that has one, by its name.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    valid: dict[str, CurvePoints] = field(default_factory=dict)
    accuracies: dict[str, CurvePoints] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The last step at which a loss was logged; 0 where none was."""
        valid_steps = [points[-1][0] for points in self.valid.values()]
        return max([0, *self.steps[-1:], *valid_steps])


@dataclass
class PowerLaw:
    """L = a · x^(−b), fitted to log L by least squares.

    Attributes:
        a: the factor.
        b: the exponent.
        error: standard deviation of the residuals of log L; NaN for two points.
        log_sizes: the logarithms of the sizes that it was fitted to.
    """

    a: float
    b: float
    error: float
    log_sizes: list[float]

    def predict(self, x: float) -> float:
        """The loss at a size or an amount of compute x."""
        return self.a * x**-self.b

    def log_size_of(self, loss: float) -> tuple[float, float]:
        """The logarithm of the size at which the law has a loss, and its variance.

        The variance is that of the fit alone: (σ/b)² (1/n + (x − x̄)² / Σ (x_i − x̄)²).

        Raises:
            ValueError: the law's loss does not fall with size.
        """
        if self.b <= 0:
            raise ValueError(f"the baseline's loss does not fall with size (exponent {self.b:.3g})")
        place = (math.log(self.a) - math.log(loss)) / self.b
        mean = statistics.fmean(self.log_sizes)
        extent = sum((value - mean) ** 2 for value in self.log_sizes)
        leverage = 1 / len(self.log_sizes) + (place - mean) ** 2 / extent
        return place, (self.error / self.b) ** 2 * leverage


@dataclass
class ComputeMultiplier:
    """How many times as much compute the baseline needs for the same loss.

    Attributes:
        value: the geometric mean over the points.
        low, high: its 95 % interval; NaN where there are too few points for one.
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
    curve = TrainingCurve()
    lines = path.read_text("utf8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        row = parse_json(line, f"{path}: line {number}", dict)
        step = row.get("step")
        if not isinstance(step, int):
            raise ValueError(f"{path}: line {number}: has no step")
        if is_number(row.get("loss")):
            curve.steps.append(step)
            curve.losses.append(row["loss"])
            seconds = row.get("seconds")
            curve.seconds.append(seconds if is_number(seconds) else math.nan)
        for key, value in row.items():
            name, _, kind = key.rpartition(" ")
            if name and is_number(value) and kind in ("loss", "accuracy"):
                points = curve.valid if kind == "loss" else curve.accuracies
                points.setdefault(name, []).append((step, value))
    steps_of_kinds = [curve.steps]
    steps_of_kinds += [[step for step, _ in points] for points in curve.valid.values()]
    for steps in steps_of_kinds:
        for before, step in itertools.pairwise(steps):
            if step <= before:
                raise ValueError(f"{path}: step {step} comes after step {before} (damaged?)")
    return curve


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a file is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def smooth_losses(
    losses: Sequence[float],
    decay: float = 0.99,
    steps: Sequence[int] | None = None,
    interval: float = 1,
) -> list[float]:
    """The running mean Σ decay^(t−s) L_s / Σ decay^(t−s) of a curve, over its finite losses.

    0.99 in Hyper-Connections' figures of language models, 0.999 in those of ViT.

    Args:
        losses: of the curve.
        decay: from one loss to the next, or over `interval` steps.
        steps: of the losses, so that curves with different intervals are smoothed alike.
        interval: the steps over which the weight of a loss falls to `decay`.
    """
    smoothed = []
    total = weight = 0.0
    for place, loss in enumerate(losses):
        distance = 1.0
        if steps is not None and place:
            distance = (steps[place] - steps[place - 1]) / interval
        total *= decay**distance
        weight *= decay**distance
        if math.isfinite(loss):
            total += loss
            weight += 1
        smoothed.append(total / weight if weight else math.nan)
    return smoothed


def find_spikes(losses: Sequence[float]) -> list[int]:
    """The places of losses far above the running mean, after the first `SPIKE_BURN_IN`.

    A loss that is not finite is a spike anywhere. Consecutive places are one spike, whose first
    place is returned.
    """
    mean = next(filter(math.isfinite, losses), math.nan)
    variance = 0.0
    spikes: list[int] = []
    above_before = False
    for place, loss in enumerate(losses):
        shift = loss - mean
        is_above = place >= SPIKE_BURN_IN and shift > SPIKE_DEVIATIONS * math.sqrt(variance)
        is_above = is_above or not math.isfinite(loss)
        if is_above and not above_before:
            spikes.append(place)
        above_before = is_above
        if not is_above:  # a spike does not move the mean that it is measured from
            mean += (1 - SPIKE_DECAY) * shift
            variance = SPIKE_DECAY * (variance + (1 - SPIKE_DECAY) * shift * shift)
    return spikes


def cost_to_loss(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost (steps, tokens or seconds) at which a curve first reaches a loss.

    Between two points the curve is a line. Losses that are not finite are left out. None where the
    curve does not reach the loss.
    """
    points = [point for point in zip(costs, losses, strict=True) if math.isfinite(point[1])]
    for place, (cost, loss) in enumerate(points):
        if loss > target:
            continue
        if place == 0:
            return cost
        cost_before, before = points[place - 1]
        share = (before - target) / (before - loss)
        return cost_before + share * (cost - cost_before)
    return None


def loss_at_cost(costs: Sequence[float], losses: Sequence[float], cost: float) -> float | None:
    """The loss of a curve at a cost, by linear interpolation; None outside the curve."""
    if not costs or not costs[0] <= cost <= costs[-1]:
        return None
    return float(numpy.interp(cost, costs, losses))


def fit_power_law(sizes: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """The power law through losses of models of several sizes (MUDD, Figure 3).

    Raises:
        ValueError: fewer than two different sizes, or a number is not positive.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(losses):
        raise ValueError(f"expected losses of at least two sizes, got sizes {list(sizes)}")
    if not all(value > 0 for value in (*sizes, *losses)):  # NaN is not
        raise ValueError("sizes and losses must be positive")
    x = numpy.log(sizes)
    y = numpy.log(losses)
    slope, intercept = numpy.polyfit(x, y, 1)
    freedom = len(x) - 2
    residuals = y - (slope * x + intercept)
    error = math.sqrt(float(residuals @ residuals) / freedom) if freedom else math.nan
    return PowerLaw(math.exp(intercept), -float(slope), error, x.tolist())


def estimate_multiplier(
    baseline: PowerLaw, sizes: Sequence[float], losses: Sequence[float]
) -> ComputeMultiplier:
    """The compute multiplier of a method over a baseline's law ("1.89 ×", MUDD, section 3.1).

    Its interval has two parts: how much the multiplier differs between the method's points, and
    how well the baseline's points determine the law. Each has its own interval by Student's t, for
    the small number of its points, and their half-widths are added in quadrature.

    Args:
        baseline: fitted over compute or size.
        sizes: the method's.
        losses: the method's.

    Raises:
        ValueError: there is no point, or the baseline's loss does not fall with size.
    """
    if not sizes:
        raise ValueError("expected the loss of the method at one size at least")
    logs = []
    variances = []
    for size, loss in zip(sizes, losses, strict=True):
        equal_size, variance = baseline.log_size_of(loss)
        logs.append(equal_size - math.log(size))
        variances.append(variance)
    of_points = mean_interval(logs)
    # the fit's errors are alike at all points, so their mean does not shrink with the points
    error = math.sqrt(statistics.fmean(variances))
    of_law = MeanEstimate(0, error, len(baseline.log_sizes) - 2).interval
    mean = of_points.mean
    reach = math.hypot(of_points.high - mean, of_law.high)
    return ComputeMultiplier(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))
