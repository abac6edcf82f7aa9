"""What a run reports: remaining time, speed, the share of the GPU's peak, memory."""

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from crosslayer.cost.estimate import GPUS
from crosslayer.train import profiling, trainer
from crosslayer.train.profiling import model_flops_utilization, peak_memory
from crosslayer.train.recipe import Arm
from crosslayer.train.run import train_arm
from crosslayer.train.settings import Settings
from crosslayer.train.step_timer import StepTimer
from crosslayer.train.task import LANGUAGE_TASK
from tests.train.runs import SMALL, run


def steps_of(text, **settings):
    """The result of each step of a run without a folder."""
    options = Settings.from_options(**{**SMALL, "data": text, **settings})
    examples = LANGUAGE_TASK.load_examples(options.data, options.model.model_config)
    results = []
    train_arm(
        options, Arm.from_row("prenorm"), 0, examples, LANGUAGE_TASK, None, on_step=results.append
    )
    return results


def test_remaining_time(text, monkeypatch):
    """With a clock that each reading moves by a second, all steps but the first take as long."""
    clock = itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(clock)))
    results = steps_of(text, evals=1)
    durations = [b.seconds - a.seconds for a, b in itertools.pairwise(results)]
    assert len(results) == 12 and len(set(durations)) == 1 and durations[0] > 0
    last = results[-3:]
    assert [step.seconds_left for step in last] == [2 * durations[0], durations[0], 0]
    tokens = SMALL["batch"] * SMALL["context"]
    assert last[0].tokens_per_second == pytest.approx(tokens / durations[0])


def test_the_speed_is_that_of_the_median_step():
    """Other work on the machine makes some steps far longer."""
    timer = StepTimer(compiles=False)
    for duration in (9.0, 9.0, 9.0, 1.0, 1.0, 10.0):  # the first three are warm-up
        timer.record(duration)
    assert (timer.median(), timer.mean()) == (1, 4)


def test_the_speed_of_an_evaluation_counts_its_examples(text, monkeypatch):
    """It takes a second by a clock that each reading moves by one."""
    clock = itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(clock)))
    found = run({"data": text, "steps": 1, "evals": 1, "batch": 2, "eval_batches": 3}, "prenorm")
    assert found["result"]["inference_speed"] == 2 * 3


def test_utilization_is_of_the_peak_of_the_gpu(monkeypatch):
    """Backward costs twice the forward pass."""
    gpu = next(iter(GPUS.values()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu.device_name)
    assert model_flops_utilization(10**12, 0.5) == pytest.approx(6e12 / gpu.flops)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    assert model_flops_utilization(10**12, 0.5) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model_flops_utilization(10**12, 0.5) is None


def test_utilization_counts_all_micro_batches(text, monkeypatch):
    counted = []
    monkeypatch.setattr(
        trainer, "model_flops_utilization", lambda flops, seconds: counted.append(flops)
    )
    steps_of(text, steps=1)
    steps_of(text, steps=1, accumulate=2)
    whole, in_two = counted
    assert in_two == pytest.approx(whole, rel=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_peak_memory_is_in_bytes(monkeypatch):
    """Linux counts what the process was before it executed Python, so it may be more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = Path("/proc/self/status").read_text()
    kibibytes = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    assert 0.95 < peak_memory() / (1024 * kibibytes) < 20


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_peak_is_that_of_the_system(monkeypatch, platform, unit):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profiling.sys, "platform", platform)
    usage = SimpleNamespace(ru_maxrss=5)
    monkeypatch.setattr(profiling.resource, "getrusage", lambda who: usage)
    assert peak_memory() == 5 * unit
