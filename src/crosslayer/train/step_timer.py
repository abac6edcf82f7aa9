"""How long steps take: the training time, the speed and the time left follow from it.

The first steps of a process warm up caches, or compile the model. Where the model is compiled, each
of them counts towards the training time as much as the step after them.
"""

import statistics
from collections import deque

_WARM_UP_STEPS = 3
_TIMED_STEPS = 200  # the last ones


class StepTimer:
    """The durations of one model's steps in this process.

    Args:
        compiles: whether the first steps compile the model.

    Attributes:
        steps: how many were recorded.
    """

    def __init__(self, compiles: bool):
        self.steps = 0
        self._compiles = compiles
        self._first_durations: list[float] = []
        self._durations: deque[float] = deque(maxlen=_TIMED_STEPS)  # of the steps after them

    def record(self, duration: float) -> float:
        """Record a step's duration in seconds; what it adds to the seconds of training."""
        self.steps += 1
        if len(self._first_durations) < _WARM_UP_STEPS:
            self._first_durations.append(duration)
            return 0.0 if self._compiles else duration
        self._durations.append(duration)
        if self._compiles and len(self._durations) == 1:
            return (1 + _WARM_UP_STEPS) * duration
        return duration

    @property
    def is_warm(self) -> bool:
        """Whether a step was recorded that neither warmed up caches nor compiled."""
        return bool(self._durations)

    def median(self) -> float:
        """The median duration of the last steps, in seconds.

        Before the process is warm, the shortest of the first steps.
        """
        return statistics.median(self._durations or [min(self._first_durations)])

    def mean(self) -> float:
        """The mean duration of the same steps, in seconds.

        Other work on the machine makes some steps far longer than the median.
        """
        return statistics.fmean(self._durations or [min(self._first_durations)])
