"""Intervals of means by Student's t."""

import math

import pytest

from crosslayer.intervals import average_curves, mean_and_std, mean_interval, t_quantile


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


def test_the_deviation_is_that_of_a_sample():
    """Divided by the number of seeds − 1."""
    assert mean_and_std([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2)))
    assert mean_and_std([1.0]) == (1.0, None)


def test_curves_of_seeds_that_were_judged_at_different_steps():
    """At the steps of the shorter one, within what both have."""
    curve = average_curves([[(3, 1.0), (6, 5.0)], [(2, 2.0), (4, 4.0), (5, 10.0)], []])
    assert (curve.x, curve.mean, curve.low, curve.high) == ([3], [2.0], [1.0], [3.0])
    curve = average_curves([[(3, 1.0), (6, 5.0)], [(2, 2.0), (4, 4.0), (8, 8.0)]])
    assert (curve.x, curve.mean) == ([3, 6], [2.0, 5.5])
    assert (curve.low, curve.high) == ([1.0, 5.0], [3.0, 6.0])
    # the shorter one begins first
    curve = average_curves([[(1, 9.0), (4, 3.0)], [(3, 5.0), (4, 4.0), (5, 4.0)]])
    assert (curve.x, curve.mean) == ([4], [3.5])
    assert average_curves([[]]).x == []


def test_quantiles():
    """Those of a printed table of Student's t."""
    table = {1: 12.7062, 10: 2.2281, 11: 2.2010, 20: 2.0860, 60: 2.0003, 1000: 1.9623}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)
