"""95 % intervals of the mean of a few values, by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, 97.5 %, for 1, 2, … degrees of freedom
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
NORMAL_QUANTILE = 1.95996  # 97.5 %


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
    """The 97.5 % quantile of Student's t; above 10 by its expansion in 1 / freedom."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
