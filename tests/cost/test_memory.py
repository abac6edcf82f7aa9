"""Peak activation memory of n streams and of dense sources at real sizes: 24 layers of width 2048, 8 × 2048 tokens."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer import recompute
from crosslayer.connection import find_connections
from crosslayer.cost import memory
from crosslayer.cost.estimate import activation_bytes, build_on_meta, language_model_loss
from crosslayer.hf.config import make_config

LAYERS, DIM, BATCH, CONTEXT = 24, 2048, 8, 2048
STATE = 4 * DIM * BATCH * CONTEXT * 2  # bytes of four streams
pytestmark = pytest.mark.filterwarnings("ignore:mgr")


@functools.cache
def step(arm: str, how: str = "none", vocab: int = 32000) -> memory.PeakMemory:
    return memory.estimate_peak_memory(
        arm, make_config(layers=LAYERS, dim=DIM, heads=16, vocab=vocab), BATCH, CONTEXT, how
    )


def traced(arm: str, kept=None):
    """Without a vocabulary, whose logits are as much as the streams of several layers; and a batch."""
    model = build_on_meta(
        arm, make_config(layers=LAYERS, dim=DIM, heads=16, vocab=32), CONTEXT, torch.bfloat16
    )
    recompute.enable_recompute(find_connections(model), "streams", kept)
    return model, torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long, device="meta")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arm", "how", "bound"),
    [
        ("hyper", "streams", 1.05),
        slow("mhc", "streams", 1.05),
        slow("mgr", "streams", 1.05),
        slow("mgr(stream_dtype='float32')", "inversion", 1.05),
        ("mudd", "streams", 1.10),
    ],
)
def test_peak_is_prenorms(arm, how, bound):
    found = step(arm, how).peak
    assert found < bound * step("prenorm", "streams").peak, (
        "PreNorm's that recomputes what it reads too"
    )
    assert found < 0.85 * step("prenorm").peak, "PreNorm's as it is"
    assert step(arm, how, vocab=32).peak < 0.9 * step("prenorm", vocab=32).peak, (
        "the same without logits"
    )


@pytest.mark.parametrize("arm", ["hyper", "mudd"])
def test_hooks_see_all_that_is_kept(arm):
    """And so `crosslayer compare`."""
    model, ids = traced(arm)
    kept, seen = memory.measure_peak_memory(model, ids).kept, activation_bytes(model, ids)
    assert seen == pytest.approx(kept, rel=1e-4)  # but for the loss and the batch


def test_a_kept_state_is_seen(monkeypatch):
    """Planted: a state that each site keeps, in its closure, where no hook looks."""
    honest = step("hyper", "streams")

    class Keeping(recompute._ReplayFromCheckpoint):
        def __init__(self, *read):
            super().__init__(*read)
            self.oops = read[-1].state

    monkeypatch.setitem(recompute.RECOMPUTE_MODES, "streams", Keeping)
    planted = step.__wrapped__("hyper", "streams")
    assert planted.kept - honest.kept > (2 * LAYERS - 6) * STATE
    assert planted.peak > 1.3 * honest.peak


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["hyper", "mhc", "mgr"])
def test_doubling_distances_are_better_than_equal_ones(arm):
    """√-many states, at every fourth or fifth layer: where the backward begins, no layer has given anything up yet."""
    for every in (4, 5):
        equal = memory.measure_peak_memory(*traced(arm, range(0, LAYERS, every)))
        assert memory.measure_peak_memory(*traced(arm)).peak < equal.peak


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("arm", "how", "bound"),
    [
        ("hyper", "streams", 1.05),
        ("mhc", "streams", 1.05),
        ("mgr", "streams", 1.05),
        ("mudd", "streams", 1.10),
    ],
)
def test_peak_on_a_gpu(arm, how, bound):
    def allocated(arm: str, how: str | None) -> int:
        config = make_config(layers=12, dim=1024, heads=16)
        model = crosslayer.connect(
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), arm
        ).cuda()
        if how:
            recompute.enable_recompute(find_connections(model), how)
        ids = torch.zeros(8, 1025, dtype=torch.long, device="cuda")
        language_model_loss(model, ids).backward()  # gradients and workspaces are there from now on
        model.zero_grad(set_to_none=False)
        at_rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        language_model_loss(model, ids).backward()
        return torch.cuda.max_memory_allocated() - at_rest

    assert allocated(arm, how) < bound * allocated("prenorm", None)
