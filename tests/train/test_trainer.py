"""Runs that are killed, stopped, resumed, without disk space or with bad input; their metrics."""

import io
import itertools
import json
import logging
import math
import os
import pickle
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import types
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.loggers import Logger
from lightning.pytorch.loggers import WandbLogger

import crosslayer
from crosslayer.cli.compare import compare_and_report
from crosslayer.cli.main import main
from crosslayer.cli.train import train_and_export
from crosslayer.connection import find_connections
from crosslayer.connections.prenorm import PreNorm
from crosslayer.data.tokenizing import Tokenizer
from crosslayer.files import lock_folder
from crosslayer.float32_parameters import float32_parameter
from crosslayer.hf import from_pretrained
from crosslayer.losses import next_token_loss
from crosslayer.run_folders import checkpoint_name
from crosslayer.spec import make
from crosslayer.train.callbacks import ConnectAtStep, LogDiagnostics, SaveCheckpoints
from crosslayer.train.checkpoint import _crc32, list_checkpoints, remove_checkpoint
from crosslayer.train.checkpoint_reader import CheckpointReader
from crosslayer.train.diagnostics import connection_diagnostics
from crosslayer.train.evaluation import evaluate_examples, summarise_metrics
from crosslayer.train.export import export_trained
from crosslayer.train.method_code import code_digest
from crosslayer.train.parallel import launch_fabric, prepare_model
from crosslayer.train.recipe import Arm, Recipe
from crosslayer.train.run import train_arm
from crosslayer.train.run_state import RunState
from crosslayer.train.settings import EngineSettings, Settings
from crosslayer.train.signals import StopSignals
from crosslayer.train.task import (
    LANGUAGE_TASK,
    Examples,
    build_model,
)
from crosslayer.train.trainer import RunDiverged, RunStopped, Trainer
from tests.hf.backbones import connected, equal_lists, ids
from tests.train.runs import SMALL, Left, digest, run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run_left_at_7(text, tmp_path_factory):
    """The folder of a run that was left, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("left") / "run"
    run({"data": text, "save_every": 3}, "prenorm", folder, stop=7)
    return folder


@pytest.fixture
def left(run_left_at_7, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(run_left_at_7, tmp_path / "left")


@pytest.fixture(scope="module")
def recomputing_nothing(text):
    """A run with which those that recompute are compared."""
    return run({"data": text, "recompute": "none", "diagnostics_every": 5}, "mudd")


def steps(folder):
    return sorted(int(path.name[5:]) for path in Path(folder).glob("step-*"))


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        ("mudd", {}),
        pytest.param("mhc", {"optimizer": "muon"}, marks=pytest.mark.slow),
        pytest.param("mudd", {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_is_bitwise_identical(text, tmp_path, arm, options):
    settings = {"data": text, "save_every": 3, "log_every": 1, **options}
    whole = run(settings, arm, tmp_path / "whole")
    first = run(settings, arm, tmp_path / "parts", stop=8)
    assert steps(tmp_path / "parts") == [3, 6]
    rest = run(settings, arm, tmp_path / "parts")
    assert first["losses"][:6] + rest["losses"] == whole["losses"] and len(rest["losses"]) == 6
    assert (
        rest["weights"] == whole["weights"] and rest["result"]["curve"] == whole["result"]["curve"]
    )
    assert rest["result"]["metrics"] == whole["result"]["metrics"]
    assert steps(tmp_path / "parts") == [9, 12], "two are kept"
    lines = [
        json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13)), "no step twice"
    again = run(settings, arm, tmp_path / "parts")
    assert again["losses"] == [] and again["result"]["valid_loss"] == whole["result"]["valid_loss"]


def test_a_resumed_run_has_the_speed_of_its_checkpoint_while_it_warms_up(text, monkeypatch):
    def speeds(trainer):
        clock = iter([0.0, 8.0, 0.0, 2.0, 0.0, 4.0, 0.0, 1.0, 0.0, 3.0])  # starts and ends of steps
        fake_time = types.SimpleNamespace(perf_counter=lambda: next(clock))
        with monkeypatch.context() as patch:
            patch.setattr("crosslayer.train.trainer.time", fake_time)
            return [trainer.step().tokens_per_second for _ in range(5)]

    trainer = make_trainer(text, "prenorm")
    trainer.state.step = 4
    trainer.state.tokens_per_second = 123.0
    tokens = trainer.task.count_units(next(trainer.training_batches(0)))
    # The first three steps warm up; then the median of the others.
    assert speeds(trainer) == [123.0, 123.0, 123.0, tokens / 1, tokens / 2]
    # A fresh run has no other speed: the fastest of the steps so far.
    fresh = make_trainer(text, "prenorm")
    assert speeds(fresh) == [tokens / 8, tokens / 2, tokens / 2, tokens / 1, tokens / 2]
    halves = make_trainer(text, "prenorm", accumulate=2)
    assert speeds(halves) == [tokens / 8, tokens / 2, tokens / 2, tokens / 1, tokens / 2]
    # Another model has another speed.
    ConnectAtStep(5, "hyper").on_step(fresh, types.SimpleNamespace(step=5))
    assert speeds(fresh) == [tokens / 2, tokens / 2, tokens / 2, tokens / 1, tokens / 2]


def test_the_seconds_of_training_are_without_compilation(text, monkeypatch):
    """The steps that warm up count as much as the first one after them."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    seconds = {}
    seconds_left = {}
    for compile in ("none", "model"):
        trainer = make_trainer(text, "prenorm", compile=compile)
        trainer.state.seconds = 10.0  # of a run that is resumed
        clock = iter([0.0, 80.0, 0.0, 2.0, 0.0, 4.0, 0.0, 1.0, 0.0, 3.0])
        fake_time = types.SimpleNamespace(perf_counter=lambda: next(clock))
        monkeypatch.setattr("crosslayer.train.trainer.time", fake_time)
        results = [trainer.step() for _ in range(5)]
        seconds[compile] = [result.seconds for result in results]
        steps = trainer.settings.optimization.steps
        seconds_left[compile] = [result.seconds_left / (steps - result.step) for result in results]
    assert seconds == {"none": [90, 92, 96, 97, 100], "model": [10, 10, 10, 14, 17]}
    assert seconds_left == {"none": [80, 2, 2, 1, 2], "model": [80, 2, 2, 1, 2]}


def test_a_run_that_goes_on_with_other_code_says_so(text, tmp_path, monkeypatch):
    settings = {"data": text, "save_every": 3}
    run(settings, "hyper", tmp_path / "run", stop=5)
    monkeypatch.setattr("crosslayer.train.trainer.code_digest", lambda method: "changed")
    with pytest.warns(UserWarning, match="hyper: the code of hyper has changed since this run beg"):
        result = run(settings, "hyper", tmp_path / "run")["result"]
    assert result["method_code"] not in ("", "changed"), "that of the first steps"


