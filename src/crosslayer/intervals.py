"""Means over seeds: of values, with standard deviations or 95 % intervals by Student's t, and of
curves, with ranges.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

# Student's t, 97.5 %, for 1, 2, … degrees of freedom
_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL_QUANTILE = 1.95996  # 97.5 %


class Interval(NamedTuple):
    """A mean and its 95 % interval, whose ends are NaN for a single value."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """−1 or 1 where the interval is below or above zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


class MeanEstimate(NamedTuple):
    """A mean, its standard error, and the degrees of freedom of that error.

    The error is NaN where it is not known.
    """

    mean: float
    error: float
    freedom: float

    @property
    def interval(self) -> Interval:
        """The 95 % interval by Student's t."""
        reach = t_quantile(max(1, int(self.freedom))) * self.error
        return Interval(self.mean, self.mean - reach, self.mean + reach)


class MeanStd(NamedTuple):
    """A mean over seeds and its standard deviation, None for a single seed."""

    mean: float
    std: float | None


def mean_and_std(values: list[float]) -> MeanStd:
    """Mean and standard deviation of at least one value."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return MeanStd(statistics.mean(values), std)


def estimate_mean(values: Sequence[float]) -> MeanEstimate:
    """The mean of at least one value, and its error."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return MeanEstimate(mean, math.nan, 0)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return MeanEstimate(mean, error, len(values) - 1)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, with its interval."""
    return estimate_mean(values).interval


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; above 10 by its expansion in 1 / freedom."""
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass
class MeanCurve:
    """A curve's mean over seeds, with its range or its interval.

    Attributes:
        x: where all seeds are known.
        mean: at each x.
        low, high: the ends of the range or the interval at each x.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def average_curves(curves: Sequence[Sequence[Sequence[float]]]) -> MeanCurve:
    """The mean of curves over the range that all of them have, at the places of the shortest one.

    Args:
        curves: (x, y), x ascending; those without a point are left out. Between two points a curve
            is a line.
    """
    known = [curve for curve in curves if curve]
    if not known:
        return MeanCurve([], [], [], [])
    start = max(curve[0][0] for curve in known)
    end = min(curve[-1][0] for curve in known)
    fewest = min(known, key=len)
    x = [place for place, _ in fewest if start <= place <= end]
    rows = []
    for curve in known:
        places = [place for place, _ in curve]
        heights = [height for _, height in curve]
        rows.append(numpy.interp(x, places, heights))
    values = numpy.array(rows)
    return MeanCurve(x, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist())
