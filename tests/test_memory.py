"""Peak activation memory of n streams and of dense sources, at real sizes, by every storage that lives.

The model is on the meta device, where a step of any size is free: 24 layers of width 2048, 8 sequences of 2048 tokens.
"""

import functools
import weakref
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosslayer import recompute
from crosslayer.costs import activation_bytes, loss_of, on_meta, sized
from crosslayer.costs import connections as in_order

LAYERS, DIM, BATCH, CONTEXT = 24, 2048, 8, 2048
FLOAT32_MGR = "mgr(stream_dtype='float32')"
pytestmark = pytest.mark.filterwarnings("ignore:mgr")


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, whoever holds them, and their peak; those given are not counted."""

    def __init__(self, given):
        super().__init__()
        self.now = self.peak = 0
        self.known = {x.untyped_storage()._cdata: None for x in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.now += size
            self.peak = max(self.peak, self.now)
            self.known[key] = weakref.ref(storage, functools.partial(self.freed, key, size))

    def freed(self, key, size, _):
        self.now -= size
        del self.known[key]


class Bytes(NamedTuple):
    kept: int  # after the forward pass
    peak: int  # of forward and backward
    left: int  # after both
    hooked: int  # of what is kept, what hooks on saved tensors see


@functools.cache
def step(arm, how=None, kept=None, layers=LAYERS, vocab=32000, dtype=torch.bfloat16) -> Bytes:
    """A step's bytes beside parameters and their gradients."""
    model = on_meta(arm, sized(layers=layers, dim=DIM, heads=16, vocab=vocab), CONTEXT, dtype)
    if how:
        recompute.retrace(in_order(model), how, kept)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ids = torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long, device="meta")
    with Live([ids, *(x for p in model.parameters() for x in (p, p.grad))]) as live:
        loss = loss_of(model, ids)
        at_rest = live.now
        loss.backward()
        del loss
    return Bytes(at_rest, live.peak, live.now, activation_bytes(model, ids))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arm", "how", "bound"),
    [
        ("hyper", "streams", 1.05),
        slow("mhc", "streams", 1.05),
        slow("mgr", "streams", 1.05),
        slow(FLOAT32_MGR, "inversion", 1.05),
        ("mudd", "streams", 1.10),
    ],
)
def test_peak_is_prenorms(arm, how, bound):
    """That of PreNorm which recomputes what it reads too; PreNorm's as it is is higher still."""
    alike, plain, found = step("prenorm", "streams"), step("prenorm"), step(arm, how)
    assert found.peak < bound * alike.peak
    assert found.peak < 0.85 * plain.peak
    # and without a vocabulary, whose logits alone are as much as the streams of several layers
    assert step(arm, how, vocab=32).peak < 0.9 * step("prenorm", vocab=32).peak
    assert found.left == 0


@pytest.mark.parametrize("arm", ["hyper", "mudd"])
def test_hooks_see_all_that_is_kept(arm):
    """And so `crosslayer compare`: the loss beside, and the batch that the caller has anyway."""
    found = step(arm, "streams", vocab=32)
    assert found.hooked == pytest.approx(found.kept, rel=1e-4)


def test_a_kept_state_is_seen(monkeypatch):
    """Planted: a state that each site keeps, in its closure, where no hook looks."""
    honest = step("hyper", "streams")

    class Keeping(recompute.Onward):
        def __init__(self, connection, read, whole, traced):
            super().__init__(connection, read, whole, traced)
            self.oops = traced.state

    monkeypatch.setitem(recompute.KINDS, "streams", Keeping)
    planted = step.__wrapped__("hyper", "streams")
    assert planted.peak > 1.3 * honest.peak
    state = 4 * DIM * BATCH * CONTEXT * 2
    assert planted.kept - honest.kept > (2 * LAYERS - 6) * state


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["hyper", "mhc", "mgr"])
def test_doubling_distances_are_better_than_equal_ones(arm):
    """√-many states, at every fourth or fifth layer: where the backward begins, no layer has given anything up yet."""
    for every in (4, 5):
        equal = step(arm, "streams", tuple(range(0, LAYERS, every)), vocab=32)
        assert step(arm, "streams", vocab=32).peak < equal.peak
