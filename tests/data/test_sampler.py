"""The order of training: a permutation an epoch, the same for any number of ranks, entered anywhere at once."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from crosslayer.data.corpus import Order
from crosslayer.data.sampler import shuffle

LENGTHS = [1, 2, 3, 4, 5, 7, 31, 63, 64, 65, 97, 127, 128, 129, 1000, 4095, 4097, 7919]
PINNED = [7, 2, 1, 5, 8, 4, 6, 3, 0, 9, 3, 4]


def take(order: Order, count: int) -> list[int]:
    return list(itertools.islice(order, count))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_epoch_is_a_permutation(length):
    found = np.array(take(Order(length, seed=3, batch=1), 3 * length)).reshape(3, length)
    assert (np.sort(found) == np.arange(length)).all()
    if length > 60:
        assert (found[0] != found[1]).mean() > 0.9 and (found[0] != np.arange(length)).mean() > 0.9


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(-(2**40), 2**40), epoch=st.integers(0, 2**40))
def test_shuffle_is_a_permutation(length, seed, epoch):
    places = np.arange(length, dtype=np.uint64)
    assert sorted(shuffle(places, length, f"{seed} {epoch}").tolist()) == list(range(length))
    assert places.tolist() == list(range(length)), "what was given is not changed"


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 50), seed=st.integers(0, 9), share=st.integers(1, 6), ranks=st.sampled_from([1, 2, 4, 8]),
    start=st.integers(0, 40),
)  # fmt: skip
def test_ranks_share_what_one_would_take(length, seed, share, ranks, start):
    batch = share * 8
    whole = take(Order(length, seed, batch), batch * (start + 3))[batch * start :]
    split = [
        take(Order(length, seed, batch, rank, ranks, start), 3 * batch // ranks)
        for rank in range(ranks)
    ]
    n = batch // ranks
    assert whole == [i for g in range(3) for part in split for i in part[g * n : (g + 1) * n]]


def test_it_looks_random():
    n, epochs = 64, 4000
    found = np.stack(
        [shuffle(np.arange(n, dtype=np.uint64), n, f"0 {epoch}") for epoch in range(epochs)]
    ).astype(int)
    # where each example lands is uniform: chi-square of [n n] counts with (n - 1)² degrees of freedom, ±5 sigma
    counts = np.zeros((n, n))
    np.add.at(counts, (np.tile(np.arange(n), (epochs, 1)), found), 1)
    degrees = (n - 1) ** 2
    chi = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5
    # neighbours do not stay neighbours, and a big one has no trend
    assert abs((np.diff(found, axis=1) == 1).mean() - 1 / n) < 5 * (1 / n / found.size) ** 0.5
    big = shuffle(np.arange(100_000, dtype=np.uint64), 10**9, "0 0").astype(float)
    assert (
        abs(np.corrcoef(big, np.arange(100_000))[0, 1]) < 0.02
        and abs(np.corrcoef(big[1:], big[:-1])[0, 1]) < 0.02
    )
    assert big.mean() == pytest.approx(5e8, rel=0.01) and len(set(big)) == 100_000


def test_seeds_and_epochs_differ():
    orders = {tuple(take(Order(1000, seed, 8), 1000)) for seed in (0, 1, 2, -1, 2**70)}
    assert len(orders) == 5
    assert take(Order(1000, 0, 8), 1000) != take(Order(1000, 0, 8), 2000)[1000:]


def test_the_order_never_changes():
    # a checkpoint says how many batches it has seen, not which
    assert take(Order(10, 0, 4), 12) == PINNED


def test_billions_of_examples_cost_nothing():
    start = time.perf_counter()
    far = Order(5_000_000_007, seed=1, batch=512, rank=3, ranks=8, start=10**12)
    found = take(far, 64)
    assert (
        time.perf_counter() - start < 1
        and len(set(found)) == 64
        and 0 <= min(found) <= max(found) < 5_000_000_007
    )
    assert take(Order(2**62 + 1, 0, 1), 4) and take(far, 64) == found


def test_a_loader_with_workers_keeps_the_order():
    data = TensorDataset(torch.arange(50))
    order = Order(50, seed=5, batch=8, start=3)
    batches = [
        b[0].tolist()
        for b in itertools.islice(DataLoader(data, 8, sampler=order, num_workers=2), 9)
    ]
    assert list(itertools.chain(*batches)) == take(Order(50, 5, 8), 8 * 12)[24:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"start": -1}, "start must be at least 0"),
        ({"rank": 2, "ranks": 2}, "rank must be from 0 to 1, got 2"),
        ({"ranks": 3}, "a batch of 8 cannot be shared evenly by 3 ranks"),
    ],
)
def test_bad_orders(arguments, message):
    with pytest.raises(ValueError, match=message):
        Order(**{"length": 10, "seed": 0, "batch": 8} | arguments)
