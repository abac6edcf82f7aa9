"""95 % intervals of the mean of a few values, by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, 97.5 %, for 1, 2, … degrees of freedom; from there on 1.96 + 2.5 / freedom
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class Interval(NamedTuple):
    """A mean and its 95 % interval, whose ends are NaN for a single value."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """−1 or 1 where the interval is below or above zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, with its interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = t_quantile(len(values) - 1) * error
    return Interval(mean, mean - reach, mean + reach)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    return 1.96 + 2.5 / freedom
