"""The benchmarks: what they measure, and what a row states. No time is checked here."""

import csv
import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks.cases import OPS, kernel_ops
from benchmarks.chain import ConnectionChain, copy_sublayer
from benchmarks.evidence.pages import fill_page
from benchmarks.paired import time_with_prenorm
from benchmarks.peers import PEERS, DenseFormer
from benchmarks.results import CONDITIONS, check_columns
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import Timer, Timings, time_interleaved
from crosslayer import ops
from crosslayer.ops import dispatch
from tests.kernels.cases import CASES
from tools import update_benchmarks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TOY = {
    "device": "cpu",
    "dims": [16],
    "batch": 1,
    "context": 8,
    "layers": 1,
    "vocab": 32,
    "rounds": 2,
    "seconds": 0.0,
}
SPECS = {"specs": ["prenorm", "hyper(streams=2)"]}
OPTIONS = {  # benchmark -> its options besides TOY
    "ops": {"streams": [2], "ops": ["width_connection", "add_norm"], "variants": ["eager"]},
    "chain": {**SPECS, "variants": ["eager", "peers"]},
    "step": {**SPECS, "variants": ["eager"]},
    "decode": {**SPECS, "variants": ["eager"]},
    "memory": SPECS,
    "machine_code": {"ops": ["add_norm"]},
    "compile_time": SPECS,
    "launches": {"ops": ["add_norm", "write_norm_project joint"], "streams": [8]},
    "arms": {"study": "tokens-20", "arms": ["prenorm", "hyper"]},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and the compiler


def command_words(name: str, out: Path) -> list[str]:
    words = [name, "--out", str(out)]
    for option, value in (TOY | OPTIONS[name]).items():
        words += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return words


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


SLOW_BENCHMARKS = ("launches", "arms", "compile_time")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_BENCHMARKS else name
        for name in command_line.BENCHMARKS
    ],
)
def test_every_benchmark_writes_and_prints_its_rows(name, tmp_path, capsys):
    assert command_line.main(command_words(name, tmp_path)) == 0
    rows = read_rows(tmp_path / f"{name}.csv")
    assert tuple(rows[0])[: len(CONDITIONS)] == CONDITIONS and tuple(rows[0])[-1] == "note"
    assert all(row["commit"] and row["torch"] == torch.__version__ for row in rows)
    printed = capsys.readouterr().out
    assert "Rows appended" in printed
    measured = [row for row in rows if not row["note"]]
    assert len(measured) >= 2
    for row in measured:
        assert "not measured" not in row.values(), row
        assert row.get("connection", row.get("op")) in printed
    if name == "arms":  # what was measured is left out
        assert command_line.main(command_words(name, tmp_path)) == 0
        assert [row["arm"] for row in rows] == 3 * ["prenorm", "hyper"]
        assert len(read_rows(tmp_path / "arms.csv")) == 6
    assert rows[0]["command"].startswith(f"python -m benchmarks {name} --out")


@pytest.mark.slow
def test_compiled_arms_are_rows_of_their_own(tmp_path, monkeypatch):
    """A step, a forward pass and decoding of pre-norm and of the arm, whatever the study says."""
    monkeypatch.setattr("benchmarks.arms.MEASUREMENTS", 1)
    compiled = []

    def compile_eagerly(model, **options):
        compiled.append(type(model).__name__)
        return model

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    words = ["arms", "--study", "tokens-20-large", "--arms", "hyper", "--out", str(tmp_path)]
    numbers = []
    for variants in (["eager"], ["compiled"], ["eager", "compiled"]):
        options = ["--variants", *variants, "--rounds", "1", "--seconds", "0"]
        assert command_line.main([*words, *options]) == 0
        numbers.append(len(compiled))
    assert numbers == [0, 6, 6]
    assert [row["variant"] for row in read_rows(tmp_path / "arms.csv")] == ["eager", "compiled"]


def test_an_unknown_arm_is_not_finished_work(tmp_path, capsys):
    assert command_line.main(["arms", "--arms", "muddd", "--out", str(tmp_path)]) == 1
    printed, error = capsys.readouterr()
    assert printed == "" and "unknown arm 'muddd' (did you mean 'mudd'?)" in error


