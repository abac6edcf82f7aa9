"""The order of training: a permutation of the examples per epoch, for any number of ranks."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..validation import check_non_negative, check_positive


class ResumableSampler(Sampler[int]):
    """Endless epochs over `length` examples, each in an order given by seed and epoch.

    Position p of the endless sequence is example `_epoch_permutation(length, seed, p // length)`
    at place p % length. Batch g of all ranks together covers the positions g·batch to
    (g + 1)·batch, whatever the number of ranks; each rank takes its contiguous share. A run
    resumes after g batches with `start=g`. A permutation takes 8 bytes an example.

    Args:
        length: the number of examples.
        seed: of the permutations.
        batch: examples per step, of all ranks together.
        rank: the index of this rank.
        ranks: the number of ranks.
        start: the first batch.
    """

    def __init__(
        self, length: int, seed: int, batch: int, rank: int = 0, ranks: int = 1, start: int = 0
    ):
        check_positive(length=length, batch=batch, ranks=ranks)
        check_non_negative(seed=seed, start=start)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        if batch % ranks:
            raise ValueError(
                f"a batch of {batch} cannot be shared evenly by {ranks} ranks; "
                "choose a multiple of them"
            )
        self.length = length
        self.seed = seed
        self.batch = batch
        self.rank = rank
        self.ranks = ranks
        self.start = start

    def __iter__(self) -> Iterator[int]:
        for _, index in self.positions():
            yield index

    def positions(self) -> Iterator[tuple[int, int]]:
        """This rank's positions: the epoch and the index of the example of each."""
        share = self.batch // self.ranks
        first = self.start * self.batch + self.rank * share
        epoch_of_permutation = -1
        permutation = torch.empty(0)
        while True:
            for position in range(first, first + share):
                epoch, place = divmod(position, self.length)
                if epoch != epoch_of_permutation:
                    permutation = _epoch_permutation(self.length, self.seed, epoch)
                    epoch_of_permutation = epoch
                yield epoch, int(permutation[place])
            first += self.batch


def _epoch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in one epoch, [length] int64."""
    # SeedSequence mixes the two numbers: seed 0 in epoch 1 is not seed 1 in epoch 0
    (generator_seed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(generator_seed))
    return torch.randperm(length, generator=generator)


def evenly_spaced(length: int, count: int) -> list[int]:
    """`count` indices at equal distances below `length`, or all of them if they are fewer."""
    count = min(length, count)
    return [index * length // count for index in range(count)]


def evenly_spaced_steps(steps: int, count: int) -> set[int]:
    """At most `count` steps at equal distances, the last one included."""
    count = min(steps, count)
    return {round(steps * number / count) for number in range(1, count + 1)}
