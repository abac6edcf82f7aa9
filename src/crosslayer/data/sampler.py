"""The order of training: a keyed shuffle that costs nothing to hold and nothing to enter anywhere.

    position p of the endless sequence  ->  epoch e = p // n,  example = shuffle_(seed, e)(p mod n)

shuffle is a Feistel network on the numbers of as many bits as n has, followed again and again until it lands below n
(Black & Rogaway, 2002, "Ciphers with arbitrary finite domains"). Neither memory nor the cost of a place grows with n.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

ROUNDS = 8


class BatchSampler(Sampler[int]):
    """Endless epochs over `length` examples, each a permutation that depends on the seed and the epoch alone.

    Batch g of all ranks together is positions g·batch to (g+1)·batch of the sequence, whatever the number of ranks;
    this one takes its contiguous share. To resume after g batches, start at g.

    Args:
        length: how many examples there are.
        seed: of the shuffles.
        batch: examples a step of all ranks together.
        rank: which of the ranks this is.
        ranks: how many there are.
        start: the first batch.
    """

    def __init__(
        self, length: int, seed: int, batch: int, rank: int = 0, ranks: int = 1, start: int = 0
    ):
        for name, value, least in (
            ("length", length, 1),
            ("batch", batch, 1),
            ("ranks", ranks, 1),
            ("start", start, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        if batch % ranks:
            raise ValueError(
                f"a batch of {batch} cannot be shared evenly by {ranks} ranks; choose a multiple of them"
            )
        self.length, self.seed, self.batch = length, seed, batch
        self.rank, self.ranks, self.start = rank, ranks, start

    def __iter__(self) -> Iterator[int]:
        share = self.batch // self.ranks
        first = self.start * self.batch + self.rank * share
        while True:
            yield from self.examples(first, share)
            first += self.batch

    def examples(self, first: int, count: int) -> Iterator[int]:
        """Those at positions first to first + count."""
        while count:
            epoch, place = divmod(first, self.length)
            here = min(count, self.length - place)
            for index in shuffle(
                np.arange(place, place + here, dtype=np.uint64), self.length, f"{self.seed} {epoch}"
            ):
                yield self.example(epoch, int(index))
            first, count = first + here, count - here

    def example(self, epoch: int, index: int) -> int:
        return index


def shuffle(places: np.ndarray, length: int, key: str) -> np.ndarray:
    """Where a permutation of 0 .. length - 1, chosen by the key, takes these places, uint64."""
    bits = (length - 1).bit_length()
    keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * ROUNDS), "<u8").astype(
        np.uint64
    )
    places = places.copy()
    astray = np.ones(len(places), bool)
    while astray.any():
        places[astray] = feistel(places[astray], bits, keys)
        astray = places >= length
    return places


def feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of so many bits: each half in turn takes a hash of the other."""
    low = bits // 2
    masks = [np.uint64(2**low - 1), np.uint64(2 ** (bits - low) - 1)]
    halves = [values & masks[0], values >> np.uint64(low)]
    for number, key in enumerate(keys):
        turn = number % 2
        halves[turn] = halves[turn] ^ (mixed(halves[1 - turn] + key) & masks[turn])
    return halves[0] | halves[1] << np.uint64(low)


def mixed(values: np.ndarray) -> np.ndarray:
    """A hash of 64 bits (the finaliser of splitmix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