def test_rows_are_appended_to_a_file_of_the_same_columns_only(tmp_path):
    for _ in range(2):
        list(command_line.run_benchmark("memory", tmp_path, specs=["prenorm"], **TOY))
    assert len(read_rows(tmp_path / "memory.csv")) == 6
    (tmp_path / "memory.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        list(command_line.run_benchmark("memory", tmp_path, **TOY))


def test_committed_results_have_todays_columns():
    for name in command_line.BENCHMARKS:
        module = command_line.import_module(f"benchmarks.{name}")
        assert not set(CONDITIONS) & set(module.COLUMNS), "two columns of one name"
        file = ROOT / "benchmarks" / "results" / f"{name}.csv"
        if not file.exists():  # nothing has been measured yet
            continue
        check_columns(file, module.COLUMNS)
        assert all(row["commit"] and row["command"] for row in read_rows(file))


def test_the_page_has_the_tables_of_the_results():
    page = update_benchmarks.PAGE.read_text("utf8")
    assert fill_page(page, update_benchmarks.page_sections()) == page


def test_variants_are_interleaved():
    order = []

    def make_build(name):
        calls = {
            call: functools.partial(order.append, (name, call)) for call in ("forward", "step")
        }
        return lambda: calls

    builds = {name: make_build(name) for name in "ab"}
    timings = time_interleaved(builds, Timer(CPU), rounds=4, seconds=60)
    calls = [(name, call) for name in "ab" for call in ("forward", "step")]
    warmup = [call for call in calls for _ in range(2)]
    assert order == warmup + 4 * calls
    assert timings["a"].rounds == 4
    assert timings["b"].paired_ratio(timings["a"], "step") > 0


def test_statistics_of_timings():
    baseline, timings = Timings({"step": [1.0, 2.0, 40.0]}), Timings({"step": [2.0, 4.0, 80.0]})
    assert timings.median_ms("step") == 4
    assert timings.half_iqr_ms("step") == 39
    assert timings.paired_ratio(baseline, "step") == 2
    failed = Timings({}, "why")
    assert failed.median_ms("step") is failed.half_iqr_ms("step") is None
    assert failed.paired_ratio(baseline, "step") is None


def test_a_failure_becomes_a_note():
    def fail():
        raise RuntimeError("two\nlines")

    later = iter([None] * 3)
    builds = {
        "fails when called": lambda: {"step": fail},
        "fails later": lambda: {"step": lambda: next(later)},
        "fails when built": fail,
        "works": lambda: {"step": lambda: None},
    }
    timings = time_interleaved(builds, Timer(CPU), rounds=3, seconds=1)
    notes = [timing.note for timing in timings.values()]
    assert notes == ["RuntimeError: two lines", "StopIteration", "RuntimeError: two lines", ""]
    assert timings["works"].rounds == 3


def test_every_kernel_is_measured():
    pytest.importorskip("triton")
    assert {name.split()[0] for name in OPS} >= vars(kernel_ops()).keys()
    assert {op.case(2).module for op in OPS.values()} >= {case.module for case in CASES.values()}
    assert {peer.op for peer in PEERS} <= OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_every_case_calls_its_op(name):
    case = OPS[name].case(2)
    rows, weights = case.make_tensors(4, 8, torch.float32)
    outs = case.run(ops, [x.float() for x in rows], [w.float() for w in weights])
    assert all(out.isfinite().all() for out in outs)


@pytest.mark.slow
def test_missing_packages_are_noted(tmp_path, monkeypatch):
    for package in ("liger_kernel", "fla", "hyper_connections"):
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    options = TOY | {"streams": [2], "variants": ["peers"]}
    rows = list(command_line.run_benchmark("ops", tmp_path, **options))
    options = TOY | {"specs": ["prenorm"], "variants": ["eager", "peers"]}
    rows += command_line.run_benchmark("chain", tmp_path, **options)
    assert len([row for row in rows if "not installed" in row["note"]]) == len(PEERS) + 1
    assert read_rows(tmp_path / "ops.csv")[0]["forward ms"] == "not measured"


def test_peer_denseformer_equals_ours():
    """With the same weights, forward and backward."""
    D, layers = 8, 3
    ours = ConnectionChain("denseformer", D, layers)
    peer = DenseFormer(D, 2 * layers, copy_sublayer)
    our_weights = list(ours.parameters())
    with torch.no_grad():
        for our_weight, peer_weight in zip(our_weights, peer.weights, strict=True):
            peer_weight.copy_(torch.randn_like(peer_weight))
            our_weight.copy_(peer_weight.view_as(our_weight))
    x = torch.randn(2, 3, D)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [ours(inputs[0]), peer(inputs[1])]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for our_weight, peer_weight in zip(our_weights, peer.weights, strict=True):
        torch.testing.assert_close(our_weight.grad.flatten(), peer_weight.grad.flatten())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chain", "--specs", "hiper"], "did you mean 'hyper'"),
        (["ops", "--dims", "0"], "at least 1"),
        (["step", "--device", "cuda"], "torch finds no GPU"),
        (["chain", "--threads", "-1"], "unrecognized arguments: --threads -1"),
        (["chain", "--dims", "wide"], "argument --dims: invalid int value: 'wide'"),
        (["chian"], "invalid choice: 'chian'"),
        (["chain", "--seconds", "-1"], "seconds must be a number of at least 0, got -1.0"),
    ],
)
def test_wrong_options_are_one_line(words, message, tmp_path, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command_line.main([*words, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


def test_results_file_that_is_none_is_one_line(tmp_path, capsys):
    for file in ("folder.csv", "fifo.csv"):
        (tmp_path / file).mkdir() if file == "folder.csv" else os.mkfifo(tmp_path / file)
        with pytest.raises(ValueError, match=f"{file}: not a file; choose another --out"):
            check_columns(tmp_path / file, [])
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.csv has other columns"):
        check_columns(tmp_path / "bytes.csv", [])
    assert command_line.main(["chain", "--out", str(tmp_path / "bytes.csv")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("ops", "model"),
        ("chain", "layers"),
        ("chain", "model"),
        ("step", "layers"),
        ("decode", "model"),
    ],
)
def test_compiled_variants(name, compile, tmp_path):
    options = TOY | {"compile": compile, "variants": ["eager", "compiled"]}
    if name == "ops":
        options |= {"ops": ["width_connection"], "streams": [2]}
    else:
        options |= {"specs": ["skip_gain"]}  # quickly compiled
    rows = list(command_line.run_benchmark(name, tmp_path, **options))
    assert len(rows) == 2
    assert not [row["note"] for row in rows if row["note"]]


def run_campaign(out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SMALL": "1", "OUT": str(out), "PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = ["bash", ROOT / "benchmarks" / "gpu.sh"]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True)


@pytest.mark.slow
def test_gpu_campaign_at_toy_size(tmp_path):
    """Correctness, then the benchmarks."""
    pytest.importorskip("triton")
    ran = run_campaign(tmp_path, LIMIT="200", SPECS="hyper(streams=2, dynamic=False)")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "failed" not in (tmp_path / "parts.txt").read_text()
    assert "passed" in (tmp_path / "correctness.txt").read_text()
    for name in ("ops", "step", "decode", "memory"):
        assert read_rows(tmp_path / f"{name}.csv"), name


@pytest.mark.slow
def test_gpu_campaign_stops_if_a_kernel_is_wrong(tmp_path):
    ran = run_campaign(tmp_path, PARTS="correctness memory", PYTEST_ADDOPTS="--no-such-option")
    assert ran.returncode == 1
    assert "stopped: kernels failed" in (tmp_path / "parts.txt").read_text()
    assert not (tmp_path / "memory.csv").exists()


def test_gpu_campaign_knows_its_parts_before_it_begins(tmp_path):
    ran = run_campaign(tmp_path, PARTS="correctness steps")
    assert ran.returncode == 1 and not (tmp_path / "parts.txt").exists()
    assert ran.stderr.startswith("gpu.sh: unknown part steps; known: ")


def test_gpu_campaign_needs_its_packages(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    ran = run_campaign(tmp_path / "out", PYTHON=str(python), PYTHONPATH="")
    assert ran.returncode == 1 and not (tmp_path / "out" / "parts.txt").exists()
    assert "jsonargparse" in ran.stderr and ran.stderr.count("\n") == 1


def test_the_faster_prenorm_is_the_baseline(monkeypatch):
    """With kernels on, pre-norm is also timed without them; each of its calls runs as built."""
    seen = set()
    seconds = 0.0

    def build(spec, D, settings, variant):
        def step():
            nonlocal seconds
            seen.add((spec, dispatch.kernel_devices))
            seconds += 0.01 if spec == "prenorm" and dispatch.kernel_devices else 0.001

        return {"step": step}

    clock = types.SimpleNamespace(perf_counter=lambda: seconds)
    monkeypatch.setattr("benchmarks.timing.time", clock)
    monkeypatch.setattr(dispatch, "kernel_devices", ("cpu",))
    settings = BenchmarkSettings.for_benchmark("step", **TOY, specs=["hyper"])
    (pair,) = time_with_prenorm(settings, build, settings.specs, "model")
    assert seen == {("prenorm", ("cpu",)), ("prenorm", ()), ("hyper", ("cpu",))}
    assert pair.prenorm_kernels == "no"
    assert pair.prenorm.median_ms("step") == pytest.approx(1)
