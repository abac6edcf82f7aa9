"""Mean and standard deviation over tokens that come in batches."""

import torch
from torch import Tensor


class RunningMoments:
    """Mean and standard deviation over the first axis of all that was added, in float64.

    Welford's method by batches, so that a large mean does not cost the deviation's digits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = torch.zeros(())
        self._squares = torch.zeros(())  # the sum of squared deviations from the mean

    def add(self, values: Tensor) -> None:
        """values: [N …], or […] where one value holds for all tokens: pass it as [1 …]."""
        values = values.detach().double().cpu()
        count = len(values)
        mean = values.mean(0)
        squares = (values - mean).square().sum(0)
        total = self.count + count
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self.count * count / total)
        self._mean = self._mean + shift * (count / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def std(self) -> Tensor:
        """Of the population: divided by the number of tokens."""
        return (self._squares / max(self.count, 1)).sqrt()
