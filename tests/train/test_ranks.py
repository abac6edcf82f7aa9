"""The same run on one process and on two (DDP, FSDP2), also resumed on another number of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from crosslayer.cli.main import main
from crosslayer.files import lock_folder
from tests.train.runs import SMALL, run

HERE = Path(__file__).parent
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# what both strategies run
BOTH = (
    ("mudd", {"accumulate": 2, "recompute": "layers"}),
    ("mgr", {"optimizer": "muon", "delay": 5}),
    ("hyper", {"precision": "bf16-mixed"}),
    ("mudd", {"family": "bert", "model_config": NO_DROPOUT}),  # has a parameter without a gradient
)
# a method of each other kind of state (the law on FSDP2 has every method), and what FSDP's own
# gathering of weights could change
FSDP = (
    ("resi_dual", {}),
    ("denseformer", {"compile": "layers"}),
    ("hyper", {"recompute": "reads", "diagnostics_every": 4}),
    ("mudd", {"recompute": "streams", "diagnostics_every": 4, "layers": 5}),
    ("mgr", {"recompute": "inversion", "layers": 5}),
    ("mhc", {"precision": "bf16-true"}),
    ("mudd", {"precision": "bf16-mixed", "family": "gpt_neox"}),  # norms with a bias
)
# a sum over ranks is in another order than over a batch: float32's rounding, grown over 12 steps;
# bf16 rounds a weight in FSDP's gather where autocast rounds it at its use; and Muon iterates in
# bf16
TOLERANCE = {"32-true": 2e-5, "bf16-mixed": 5e-3, "bf16-true": 5e-3}
MUON = 1e-3


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(arguments, environment):
    """Two ranks. Where one crashes, its stack is shown: the errors of the other follow it."""
    done = subprocess.run(
        [*TORCHRUN, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
    )
    crash = done.stderr.partition("Fatal Python error")[2]
    assert done.returncode == 0, crash[:4000] + done.stderr[-4000:]


def two_ranks(jobs, folder):
    spec, out = folder / "spec.json", folder / "out.json"
    spec.write_text(json.dumps(jobs))
    torchrun([HERE / "runs.py", spec, out], {"OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text())


def apart(found, expected):
    return max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))


@pytest.mark.slow
def test_two_ranks_equal_one(text, tmp_path):
    cases = [("ddp", *case) for case in BOTH] + [("fsdp", *case) for case in BOTH + FSDP]
    jobs = [
        {"settings": {"data": text, "strategy": strategy, **settings}, "arm": arm}
        for strategy, arm, settings in cases
    ]
    found = two_ranks(jobs, tmp_path)
    alone = {
        str(case): run({"data": text, **case[1], "compile": "none"}, case[0])
        for case in BOTH + FSDP
    }
    wrong = {}
    for (strategy, arm, settings), two in zip(cases, found, strict=True):
        one = alone[str((arm, settings))]
        gap = max(apart(two, one), abs(two["result"]["valid_loss"] - one["result"]["valid_loss"]))
        tolerance = TOLERANCE[settings.get("precision", "32-true")]
        if gap > (MUON if "optimizer" in settings else tolerance):
            wrong[strategy, arm, str(settings)] = gap
    assert not wrong


@pytest.mark.slow
def test_an_error_of_one_rank_is_one_of_both(text, tmp_path):
    """Otherwise the other rank waits for it."""
    paths = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    torchrun([HERE / "failing_rank.py", text, tmp_path], {"PYTHONPATH": paths})
    errors = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    unwritten = "step-00000002 cannot be written (planted); there is no other"
    for of_rank in errors:
        assert of_rank["replace_folder"].endswith(unwritten)
        assert of_rank["_crc32"].endswith(unwritten)
        assert of_rank["model"] == "planted"
        assert of_rank["log"] == f"{tmp_path / 'log' / 'metrics.jsonl'}: not a file"
        assert of_rank["data"] == (
            "rank 1: rank 0 has another run, with data sha256 = 'a'; here it is 'b'; all ranks "
            "need the same data and options"
        )
        assert of_rank["options"] == (
            "rank 1: rank 0 has another run, with save_every = 1; here it is 2; all ranks need the "
            "same data and options"
        )
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.slow
def test_from_two_ranks_to_one_and_back(text, tmp_path):
    """A run that is left on one number of ranks goes on on another."""
    shared = {"data": text, "save_every": 4, "keep_models": 3}
    whole = run(shared, "hyper", str(tmp_path / "whole"))
    jobs = [
        {
            "settings": {**shared, "strategy": strategy},
            "arm": "hyper",
            "folder": str(tmp_path / strategy),
            "stop": 9,
        }
        for strategy in ("ddp", "fsdp")
    ]
    two_ranks(jobs, tmp_path)
    back = []
    for job in jobs:
        rest = run(shared, "hyper", job["folder"])
        assert len(rest["losses"]) == 4
        assert apart(rest, {"losses": whole["losses"][8:]}) < 2e-5
        assert abs(rest["result"]["valid_loss"] - whole["result"]["valid_loss"]) < 2e-5

        back.append({**job, "folder": f"{job['folder']}-one", "stop": None})
        run(shared, "hyper", back[-1]["folder"], stop=9)
    for job, rest in zip(back, two_ranks(back, tmp_path), strict=True):
        assert len(rest["losses"]) == 4 and apart(rest, {"losses": whole["losses"][8:]}) < 2e-5
        assert Path(job["folder"], "model", "model.safetensors").exists()
        for folder in (job["folder"], job["folder"].removesuffix("-one")):
            assert model_gap(Path(folder) / "models", tmp_path / "whole" / "models") < 1e-4


def model_gap(found, expected):
    """The largest difference of a weight between two runs' kept models of the same steps."""
    steps = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == steps
    gaps = []
    for step in steps:
        weights, others = (
            load_file(path / step / "model.safetensors") for path in (found, expected)
        )
        assert weights.keys() == others.keys()
        gaps += [(weights[key] - others[key]).abs().max().item() for key in weights]
    return max(gaps)


def wait_for(condition, seconds=120):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until
        time.sleep(0.1)


def is_free(folder):
    try:
        with lock_folder(folder):
            return True
    except ValueError:
        return False


@pytest.mark.slow
def test_ranks_save_and_stop_when_torchrun_is_killed(text, tmp_path, capsys):
    settings = {**SMALL, "steps": 100_000, "data": text, "out": tmp_path / "run"}
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    agent = subprocess.Popen(
        [*TORCHRUN, "-m", "crosslayer", "train", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for((tmp_path / "run" / "metrics.jsonl").exists)
    assert main(["train", *options]) == 1
    assert f"{tmp_path / 'run'}: in use by process" in capsys.readouterr().err
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_for(lambda: is_free(tmp_path / "run"))
    assert list((tmp_path / "run").glob("step-*")), "they saved the run"


@pytest.mark.slow
def test_a_rank_that_starts_after_torchrun_was_killed_ends(text, tmp_path):
    variables = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # where nobody listens
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "crosslayer", "train", "--arm=prenorm", f"--data={text}"]
    run = subprocess.run(
        [*command, f"--out={tmp_path / 'out'}"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == -signal.SIGKILL
    assert "crosslayer: torchrun has ended, nobody answers at 127.0.0.1:1" in run.stderr
