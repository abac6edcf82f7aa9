"""Holm's correction for the number of comparisons."""

import math
from collections.abc import Mapping

from scipy import stats

from crosslayer.intervals import MeanEstimate

LEVEL = 0.05


def p_value(estimate: MeanEstimate) -> float:
    """Of the hypothesis that the mean is zero, two-sided, by Student's t."""
    if estimate.error == 0:
        return float(estimate.mean == 0)
    freedom = max(1, int(estimate.freedom))  # as the interval has it
    return 2 * float(stats.t.sf(abs(estimate.mean) / estimate.error, freedom))


def remaining_after_holm(
    estimates: Mapping[str, MeanEstimate | None],
) -> tuple[dict[str, MeanEstimate], int]:
    """The means that still differ from zero, and how many means were tested.

    The smallest of N p-values must be below `LEVEL` / N, the next one below `LEVEL` / (N − 1), and
    so on to the first that is not.

    Args:
        estimates: by name. Those without an error are not tested.
    """
    tested = {
        name: estimate
        for name, estimate in estimates.items()
        if estimate is not None and not math.isnan(estimate.error)
    }
    remaining = {}
    by_p_value = sorted(tested.items(), key=lambda item: p_value(item[1]))
    for place, (name, estimate) in enumerate(by_p_value):
        if p_value(estimate) >= LEVEL / (len(tested) - place):
            break
        remaining[name] = estimate
    return remaining, len(tested)
