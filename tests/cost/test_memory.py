"""Peak activation memory at real sizes: 24 layers of width 2048, 8 × 2048 tokens."""

import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer import recompute, recomputed_reads
from crosslayer.connection import find_connections
from crosslayer.cost import (
    PeakMemory,
    activation_bytes,
    build_on_meta,
    estimate_peak_memory,
    measure_peak_memory,
)
from crosslayer.hf.config import make_config
from crosslayer.losses import next_token_loss
from crosslayer.train.parallel import _shard_model
from crosslayer.train.settings import Settings
from crosslayer.train.task import build_model
from tests.support.one_rank import one_rank_mesh

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
LAYERS, DIM, BATCH, CONTEXT = 24, 2048, 8, 2048
STATE_BYTES = 4 * DIM * BATCH * CONTEXT * 2  # of four streams


def real_config(vocab: int = 32000):
    return make_config(layers=LAYERS, dim=DIM, heads=16, vocab=vocab)


@functools.cache
def peak_memory(spec: str, recompute: str = "none", vocab: int = 32000) -> PeakMemory:
    return estimate_peak_memory(spec, real_config(vocab), BATCH, CONTEXT, recompute)


def recomputed_model(spec: str, kept=None):
    """A model that recomputes its streams, without a vocabulary's large logits; and tokens."""
    model = build_on_meta(spec, real_config(vocab=32), CONTEXT, torch.bfloat16)
    recompute.enable_recompute(find_connections(model), "streams", kept)
    return model, torch.zeros(BATCH, CONTEXT + 1, dtype=torch.long, device="meta")


def test_static_hyper_connections_keep_no_more_than_dynamic_ones():
    """Hyper-Connections (arXiv 2409.19606), Table 9."""
    config = make_config(layers=4, dim=1024, heads=4, vocab=32)
    dynamic, static = (
        estimate_peak_memory(spec, config, 1, 128).saved_bytes
        for spec in ("hyper", "hyper(dynamic=False)")
    )
    assert static <= dynamic


def test_bytes_of_a_step():
    """Neither the weights nor their gradients, which are zero afterwards."""
    model = nn.Linear(4, 4, bias=False)
    memory = measure_peak_memory(model, torch.ones(8, 4), lambda m, x: m(x).square().sum())
    assert memory.saved_bytes == 8 * 4 * 4 + 4  # the output and the loss
    assert not model.weight.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "mode", "bound"),
    [
        ("hyper", "streams", 1.05),
        ("mhc", "streams", 1.05),
        ("mgr", "streams", 1.05),
        ("mgr(stream_dtype='float32')", "inversion", 1.05),
        ("mudd", "streams", 1.10),
    ],
)
def test_peak_is_that_of_prenorm(spec, mode, bound):
    peak = peak_memory(spec, mode).peak_bytes
    assert peak < bound * peak_memory("prenorm", "streams").peak_bytes
    assert peak < 0.85 * peak_memory("prenorm").peak_bytes
    without_logits = peak_memory(spec, mode, vocab=32).peak_bytes
    assert without_logits < 0.9 * peak_memory("prenorm", vocab=32).peak_bytes


@pytest.mark.slow
def test_the_table_of_the_documentation():
    rows = re.findall(r"^\| `(.+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]*)", PAGE.read_text(), re.M)
    assert len(rows) == 6
    for spec, *numbers in rows:
        for mode, number in zip(("none", "streams", "inversion"), numbers, strict=True):
            if number:
                peak = peak_memory(spec, mode).peak_bytes / 2**30
                assert f"{peak:.1f}" == number, (spec, mode)


@pytest.mark.slow
def test_hooks_see_all_that_is_saved():
    """`activation_bytes`, which `crosslayer compare` reports, equals the live memory."""
    model, ids = recomputed_model("hyper")
    saved = measure_peak_memory(model, ids).saved_bytes
    assert activation_bytes(model, ids) == pytest.approx(saved, rel=1e-4)  # the loss, the batch


def test_gathered_weights_are_no_activations():
    """FSDP holds those of the head and of the final norm after a forward pass."""
    settings = Settings.from_options(family="llama", layers=2, dim=64, heads=4, context=32)
    tokens = torch.randint(4096, (2, 33))
    plain = activation_bytes(build_model(settings, "mudd", 4096, 0), tokens)
    with one_rank_mesh() as mesh:
        sharded = _shard_model(build_model(settings, "mudd", 4096, 0), mesh, None)
        assert activation_bytes(sharded, tokens) == plain


@pytest.mark.slow
def test_planted_bug_a_stored_state_is_counted(monkeypatch):
    """A state that each site keeps in its closure, where no hook looks, shows in the memory."""
    correct = peak_memory("hyper", "streams")

    class KeepsItsState(recomputed_reads.ReplayFromSaved):
        def __init__(self, *read):
            super().__init__(*read)
            self.leaked = read[-1].state

    monkeypatch.setitem(recompute.RECOMPUTE_MODES, "streams", KeepsItsState)
    planted = peak_memory.__wrapped__("hyper", "streams")
    assert planted.saved_bytes - correct.saved_bytes > (2 * LAYERS - 6) * STATE_BYTES
    assert planted.peak_bytes > 1.3 * correct.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["hyper", "mgr"])
def test_doubling_distances_are_better_than_equal_ones(spec):
    """States at every fourth or fifth layer are all alive where the backward pass begins."""
    doubling = measure_peak_memory(*recomputed_model(spec)).peak_bytes
    for distance in (4, 5):
        kept = range(0, LAYERS, distance)
        assert doubling < measure_peak_memory(*recomputed_model(spec, kept)).peak_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("spec", "bound"), [("hyper", 1.05), ("mhc", 1.05), ("mgr", 1.05), ("mudd", 1.10)]
)
def test_peak_on_a_gpu(spec, bound):
    def allocated_bytes(spec: str, mode: str | None) -> int:
        config = make_config(layers=12, dim=1024, heads=16)
        host = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = crosslayer.connect(host, spec).cuda()
        if mode:
            recompute.enable_recompute(find_connections(model), mode)
        ids = torch.zeros(8, 1025, dtype=torch.long, device="cuda")
        next_token_loss(model, ids).backward()  # allocates gradients and workspaces
        model.zero_grad(set_to_none=False)
        at_rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        next_token_loss(model, ids).backward()
        return torch.cuda.max_memory_allocated() - at_rest

    assert allocated_bytes(spec, "streams") < bound * allocated_bytes("prenorm", None)
