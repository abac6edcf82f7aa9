"""The order of training: a permutation per epoch, for any number of ranks, resumed anywhere."""

from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from crosslayer.data.sampler import ResumableSampler, evenly_spaced, evenly_spaced_steps

PINNED = [6, 3, 1, 5, 8, 7, 0, 2, 9, 4, 4, 8]


def take(sampler: ResumableSampler, count: int) -> list[int]:
    return list(islice(sampler, count))


def endless_order(length: int, seed: int, count: int) -> list[int]:
    """The definition, written as a loop over epochs."""
    order: list[int] = []
    epoch = 0
    while len(order) < count:
        state = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        order += torch.randperm(length, generator=generator).tolist()
        epoch += 1
    return order[:count]


@pytest.mark.parametrize("length", [1, 7, 97])
@pytest.mark.parametrize("seed", [0, 2**40])
def test_order_equals_an_independent_loop(length, seed):
    batch, steps = 6, 40
    assert take(ResumableSampler(length, seed, batch), batch * steps) == endless_order(
        length, seed, batch * steps
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("start", [0, 23])
@pytest.mark.parametrize("length", [5, 50])
def test_ranks_share_the_batches_of_one_process(ranks, start, length):
    batch = 8
    expected = endless_order(length, 1, batch * (start + 3))[batch * start :]
    share = batch // ranks
    shares = [
        take(ResumableSampler(length, 1, batch, rank, ranks, start), 3 * share)
        for rank in range(ranks)
    ]
    shared = [
        index
        for step in range(3)
        for indices in shares
        for index in indices[step * share : (step + 1) * share]
    ]
    assert shared == expected


def test_every_epoch_is_another_permutation():
    epochs = np.array(take(ResumableSampler(1000, seed=3, batch=1), 3000)).reshape(3, 1000)
    assert (np.sort(epochs) == np.arange(1000)).all()
    assert (epochs[0] != epochs[1]).mean() > 0.9
    assert (epochs[0] != np.arange(1000)).mean() > 0.9


def test_seeds_differ():
    orders = {tuple(take(ResumableSampler(1000, seed, 8), 1000)) for seed in (0, 1, 2, 2**70)}
    assert len(orders) == 4


def test_order_is_pinned():
    # a checkpoint stores the number of batches it has seen, so the order must never change
    assert take(ResumableSampler(10, 0, 4), 12) == PINNED


def test_evenly_spaced_examples_and_steps():
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(3, 4) == [0, 1, 2]
    assert evenly_spaced_steps(11, 4) == {3, 6, 8, 11}
    assert evenly_spaced_steps(3, 4) == {1, 2, 3}


def test_loader_with_workers_keeps_the_order():
    data = TensorDataset(torch.arange(50))
    loader = DataLoader(
        data, 8, sampler=ResumableSampler(50, seed=5, batch=8, start=3), num_workers=2
    )
    batches = [examples.tolist() for (examples,) in islice(loader, 9)]
    assert list(chain(*batches)) == endless_order(50, 5, 8 * 12)[24:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1"),
        ({"start": -1}, "start must be a number of at least 0"),
        ({"seed": -1}, "seed must be a number of at least 0"),
        ({"rank": 2, "ranks": 2}, "rank must be from 0 to 1, got 2"),
        ({"ranks": 3}, "a batch of 8 cannot be shared evenly by 3 ranks"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResumableSampler(**{"length": 10, "seed": 0, "batch": 8} | arguments)