def test_kept_models_of_a_resumed_run_are_the_same(text, tmp_path):
    settings = {"data": text, "layers": 1, "steps": 6, "evals": 1, "save_every": 3, "ema": 0.5}
    plain = run(settings, "denseformer")
    settings["keep_models"] = 3
    whole = run(settings, "denseformer", tmp_path / "whole")
    assert whole["losses"] == plain["losses"] and whole["weights"] == plain["weights"]
    run(settings, "denseformer", tmp_path / "parts", stop=5)  # after the checkpoint of step 3
    run(settings, "denseformer", tmp_path / "parts")
    kept = {}
    for name in ("whole", "parts"):
        files = sorted((tmp_path / name / "models").rglob("*.*"))
        kept[name] = {file.relative_to(tmp_path / name): file.read_bytes() for file in files}
    assert kept["parts"] == kept["whole"]
    folders = sorted(path.name for path in (tmp_path / "whole" / "models").iterdir())
    assert folders == ["step-000002", "step-000004", "step-000006"]
    last = (tmp_path / "whole" / "models" / folders[-1] / "model.safetensors").read_bytes()
    exported = (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
    assert last == exported
    assert digest(from_pretrained(tmp_path / "whole" / "model")) != whole["weights"], "averages"


def test_a_run_that_is_killed_after_a_checkpoint_has_kept_its_model(text, tmp_path, monkeypatch):
    settings = {"data": text, "layers": 1, "steps": 4, "evals": 1, "save_every": 2}
    settings["keep_models"] = 2
    save = SaveCheckpoints._save

    def save_and_die(callback, trainer):
        save(callback, trainer)
        raise Left

    with monkeypatch.context() as patch:
        patch.setattr(SaveCheckpoints, "_save", save_and_die)
        assert run(settings, "prenorm", tmp_path)["result"] is None
    run(settings, "prenorm", tmp_path)
    folders = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert folders == ["step-000002", "step-000004"]


@pytest.mark.slow
def test_dropout_is_resumed_too(text, tmp_path):
    settings = {
        "data": text,
        "save_every": 5,
        "family": "gpt2",
        "model_config": {"resid_pdrop": 0.3},
    }
    whole = run(settings, "hyper", tmp_path / "whole")
    run(settings, "hyper", tmp_path / "parts", stop=7)
    assert run(settings, "hyper", tmp_path / "parts")["weights"] == whole["weights"]
    dry = run({**settings, "model_config": {"resid_pdrop": 0.0}}, "hyper")
    assert dry["losses"] != whole["losses"]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """train, compare, data prepare and torchrun; KILLS=100 for more kills than 4."""
    command = [sys.executable, "-m", "tests.train.kills", str(tmp_path)]
    count = os.environ.get("KILLS", "4")
    done = subprocess.run(
        [*command, "--kills", count],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0 and f"{count} kills" in done.stdout, done.stderr


def test_a_full_disk(text, left, tmp_path):
    settings = {"data": text, "save_every": 3}
    kept = {path: path.read_bytes() for path in left.rglob("*") if path.is_file()}
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (50_000, usual[1])
        )  # as a disk with so little left
        with pytest.raises(
            OSError,
            match=r"step-00000009 cannot be written \((No space left|File too large).*\); "
            r"the last checkpoint is .*06",
        ):
            run(settings, "prenorm", left)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert steps(left) == [3, 6]
    assert all(
        path.read_bytes() == content for path, content in kept.items() if "step-" in str(path)
    )
    assert (
        run(settings, "prenorm", left)["weights"]
        == run(settings, "prenorm", tmp_path / "o")["weights"]
    )


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (
            "__0_0.distcp",
            lambda b: b[:-100],
            r"__0_0.distcp has \d+ bytes, expected \d+; remove it to resume from .*03",
        ),
        (".metadata", None, r"\.metadata is missing"),
        (
            ".metadata",
            lambda b: bytes(len(b)),
            r"\.metadata is damaged, its checksum differs; remove",
        ),
        (
            "__0_0.distcp",
            lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
            r"__0_0.distcp is damaged, its checksum differs; remove it to resume from .*03",
        ),
        ("checkpoint.json", lambda b: b[:50], "checkpoint.json is damaged"),
        ("checkpoint.json", lambda b: b"[]", "checkpoint.json is damaged"),
        ("checkpoint.json", lambda b: b"[" * 100_000, "checkpoint.json is damaged"),
        (
            "checkpoint.json",
            lambda b: json.dumps(json.loads(b) | {"state": None}).encode(),
            "checkpoint.json is damaged",
        ),
        (
            "checkpoint.json",
            lambda b: json.dumps(json.loads(b) | {"identity": ["lr"]}).encode(),
            "checkpoint.json is damaged",
        ),
        (
            "checkpoint.json",
            lambda b: b.replace(b'"seconds"', b'"second"'),
            r"checkpoint.json is damaged \('second'\)",
        ),
    ],
    ids=[
        "cut",
        "missing",
        "overwritten",
        "one bit",
        "index cut",
        "index of another kind",
        "too deep",
        "without a state",
        "an identity of another kind",
        "a state with another field",
    ],
)
def test_a_damaged_checkpoint(text, left, file, damage, message):
    path = left / "step-00000006" / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        run({"data": text, "save_every": 3}, "prenorm", left)
    assert "\n" not in str(error.value) and steps(left) == [3, 6]


def test_a_checksum_is_that_of_a_whole_file(tmp_path):
    """It is read in blocks of 16 MiB."""
    content = b"first" + bytes(2**24)
    (tmp_path / "file").write_bytes(content)
    assert _crc32(tmp_path / "file") == zlib.crc32(content)


def test_out_of_memory_is_no_damage(text, left, monkeypatch):
    """torch wraps what the reading and the writing of a checkpoint raise."""

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    settings = {"data": text, "save_every": 3}
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointReader, "read_data", fail)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            run(settings, "prenorm", left)
    monkeypatch.setattr(dcp, "save", fail)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run(settings, "prenorm", left)
    assert steps(left) == [3, 6]


