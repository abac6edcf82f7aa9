"""Intervals of means by Student's t."""

import math

import pytest

from crosslayer.intervals import mean_interval, t_quantile


def test_mean_interval():
    interval = mean_interval([1.0, 2.0, 3.0])
    reach = 4.302653 / math.sqrt(3)  # of two degrees of freedom
    assert interval == pytest.approx((2.0, 2 - reach, 2 + reach), abs=1e-4)
    assert [mean_interval(values).sign for values in ([1, 2, 3], [9, 10], [-1.0, -1.1])] == [
        0,
        1,
        -1,
    ]
    assert math.isnan(mean_interval([1.0]).low) and mean_interval([1.0]).sign == 0


def test_quantiles():
    """Those of a printed table of Student's t."""
    table = {1: 12.7062, 10: 2.2281, 11: 2.2010, 20: 2.0860, 60: 2.0003, 1000: 1.9623}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)
