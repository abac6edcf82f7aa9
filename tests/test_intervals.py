"""Intervals of means by Student's t."""

import math

import pytest

from crosslayer.intervals import mean_interval


def test_mean_interval():
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval == pytest.approx((2.0, 2 - 4.30 / math.sqrt(3), 2 + 4.30 / math.sqrt(3)))
    assert [mean_interval(values).sign for values in ([1, 2, 3], [9, 10], [-1.0, -1.1])] == [
        0,
        1,
        -1,
    ]
    assert math.isnan(mean_interval([1.0]).low) and mean_interval([1.0]).sign == 0