def test_ctrl_c_while_a_checkpoint_is_written_is_no_full_disk(text, left, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run({"data": text, "save_every": 3}, "prenorm", left)
    assert steps(left) == [3, 6]


class Scaled(PreNorm):
    """Its output has a learned factor."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.factor = float32_parameter(1)

    def reset_parameters(self):
        torch.nn.init.ones_(self.factor)


def test_a_method_that_has_lost_a_parameter(text, tmp_path, monkeypatch):
    """What the other weights fit by name is another method nevertheless."""
    monkeypatch.setattr("crosslayer.methods._registered", {})
    crosslayer.register_connection("scaled", Scaled)
    settings = Settings.from_options(**SMALL | {"data": text, "steps": 1})
    examples = LANGUAGE_TASK.load_examples(settings.data, settings.model.model_config)
    train_arm(settings, "scaled", 0, examples, folder=str(tmp_path))
    crosslayer.register_connection("scaled", type("Scaled", (PreNorm,), {}))
    with pytest.raises(ValueError, match=r"it has .*factor, which the model lacks"):
        train_arm(settings, "scaled", 0, examples, folder=str(tmp_path))


def test_the_random_state_of_the_caller(text):
    settings = Settings.from_options(**SMALL | {"data": text, "steps": 1})
    examples = LANGUAGE_TASK.load_examples(settings.data, settings.model.model_config)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train_arm(settings, "prenorm", 0, examples)
    assert torch.equal(torch.rand(3), expected)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    steps_taken = [99_999_999, 100_000_000, 8]
    for step in steps_taken:
        (tmp_path / checkpoint_name(step)).mkdir()
    (tmp_path / "step-00000009.part").mkdir()
    (tmp_path / "step-400").mkdir()  # a model's
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-00000008", "step-00000009.part", "step-99999999", "step-100000000"]


def test_a_checkpoint_is_unfinished_while_it_is_removed(tmp_path, monkeypatch):
    def stop(path):
        raise KeyboardInterrupt

    (tmp_path / checkpoint_name(8)).mkdir()
    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(tmp_path / checkpoint_name(8))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008.part"]


def make_trainer(text, arm, seed=0, **options):
    settings = Settings.from_options(**SMALL | {"data": text} | options)
    examples = LANGUAGE_TASK.load_examples(settings.data, {})
    model = build_model(settings, arm, examples.num_classes, 0)
    row = Arm.from_row(arm)
    return Trainer(launch_fabric(settings.engine), model, examples, settings, row, seed)


def test_evaluation_has_no_more_in_memory_than_training(text, monkeypatch):
    batches = []

    def remember(*arguments):
        batches.append(arguments[5])
        return {"loss": 1.0}

    monkeypatch.setattr("crosslayer.train.trainer.evaluate_examples", remember)
    make_trainer(text, "prenorm", batch=8, accumulate=4).evaluate()
    assert batches == [2]


def test_examples_that_fill_up_a_batch_are_not_evaluated(text):
    trainer = make_trainer(text, "prenorm")
    (dataset,) = trainer.examples.valid.values()
    five = range(1, 6)
    evaluate = partial(evaluate_examples, trainer.fabric, trainer.module, LANGUAGE_TASK, dataset)
    expected = next_token_loss(trainer.model, torch.stack([dataset[index] for index in five]))
    assert evaluate([*five], 4)["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_validation_is_without_dropout(text):
    trainer = make_trainer(text, "hyper", family="gpt2", model_config={"resid_pdrop": 0.5})
    trainer.module.train()
    assert trainer.evaluate() == trainer.evaluate()
    assert trainer.module.training


def test_each_step_of_each_seed_and_rank_has_another_dropout(text, monkeypatch):
    seen = []

    def remember(model, batch):
        seen.append(torch.initial_seed())
        return next_token_loss(model, batch)

    for seed, rank in itertools.product((0, 1), (0, 1)):
        trainer = make_trainer(text, "prenorm", seed, steps=3)
        trainer.task = LANGUAGE_TASK._replace(loss=remember)
        trainer._batches = trainer.training_batches(0)
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.fabric), "global_rank", rank)
            for _ in range(3):
                trainer.step()
    assert len(set(seen)) == 12


def test_mixed_precision_is_autocast(text):
    seen = []
    for precision in ("bf16-mixed", "32-true"):
        trainer = make_trainer(text, "prenorm", precision=precision)
        trainer.model.lm_head.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        diagnostics = LogDiagnostics(None, every=1)
        diagnostics.on_fit_start(trainer)
        diagnostics.on_step(trainer, trainer.step())
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_the_change_of_loss_at_a_switch(text):
    trainer = make_trainer(text, "prenorm", steps=3, evals=1)
    switch = ConnectAtStep(3, "highway")
    with pytest.warns(UserWarning, match="connecting highway changes the outputs"):
        trainer.fit([switch])
    (name,) = trainer.examples.valid
    before = trainer.state.curve[-1][1][name]["loss"]
    change = trainer.evaluate()[name]["loss"] - before
    assert abs(change) > 1e-4
    assert switch.loss_change == pytest.approx(change)


def test_a_run_that_changes_its_connection(text, tmp_path):
    trainer, expected = make_trainer(text, "prenorm"), make_trainer(text, "hyper")
    trainer.fit([ConnectAtStep(4, "hyper"), SaveCheckpoints(tmp_path, every=6)])
    expected.measure_costs()
    assert trainer.result().connection == "hyper"
    assert trainer.result().method_code == code_digest(make("hyper").method)
    with pytest.raises(ValueError, match="another run, with connection = 'hyper'"):
        SaveCheckpoints(tmp_path, every=6).resume(make_trainer(text, "prenorm"))
    assert trainer.result().activation_bytes == expected.activation_bytes
    assert trainer.forward_flops == expected.forward_flops
    # the backbone's states of the optimizer are kept: they have counted all 12 steps
    (optimizer,) = trainer.optimizers
    steps_taken = {
        name: optimizer.state[p]["step"].item() for name, p in trainer.model.named_parameters()
    }
    assert steps_taken == {name: 8 if ".connection" in name else 12 for name in steps_taken}
    assert {*steps_taken.values()} == {8, 12}
    with pytest.raises(ValueError, match="a compiled model cannot change its connection"):
        make_trainer(text, "prenorm", compile="layers").fit([ConnectAtStep(4, "hyper")])
    with pytest.raises(ValueError, match="a step from 1 to 12, got 13"):
        make_trainer(text, "prenorm").fit([ConnectAtStep(13, "hyper")])
    sharded = make_trainer(text, "prenorm", strategy="fsdp")  # of one process, so it is not
    ConnectAtStep(4, "hyper").on_fit_start(sharded)
    sharded.fabric = types.SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="a sharded model cannot change its connection"):
        ConnectAtStep(4, "hyper").on_fit_start(sharded)
    with pytest.raises(ValueError, match="unknown connection 'hyperr'"):
        ConnectAtStep(4, "hyperr")


def test_a_connection_that_comes_later_begins_as_that_of_the_seed(text):
    trainer = make_trainer(text, "prenorm", steps=1, evals=1)
    trainer.fit([ConnectAtStep(1, "mudd")])
    models = trainer.model, make_trainer(text, "mudd").model
    for later, first in zip(*map(find_connections, models), strict=True):
        for name, parameter in later.named_parameters(recurse=False):
            assert torch.equal(parameter, getattr(first, name)), name


def test_folders_of_other_names_are_left_alone(text, left):
    """A copy that someone made of a checkpoint, and a folder of notes."""
    shutil.copytree(left / "step-00000003", left / "step-00000003-keep")
    (left / "step-00000001-notes").mkdir()
    run({"data": text, "save_every": 3}, "prenorm", left)
    names = sorted(path.name for path in left.glob("step-*"))
    kept = ["step-00000001-notes", "step-00000003-keep", "step-00000009", "step-00000012"]
    assert names == kept


def test_each_run_has_its_own_loggers(text, monkeypatch):
    """W&B has one open run in a process, which the logger of the next run would continue."""
    events = []

    class Experiment:
        def __init__(self, name):
            self.finish = lambda exit_code: events.append(f"{name} ended with {exit_code}")

    class FakeLogger(Logger):
        version = None
        _experiment = None

        def __init__(self, name):
            self.fake_name = name

        name = property(lambda self: self.fake_name)

        @property
        def experiment(self):
            """As in lightning's loggers, which begin a run where there is none."""
            if self._experiment is None:
                self._experiment = Experiment(self.name)
                events.append(self.name)
            return self._experiment

        def log_metrics(self, metrics, step=None):
            assert self.experiment

        def log_hyperparams(self, *args, **kwargs): ...

    monkeypatch.setattr(
        "crosslayer.train.run.make_loggers", lambda names, folder, name: [FakeLogger(name)]
    )
    run({"data": text}, "prenorm", stop=11)
    with pytest.raises(ValueError, match="streams"):
        run({"data": text}, "hyper(streams=0)")  # which cannot be built
    run({"data": text}, "mudd")
    assert events == ["prenorm", "prenorm ended with 1", "mudd", "mudd ended with 0"]
    assert "_experiment" in WandbLogger.__init__.__code__.co_names, "as in FakeLogger"


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def change_class(stream):
    """A pickle that sets an attribute of a class of torch."""
    stream.write(b"ctorch.distributed.checkpoint.metadata\nMetadata\n")
    stream.write(b"(N}X\x05\x00\x00\x00ownedI1\nstb.")


def edit_metadata(folder, payload, marker):
    content = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as stream:
        if payload == "metadata":
            content.planner_data["x"] = Payload(marker)
            pickle.dump(content, stream)
        elif payload == "class":
            change_class(stream)
        else:  # a value of an optimizer, which is no tensor, is read from elsewhere
            value = io.BytesIO()
            torch.save(Payload(marker), value)
            shard = folder / "__0_0.distcp"
            for index, place in content.storage_data.items():
                if index.fqn == "optimizer.param_groups.0.lr":
                    place.offset, place.length = shard.stat().st_size, len(value.getvalue())
            shard.write_bytes(shard.read_bytes() + value.getvalue())
            pickle.dump(content, stream)


PAYLOADS = {
    "metadata": r".metadata names posix.system, which it must not contain",
    "class": r".metadata changes <class '.*Metadata'>",
    "value": r"optimizer.param_groups.0.lr is not a plain value",
}


def test_a_checkpoint_runs_no_code(text, run_left_at_7, tmp_path):
    """Whoever edits a checkpoint can correct its checksums too."""
    settings = {"data": text, "save_every": 3}
    for payload, message in PAYLOADS.items():
        folder = tmp_path / payload
        shutil.copytree(run_left_at_7, folder)
        checkpoint = folder / "step-00000006"
        edit_metadata(checkpoint, payload, tmp_path / "marker")
        index = json.loads((checkpoint / "checkpoint.json").read_text())
        for name in index["files"]:
            content = (checkpoint / name).read_bytes()
            index["files"][name] = len(content), zlib.crc32(content)
        (checkpoint / "checkpoint.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=rf"cannot be read \({message}\); remove it") as error:
            run(settings, "prenorm", folder)
        assert "\n" not in str(error.value) and not (tmp_path / "marker").exists()
    assert not hasattr(torch.distributed.checkpoint.metadata.Metadata, "owned")


def test_a_checkpoint_of_an_early_python_3_11(text, tmp_path, monkeypatch):
    """It pickles a member of an enumeration as getattr(class, name)."""
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    reduced = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(encoding, "__reduce_ex__", reduced)
    run({"data": text, "layers": 1}, "prenorm", tmp_path)
    (checkpoint,) = tmp_path.glob("step-*")
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert run({"data": text, "layers": 1}, "prenorm", tmp_path)["losses"] == []


@pytest.mark.parametrize(
    ("changed", "arm", "message"),
    [
        ({"lr": 1e-4}, "prenorm", "belongs to another run, with lr = 0.00075; here it is 0.0001"),
        ({"dim": 64}, "prenorm", "with dim = 32; here it is 64; choose another folder"),
        (
            {"model_config": {"rms_norm_eps": 1e-5}},
            "prenorm",
            "with model_config = {}; here it is {'rms_norm_eps'",
        ),
        ({"precision": "bf16-mixed"}, "prenorm", "with precision = '32-true'; here it is 'bf16"),
        ({}, "skip_gain", "with connection = 'prenorm'; here it is 'skip_gain'"),
    ],
)
def test_a_changed_recipe(text, run_left_at_7, changed, arm, message):
    with pytest.raises(ValueError, match=message):
        run({"data": text, "save_every": 3, **changed}, arm, run_left_at_7)


def test_options_that_may_change(text, left):
    changed = {"save_every": 4, "log_every": 3, "keep_checkpoints": 5, "workers": 1}
    run({"data": text, **changed}, "prenorm", left)
    assert steps(left) == [3, 6, 8, 12]


def test_a_run_from_before_an_option_existed(text, left):
    """What the option is now by default is what the run did."""
    identity = json.loads((left / "run.json").read_text())
    del identity["router_z_loss"]
    (left / "run.json").write_text(json.dumps(identity))
    run({"data": text, "save_every": 3}, "prenorm", left)
    assert steps(left)[-1] == 12


def test_changed_data(text, tmp_path):
    copy = tmp_path / "text.txt"
    copy.write_text(Path(text).read_text())
    run({"data": str(copy), "save_every": 3}, "prenorm", tmp_path / "run", stop=4)
    copy.write_text(copy.read_text() + "one line more\n")
    with pytest.raises(ValueError, match="belongs to another run, with data sha256"):
        run({"data": str(copy), "save_every": 3}, "prenorm", tmp_path / "run")
    other = copy.rename(tmp_path / "other.txt")
    with pytest.raises(ValueError, match=r"with data = '.*text\.txt'; here it is '.*other\.txt'"):
        run({"data": str(other), "save_every": 3}, "prenorm", tmp_path / "run")


def test_the_first_set_of_the_settings_is_the_result(text, tmp_path):
    """Also where a run that has ended is given its validation sets in another order."""
    words = Path(text).read_text()
    (tmp_path / "lower.txt").write_text(words.lower())
    (tmp_path / "upper.txt").write_text(words.upper())
    sets = {name: str(tmp_path / f"{name}.txt") for name in ("lower", "upper")}
    run({"data": str(text), "valid": sets, "save_every": 3}, "prenorm", tmp_path / "run")
    turned = {"data": str(text), "valid": dict(reversed(sets.items())), "save_every": 3}
    result = run(turned, "prenorm", tmp_path / "run")["result"]
    assert list(result["valid"]) == ["upper", "lower"]
    assert result["valid_loss"] == result["valid"]["upper"]["loss"]
    assert "lower loss" in result["metrics"]


def test_a_run_that_had_ended(text, tmp_path, capsys):
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = ["train", f"--data={text}", f"--out={tmp_path / 'run'}", *small, "--seed=3"]
    assert main(command) == 0
    assert "had ended already" not in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seed"] == 3
    results = tmp_path / "run" / "evaluation.json"
    results.write_text("{}")  # of crosslayer eval
    notes = tmp_path / "run" / "model" / "NOTES.md"
    notes.write_text("a user's")
    result = (tmp_path / "run" / "result.json").read_text()
    assert main([*command, "--recompute=layers"]) == 0
    assert "the run had ended already; nothing was trained" in capsys.readouterr().out
    assert notes.read_text() == "a user's"
    assert (tmp_path / "run" / "result.json").read_text() == result
    file = tmp_path / "file"
    file.touch()
    assert main([*command[:2], f"--out={file}", *small]) == 1
    assert f"{file}: a file is in the way of the output folder" in capsys.readouterr().err
    model = tmp_path / "run" / "model"
    assert main([*command[:2], f"--out={model}", *small]) == 1
    assert f"{model}: is a model's folder" in capsys.readouterr().err
    started = tmp_path / "comparison"  # without a result yet
    (started / "runs").mkdir(parents=True)
    assert main([*command[:2], f"--out={started}", *small]) == 1
    assert f"{started}: holds a comparison" in capsys.readouterr().err


def test_moved_data(text, tmp_path):
    copies = [tmp_path / name for name in ("text.txt", "moved.txt")]
    copies[0].write_text(Path(text).read_text())
    run({"data": str(copies[0]), "save_every": 3}, "prenorm", tmp_path / "run", stop=4)
    copies[0].rename(copies[1])
    again = run({"data": str(copies[1]), "save_every": 3}, "prenorm", tmp_path / "run")
    assert 0 < len(again["losses"]) < SMALL["steps"]


def test_another_run_overwrites_nothing(text, left):
    """run.json says whose folder it is, and where that is missing, a checkpoint does."""
    identity = left / "run.json"
    without_checkpoints = shutil.copytree(
        left, left.parent / "without", ignore=shutil.ignore_patterns("step-*")
    )
    identity.unlink()
    for folder in (left, without_checkpoints):
        kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match="belongs to another run, with seed = 0"):
            run({"data": text, "save_every": 3}, "prenorm", folder, seed=1)
        assert kept == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run({"data": text, "save_every": 3}, "prenorm", left)
    assert identity.exists()
    identity.write_text(identity.read_text()[:20])
    with pytest.raises(
        ValueError, match=r"run\.json: not JSON .*; remove it if the folder is this"
    ):
        run({"data": text, "save_every": 3}, "prenorm", left)


@pytest.mark.slow
def test_sigterm_saves_and_stops(text, tmp_path):
    command = [
        sys.executable,
        "-m",
        "crosslayer",
        "train",
        "--arm=mudd",
        f"--data={text}",
        "--steps=4000",
    ]
    command += [
        "--layers=2",
        "--dim=32",
        "--heads=2",
        "--context=32",
        "--diagnostics-every=1",
        f"--out={tmp_path / 'Run'}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.time() + 60
    while not (tmp_path / "Run" / "metrics.jsonl").exists() and time.time() < until:
        time.sleep(0.05)
    assert (tmp_path / "Run" / "metrics.jsonl").exists()
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    (step,) = steps(tmp_path / "Run")
    assert process.returncode == 130 and "Traceback" not in errors
    assert (
        f"Stopped after step {step}; saved as {tmp_path / 'Run'}/step-" in printed
        and 0 < step < 4000
    )


def test_a_signal_within_an_evaluation_stops_at_its_next_batch(text, tmp_path):
    """No step follows, and the resumed run makes the evaluation: it logs what no signal leaves."""
    asked = 0

    def evaluate(model, examples, indices):
        nonlocal asked
        asked += 1
        if asked == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return LANGUAGE_TASK.evaluate(model, examples, indices)

    settings = {"data": text, "diagnostics_every": 1, "steps": 6, "evals": 3, "eval_batches": 2}
    settings |= {"save_every": 2, "accumulate": 2}
    undisturbed = run(settings, "mudd", tmp_path / "undisturbed")
    with pytest.raises(RunStopped, match=r"Stopped after step 4; saved as .*step-00000004"):
        run(settings, "mudd", tmp_path / "run", task=LANGUAGE_TASK._replace(evaluate=evaluate))
    assert asked == 6
    shutil.copytree(tmp_path / "run", tmp_path / "other evaluations")
    (tmp_path / "run" / "step-00000004").rename(tmp_path / "run" / "step-00000004.replaced")
    resumed = run(settings, "mudd", tmp_path / "run")
    assert resumed["losses"] == undisturbed["losses"][3:]  # that of the step before is shown again
    assert resumed["weights"] == undisturbed["weights"]
    assert resumed["result"]["curve"] == undisturbed["result"]["curve"]
    lines = [without_times(tmp_path / name / "metrics.jsonl") for name in ("run", "undisturbed")]
    assert lines[0] == lines[1]
    # a step that is not evaluated any more is not waited for
    fewer = run(settings | {"evals": 1}, "mudd", tmp_path / "other evaluations")
    assert fewer["weights"] == undisturbed["weights"]
    assert [step for step, _ in fewer["result"]["curve"]] == [2, 6]


def test_an_evaluation_that_is_made_again_is_logged_once(text, tmp_path):
    """The run is killed after a resumed evaluation, before its next checkpoint."""
    settings = {"data": text, "steps": 6, "evals": 3, "eval_batches": 4}

    def stop(model, examples, indices):
        os.kill(os.getpid(), signal.SIGTERM)
        return LANGUAGE_TASK.evaluate(model, examples, indices)

    with pytest.raises(RunStopped, match="Stopped after step 2"):
        run(settings, "mudd", tmp_path, task=LANGUAGE_TASK._replace(evaluate=stop))
    run(settings, "mudd", tmp_path, stop=3)
    run(settings, "mudd", tmp_path)
    steps_of_lines = [line["step"] for line in without_times(tmp_path / "metrics.jsonl")]
    assert steps_of_lines == [2, 4, 6]


def without_times(file):
    """The lines of a metrics.jsonl without what depends on the machine."""
    timed = {"tokens_per_second", "seconds", "seconds_left", "memory", "mfu", "time"}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def failing_task(at, value):
    """Language modelling with a loss that is multiplied by `value` in one step."""
    calls = iter(range(10**6))

    def loss(model, batch):
        loss = next_token_loss(model, batch)
        # call 0 measures memory, before the first step
        return loss * value if next(calls) == at else loss

    return LANGUAGE_TASK._replace(loss=loss)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_stops_or_is_skipped(text, tmp_path, value):
    settings = {"data": text, "save_every": 3, "steps": 9}
    message = r"prenorm: the loss is (nan|inf) at step 8; the last checkpoint is .*06"
    with pytest.raises(RunDiverged, match=message):
        run(settings, "prenorm", tmp_path / "stop", task=failing_task(8, value))
    with pytest.raises(RunDiverged, match=r"at step 7; the last checkpoint is .*06"):
        run(settings, "prenorm", tmp_path / "stop", task=failing_task(1, value))
    skipping = run(
        {**settings, "unstable": "skip"},
        "prenorm",
        tmp_path / "skip",
        task=failing_task(8, value),
    )
    assert skipping["result"]["skipped"] == [8]
    assert math.isfinite(skipping["result"]["valid_loss"])
    assert run(settings, "prenorm")["losses"][:7] == skipping["losses"][:7]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_before_the_first_accepted_step_changes_nothing(text, tmp_path, optimizer):
    settings = {"data": text, "steps": 4, "unstable": "skip", "ema": 0.5, "optimizer": optimizer}
    whole = run(settings, "prenorm", task=failing_task(1, math.nan))
    assert whole["result"]["skipped"] == [1]
    saving = settings | {"save_every": 1}
    task = failing_task(1, math.nan)
    assert run(saving, "prenorm", tmp_path / "saved", task=task)["weights"] == whole["weights"]
    for stop, saved in ((2, [1]), (4, [2, 3])):  # later the optimizer has states to restore
        folder = tmp_path / f"left at {stop}"
        run(saving, "prenorm", folder, stop=stop, task=failing_task(1, math.nan))
        assert steps(folder) == saved
        assert run(saving, "prenorm", folder)["weights"] == whole["weights"]


def test_a_run_that_skips_most_steps_fails(text, tmp_path):
    task = LANGUAGE_TASK._replace(
        loss=lambda model, batch: next_token_loss(model, batch) * math.nan
    )
    options = {**SMALL, "data": text, "unstable": "skip", "steps": 3}
    recipe = Recipe([Arm.from_row("prenorm")], options, task=task)
    message = "prenorm: 2 of 3 steps were skipped and the loss is nan at step 2; there is no"
    with pytest.raises(ValueError, match=message):
        train_and_export(recipe, recipe.arms[0], 0, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()


def test_steps_that_were_skipped_long_ago_end_no_run(text):
    trainer = make_trainer(text, "prenorm", steps=500, unstable="skip")
    trainer.state.skipped = [*range(1, 151)]
    trainer._skip_or_raise(401, math.nan, 1.0)
    trainer.state.skipped = [*range(301, 401)]
    with pytest.raises(RunDiverged, match="101 of 200 steps were skipped"):
        trainer._skip_or_raise(401, math.nan, 1.0)


def unreadable_validation(model, batch, indices):
    return {"loss": torch.full([len(batch)], math.nan)}


def test_a_non_finite_validation_loss_fails(text, tmp_path):
    task = LANGUAGE_TASK._replace(evaluate=unreadable_validation)
    options = {**SMALL, "data": text, "steps": 2, "evals": 1}
    recipe = Recipe([Arm.from_row("prenorm")], options, task=task)
    message = "prenorm: the loss on the validation set held-out is nan at step 2; there is no"
    with pytest.raises(ValueError, match=message):
        train_and_export(recipe, recipe.arms[0], 0, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_a_non_finite_validation_loss_fails_a_comparison(text, tmp_path):
    task = LANGUAGE_TASK._replace(evaluate=unreadable_validation)
    options = {**SMALL, "data": text, "steps": 2, "evals": 1}
    recipe = Recipe([Arm.from_row("prenorm")], options, task=task)
    assert compare_and_report(recipe, 1, str(tmp_path / "compared")) == 1


def test_a_loss_that_rises_too_far(text):
    settings = {"data": text, "steps": 30, "max_loss_rise": 3.0}
    message = (
        r"prenorm: the loss is 2\d\.\d+, 1\d\.\d+ above its running mean \(max_loss_rise=3\), "
        "at step 25; there is no checkpoint"
    )
    with pytest.raises(RunDiverged, match=message):
        run(settings, "prenorm", task=failing_task(25, 4.0))
    skipping = run({**settings, "unstable": "skip"}, "prenorm", task=failing_task(25, 4.0))
    assert skipping["result"]["skipped"] == [25]
    early = run(settings, "prenorm", task=failing_task(20, 4.0))
    assert early["result"]["skipped"] == [], "the first 20 steps have no limit"
    with pytest.raises(RunDiverged, match="at step 21"):
        run(settings, "prenorm", task=failing_task(21, 4.0))
    unchecked = run({**settings, "max_loss_rise": 0.0}, "prenorm", task=failing_task(25, 4.0))
    assert unchecked["result"]["skipped"] == []
    state = RunState(running_loss=2.0)
    assert state.accept_loss(3.0, grad_norm=1.0, max_loss_rise=0.0)
    assert state.running_loss == pytest.approx(2.05)


def test_a_non_finite_gradient_is_named(text):
    class Steep(torch.autograd.Function):  # a finite loss with an infinite gradient
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    steep = LANGUAGE_TASK._replace(
        loss=lambda model, batch: Steep.apply(next_token_loss(model, batch))
    )
    message = r"the loss is 5\.\d+ and the norm of its gradient (nan|inf) at step 1; there is no"
    with pytest.raises(RunDiverged, match=message):
        run({"data": text}, "prenorm", task=steep)


def test_perplexity_of_a_diverged_run_is_infinite():
    tokenizer = Tokenizer("bpe:300", 300, 0, "{}")
    examples = Examples(None, {}, 300, "", {}, tokenizer=tokenizer)
    evaluation = {"held-out": {"loss": 1000.0}}
    assert summarise_metrics(examples, evaluation) == {"perplexity": math.inf}


def test_what_a_kill_leaves_is_cleaned_up(text, tmp_path):
    settings = {"data": text, "save_every": 3, "log_every": 1, "layers": 1}
    whole = run(settings, "prenorm")
    run(settings, "prenorm", tmp_path / "run", stop=8)
    for name in ("9.part", "6.replaced", 8, 2):  # half written, replaced and half deleted
        folder = tmp_path / "run" / f"step-0000000{name}"
        folder.mkdir()
        (folder / "__0_0.distcp").touch()
    (tmp_path / "run" / "step-00000006.part").touch()
    (tmp_path / "run" / "step-best.replaced").mkdir()  # no name of a checkpoint
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)[:6]
    # a line without its end, and what is no line of a log
    metrics.write_bytes(b"\xff\n12\n{}\n" + b"".join(lines)[:-1])
    again = run(settings, "prenorm", tmp_path / "run")
    assert again["weights"] == whole["weights"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "metrics.jsonl",
        "model",
        "run.json",
        "step-00000009",
        "step-00000012",
        "step-best.replaced",
    ]
    steps_logged = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert set(steps_logged) == set(range(1, 13))


def test_a_folder_in_use_is_refused(text, tmp_path, capsys):
    small = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    for command in ("train", "compare"):
        folder = tmp_path / command
        with lock_folder(folder):
            assert main([command, f"--data={text}", *small, f"--out={folder}"]) == 1
        printed = capsys.readouterr().err
        assert f"{folder}: in use by process {os.getpid()} on" in printed
        assert printed.count("\n") == 1


def test_what_is_in_the_way_is_left_as_it_is(text, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("years of work")
    command = [
        "train",
        f"--data={text}",
        "--layers=1",
        "--dim=16",
        "--heads=2",
        "--context=16",
        "--steps=1",
    ]
    assert main([*command, f"--out={tmp_path}"]) == 1
    assert "a model that no run wrote there; choose another --out" in capsys.readouterr().err
    assert (tmp_path / "model" / "mine.txt").exists()
    assert main([*command, "--context=99999", f"--out={tmp_path / 'run'}"]) == 1
    assert not (tmp_path / "run").exists(), "what is wrong with the data leaves nothing"


@pytest.mark.slow
def test_a_run_with_parameters_without_gradients_resumes(text, tmp_path):
    """The optimizer has no state of them: the bias of BERT's head is beside the loss's path."""
    settings = {"data": text, "family": "bert", "save_every": 4}
    whole = run(settings, "mudd", tmp_path / "whole")
    run(settings, "mudd", tmp_path / "parts", stop=6)
    rest = run(settings, "mudd", tmp_path / "parts")
    assert rest["losses"] == whole["losses"][4:] and rest["weights"] == whole["weights"]
    # nor has it one after the run is resumed: AdamW would count a step that there was not
    trainers = [make_trainer(text, "mudd", family="bert", steps=1, evals=1) for _ in range(2)]
    checkpoints = SaveCheckpoints(tmp_path / "one step")
    trainers[0].fit([checkpoints])
    checkpoints.resume(trainers[1])
    assert logging.getLogger().isEnabledFor(logging.WARNING), "torch's logs alone are silenced"
    without_state = [
        {name for name, p in trainer.model.named_parameters() if p not in optimizer.state}
        for trainer in trainers
        for optimizer in trainer.optimizers
    ]
    assert without_state[0] == without_state[1] and len(without_state[0]) == 1


def test_accumulation_is_the_whole_batch(text, tmp_path):
    whole, parts = (run({"data": text, "accumulate": n}, "mudd") for n in (1, 4))
    assert max(abs(a - b) for a, b in zip(whole["losses"], parts["losses"], strict=True)) < 2e-5
    with pytest.raises(
        ValueError, match="batch must be a multiple of ranks × accumulate, got 4 for 1 × 3"
    ):
        run({"data": text, "accumulate": 3}, "mudd", tmp_path)
    assert not (tmp_path / "run.json").exists(), "the folder is free for the right options"


@pytest.mark.parametrize("recompute", ["reads", "streams", "layers"])
def test_recomputation_is_bitwise_identical(text, recompute, recomputing_nothing):
    plain = recomputing_nothing
    again = run({"data": text, "recompute": recompute, "diagnostics_every": 5}, "mudd")
    assert plain["weights"] == again["weights"]
    assert again["result"]["activation_bytes"] < 0.85 * plain["result"]["activation_bytes"]


def test_recomputed_reads_with_hidden_states():
    model = connected("llama", "mudd")
    expected = model(ids(), output_hidden_states=True).hidden_states
    model = prepare_model(model, EngineSettings(recompute="reads"))
    states = model(ids(), output_hidden_states=True).hidden_states
    assert equal_lists(states, expected)


@pytest.mark.slow
def test_inversion_is_as_good_as_streams_that_are_kept(text):
    settings = {"data": text, "layers": 6}
    plain, again = (run({**settings, "recompute": how}, "mgr") for how in ("none", "inversion"))
    assert max(abs(a - b) for a, b in zip(plain["losses"], again["losses"], strict=True)) < 1e-5
    assert again["result"]["activation_bytes"] < 0.7 * plain["result"]["activation_bytes"]


def test_recomputation_that_is_not_supported(text):
    with pytest.raises(
        ValueError,
        match='"inversion" is not supported by hyper',
    ):
        run({"data": text, "recompute": "inversion"}, "hyper")
    with pytest.raises(
        ValueError,
        match=r"inversion needs the streams in float32; use mgr\(stream_dtype='float32'\)",
    ):
        run({"data": text, "recompute": "inversion", "precision": "bf16-true"}, "mgr")
    with pytest.raises(
        ValueError,
        match="recompute='streams' and compile='layers' exclude each other; with compile,",
    ):
        run({"data": text, "recompute": "streams", "compile": "layers"}, "hyper")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("compile", "arm", "layers"), [("layers", "mudd", 2), ("model", "hyper", 1)]
)
def test_compiled(text, compile, arm, layers, monkeypatch):
    """Also with more graphs than the compiler's limit: a dense method has one a layer."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    settings = {"data": text, "layers": layers, "steps": 2, "diagnostics_every": 2}
    plain, counted = run(settings, arm), torch._dynamo.utils.counters
    counted.clear()
    found = run({**settings, "compile": compile}, arm)
    assert max(abs(a - b) for a, b in zip(plain["losses"], found["losses"], strict=True)) < 2e-4
    assert counted["stats"]["unique_graphs"] >= (layers if compile == "layers" else 1)
    assert not counted["graph_break"] and not counted["recompile_limit"]


@pytest.mark.parametrize(("evals", "is_known"), [(1, False), (2, True)])
def test_an_evaluation_that_compiles_is_not_timed(text, monkeypatch, evals, is_known):
    monkeypatch.setattr(torch, "compile", lambda model: model)  # how long it takes does not matter
    settings = {"data": text, "steps": 2, "evals": evals}
    assert run(settings, "prenorm")["result"]["inference_speed"] > 0
    found = run({**settings, "compile": "model"}, "prenorm")["result"]
    assert (found["inference_speed"] is not None) == is_known


def test_the_speed_of_the_fastest_evaluation_is_kept(text):
    trainer = make_trainer(text, "prenorm")
    trainer.state.inference_speed = 1e9
    trainer.evaluate()
    assert trainer.state.inference_speed == 1e9


def test_bf16_bodies_keep_float32_connections(text, tmp_path):
    run({"data": text, "precision": "bf16-true"}, "mudd", tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in saved.items():
        own = name.rsplit(".", 1)[-1] in ("W1", "W2", "a")
        assert value.dtype == (torch.float32 if own else torch.bfloat16), name


def test_delayed_connections_do_not_move(text, tmp_path):
    early = run({"data": text, "delay": 12}, "denseformer", tmp_path / "never")
    plain = run({"data": text}, "prenorm")
    assert early["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    late = run({"data": text, "delay": 6}, "denseformer")
    assert late["losses"][:7] == early["losses"][:7] and late["losses"][8:] != early["losses"][8:]


def test_metrics_and_diagnostics(text, tmp_path):
    run(
        {"data": text, "diagnostics_every": 6, "log_every": 4, "loggers": ["tensorboard"]},
        "hyper",
        tmp_path,
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    watched = [line for line in lines if "gain/0" in line]
    assert [line["step"] for line in watched] == [6, 12]
    assert {key.split("/")[0] for key in watched[0]} == {"step", "stream", "gate", "gain"}
    assert watched[0]["gate/0"] == pytest.approx(1, abs=0.1) and watched[0][
        "gain/0"
    ] == pytest.approx(4, abs=1.5)
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "memory", "mfu"} <= lines[0].keys()
    assert any((tmp_path / "tensorboard").glob("events*"))
    quiet = run({"data": text}, "hyper")
    assert quiet["losses"] == run({"data": text, "diagnostics_every": 1}, "hyper")["losses"], (
        "diagnostics change nothing"
    )


def test_the_gain_of_a_plain_residual_is_one(text, tmp_path):
    run({"data": text, "diagnostics_every": 12}, "prenorm", tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert [last[f"gain/{k}"] for k in range(5)] == pytest.approx([1.0] * 5, abs=1e-5)


def test_the_size_of_what_a_sublayer_reads(text):
    trainer = make_trainer(text, "prenorm", family="llama")
    ids = next(trainer.training_batches(0))[:, :-1]
    found = connection_diagnostics(trainer.model, lambda: trainer.model(ids))
    embedding = trainer.model.model.embed_tokens(ids[0])
    assert found["stream/0"] == pytest.approx(embedding.square().mean().sqrt().item(), rel=1e-5)


def test_several_validation_sets(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("All happy families are alike. " * 99)
    settings = {"data": text, "valid": {"tolstoy": str(other), "same": text}, "log_every": 4}
    with pytest.warns(UserWarning, match="is in the training data and in the validation set same"):
        found = run(settings, "prenorm", tmp_path / "run")["result"]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    logged = [line[f"{name} loss"] for name in ("tolstoy", "same")]
    assert logged == [values["loss"] for values in found["valid"].values()]
    assert (
        list(found["valid"]) == ["tolstoy", "same"]
        and found["valid_loss"] == found["valid"]["tolstoy"]["loss"]
    )
    named = {"bits/byte", "same loss", "same bits/byte", "mean loss", "mean bits/byte"}
    assert {"training loss", *named} == found["metrics"].keys()
    assert found["metrics"]["bits/byte"] == pytest.approx(found["valid_loss"] / math.log(2))


def test_the_result_is_that_of_the_last_evaluation(text):
    trainer = make_trainer(text, "prenorm")
    (name,) = trainer.examples.valid
    trainer.state.curve = [[step, {name: {"loss": loss}}] for step, loss in ((6, 1.0), (12, 3.0))]
    result = trainer.result()
    assert result.valid_loss == result.valid[name]["loss"] == 3
    assert result.curve == [[6, 1.0], [12, 3.0]]


def test_means_over_groups_of_sets_and_over_steps(text, tmp_path, monkeypatch):
    for number, name in enumerate(("c4", "pile", "wiki")):
        words = "the quick brown fox " * number  # of the training set, so with fewer tokens a byte
        (tmp_path / name).write_text(f"{words}All happy families of {name} are alike. " * 99)
    valid = {name: str(tmp_path / name) for name in ("c4", "pile", "wiki")}
    groups = {"V2": ["c4", "pile"], "V3": ["wiki"]}
    settings = {"data": text, "valid": valid, "valid_groups": groups, "tokenizer": "bpe:300"}
    monkeypatch.setattr("crosslayer.train.run_state.RECENT_STEPS", 5)
    found = run({**settings, "layers": 1}, "prenorm")
    result, metrics = found["result"], found["result"]["metrics"]
    losses = [result["valid"][name]["loss"] for name in valid]
    perplexities = [math.exp(loss) for loss in losses]
    assert metrics["V2 loss"] == statistics.fmean(losses[:2])
    assert metrics["V2 perplexity"] == statistics.fmean(perplexities[:2])
    assert metrics["V3 perplexity"] == perplexities[2]
    assert metrics["mean perplexity"] == statistics.fmean(perplexities)
    assert metrics["training loss"] == statistics.fmean(found["losses"][-5:])
    options = Settings.from_options(**SMALL | settings)
    windows = LANGUAGE_TASK.load_examples(options.data, {}).valid
    for name, loss in zip(valid, losses, strict=True):
        tokens_per_byte = len(windows[name].tokens) / (tmp_path / name).stat().st_size
        label = "" if name == "c4" else f"{name} "
        assert metrics[f"{label}bits/byte"] == pytest.approx(loss / math.log(2) * tokens_per_byte)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"V2": ["hel-out"]}, "'V2' names 'hel-out', which is no validation set (did you mean"),
        ({"V2": []}, "'V2' names no validation set"),
        ({"held-out": ["held-out"]}, "the name 'held-out' is taken already"),
        ({"mean": ["held-out"]}, "the name 'mean' is taken already"),
        ({"training": ["held-out"]}, "the name 'training' is taken already"),
    ],
)
def test_wrong_groups(text, groups, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run({"data": text, "valid_groups": groups}, "prenorm")


@pytest.mark.parametrize("tokenizer", ["bpe:300", "bytes"])
def test_a_trained_model_is_a_folder_for_anyone(text, tmp_path, tokenizer, capsys):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "layers: 2\ndim: 32\nheads: 2\ncontext: 32\nbatch: 4\n"
        "arms:\n- mudd\n- {name: plain, connection: prenorm}\n"
    )
    command = [
        "train",
        str(recipe),
        f"--data={text}",
        "--steps=3",
        f"--tokenizer={tokenizer}",
        "--arm=mudd",
    ]
    assert main([*command, f"--out={tmp_path / 'run'}"]) == 0
    import crosslayer

    model = crosslayer.from_pretrained(tmp_path / "run" / "model")
    assert model.config.crosslayer == "mudd" and model.config.vocab_size == (
        256 if tokenizer == "bytes" else 300
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["arm"] == "mudd" and result["settings"]["steps"] == 3
    assert (
        main(["generate", str(tmp_path / "run" / "model"), "the quick", "--max-new-tokens=3"]) == 0
    )
    capsys.readouterr()
    assert main([*command[:-1], f"--out={tmp_path / 'run2'}"]) == 1
    assert "choose one of the recipe's arms with --arm: mudd, plain" in capsys.readouterr().err
    assert main([*command[:-1], "--arm=plan", f"--out={tmp_path / 'run2'}"]) == 1
    assert "did you mean 'plain'?" in capsys.readouterr().err


def test_a_model_takes_the_place_of_a_model_alone(text, tmp_path):
    settings = Settings.from_options(**SMALL | {"data": text, "steps": 1})
    examples = LANGUAGE_TASK.load_examples(settings.data, settings.model.model_config)
    trainer = train_arm(settings, Arm.from_row("prenorm"), 0, examples, folder=tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{}")
    files = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match=r"run: has files and is no saved model, .*/run/model"):
        export_trained(trainer, tmp_path / "run")
    assert sorted((tmp_path / "run").rglob("*")) == files
    (tmp_path / "run" / "model.old").mkdir()  # a copy that someone kept
    for _ in range(2):
        export_trained(trainer, tmp_path / "run" / "model")
    assert sorted(path.name for path in (tmp_path / "run").glob("model*")) == ["model", "model.old"]


def test_a_signal_between_two_runs_stops_the_second():
    with StopSignals() as whole:
        os.kill(os.getpid(), signal.SIGINT)
        with StopSignals() as second:
            assert second.ask_to_stop
    assert whole.received == signal.SIGINT
    with StopSignals() as later:
        assert not later.ask_to_stop
        with StopSignals():  # the last evaluation of a run does not ask for signals
            os.kill(os.getpid(), signal.SIGTERM)
        assert later.received == signal.SIGTERM
    with whole:  # as a trainer whose `fit` is called again
        assert not whole.ask_to_stop


def test_a_handler_of_other_code_than_pythons_is_no_error(monkeypatch):
    """Python knows it as None, and cannot set it again."""
    set_handler, handlers = signal.signal, []

    def set_over_foreign_code(number, handler):
        handlers.append((number, handler))
        set_handler(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(signal, "signal", set_over_foreign_code)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.ask_to_stop
        assert handlers[2:] == [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_DFL)]
    finally:
        for number, handler in before.items():
            set_handler(number, handler)
