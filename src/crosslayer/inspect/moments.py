"""Mean, standard deviation and quantiles over tokens that come in batches."""

import torch
from torch import Tensor


class RunningMoments:
    """Mean and standard deviation over the first axis of all that was added, in float64.

    Welford's method by batches, so that a large mean does not cost the deviation's digits.

    Attributes:
        count: of values.
        mean: of all that was added.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())  # the sum of squared deviations from the mean

    def add(self, values: Tensor) -> None:
        """values: [N …]; [1 …] where one value holds for all tokens."""
        values = values.detach().double().cpu()
        count = len(values)
        batch_mean = values.mean(0)
        squares = (values - batch_mean).square().sum(0)
        total = self.count + count
        shift = batch_mean - self.mean
        self._squares = self._squares + squares + shift.square() * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """Of the population: divided by the number of tokens."""
        return (self._squares / max(self.count, 1)).sqrt()


class TokenSample:
    """Evenly spaced values of all that was added, at most `limit` tokens, for quantiles.

    Up to `limit` tokens are all kept. Beyond, every second value is dropped whenever the sample is
    full.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self.limit = limit
        self._kept: list[Tensor] = []
        self._size = 0
        self._seen = 0
        self._stride = 1

    def add(self, values: Tensor) -> None:
        """values: [N …]."""
        first = -self._seen % self._stride
        self._seen += len(values)
        # a slice would keep all of the memory that it is of
        self._kept.append(values.detach()[first :: self._stride].cpu().clone())
        self._size += len(self._kept[-1])
        while self._size > self.limit:
            self._kept = [torch.cat(self._kept)[::2].clone()]
            self._size = len(self._kept[0])
            self._stride *= 2

    @property
    def values(self) -> Tensor:
        """[tokens …], in float64."""
        return torch.cat(self._kept).double()
