"""`crosslayer bench`: what is measured, how, and what a row says of it. No time is held to anything here."""

import csv
import functools
import sys
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks.cases import OPS, reference_ops
from benchmarks.chain import Depth, sublayer
from benchmarks.clock import Clock, Measured, alternate
from benchmarks.peers import PEERS, DenseFormer
from benchmarks.rows import CONDITIONS, check
from crosslayer import ops
from crosslayer.cli.main import main
from tests.kernels.cases import CASES

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
TOY = {
    "device": "cpu",
    "dims": [16],
    "batch": 1,
    "context": 8,
    "layers": 2,
    "vocab": 32,
    "rounds": 2,
    "seconds": 0.0,
}
WORDS = [
    word
    for key, value in TOY.items()
    for word in (f"--{key}", str(value[0] if key == "dims" else value))
]


def table(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("benchmark", benchmarks.BENCHMARKS)
def test_rows(benchmark, tmp_path, capsys):
    more = {"ops": ["--streams", "2", "--ops", "width_connection", "add_norm", "--variants", "eager"]}
    arms = ["--arms", "prenorm", "hyper(streams=2)", "--variants", "eager", "peers"]
    command = [
        "bench",
        benchmark,
        "--out",
        str(tmp_path),
        *WORDS,
        "--note",
        "a toy",
        *more.get(benchmark, arms),
    ]
    assert main([*command, "--threads", str(torch.get_num_threads())]) == 0
    rows = table(tmp_path / f"{benchmark}.csv")
    assert tuple(rows[0]) == (*CONDITIONS, *benchmarks.columns(benchmark), "note")
    assert all(
        row["note"].startswith("a toy") and row["commit"] and row["torch"] == torch.__version__
        for row in rows
    )
    shown = capsys.readouterr().out
    assert "Rows added" in shown and all(row.get("variant", "") in shown for row in rows)
    measured = [row for row in rows if row["note"] == "a toy"]
    assert len(measured) >= 2
    for row in measured:
        assert "not measured" not in row.values(), row
    # what a row names as its command adds the same rows
    words = rows[0]["command"].split()
    assert words[:3] == ["crosslayer", "bench", benchmark] and "--rounds" in words


def test_a_file_grows_and_keeps_its_columns(tmp_path):
    for _ in range(2):
        list(benchmarks.run("memory", tmp_path, arms=["prenorm"], **TOY))
    assert len(table(tmp_path / "memory.csv")) == 6
    (tmp_path / "memory.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        benchmarks.ready("memory", tmp_path, **TOY)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results").glob("*.csv")), ids=lambda file: file.stem
)
def test_what_is_committed_takes_more_rows(file):
    check(file, benchmarks.columns(file.stem))
    assert all(row["commit"] and row["command"] for row in table(file))


def test_variants_take_turns():
    order = []

    def variant(name):
        return lambda: {
            call: functools.partial(order.append, (name, call)) for call in ("forward", "step")
        }

    found = alternate({name: variant(name) for name in "ab"}, Clock(CPU), rounds=4, seconds=60)
    calls = [(name, call) for name in "ab" for call in ("forward", "step")]
    assert order == [c for c in calls for _ in range(2)] + 4 * calls
    assert found["a"].rounds == 4 and found["b"].ratio(found["a"], "step") > 0


def test_medians_and_spreads():
    base, own = Measured({"step": [1.0, 2.0, 40.0]}), Measured({"step": [2.0, 4.0, 80.0]})
    assert own.ms("step") == 4 and own.ratio(base, "step") == 2 and own.spread("step") == 39
    nothing = Measured({}, "why")
    assert nothing.ms("step") is nothing.spread("step") is nothing.ratio(base, "step") is None


def test_what_fails_is_a_note():
    def broken():
        raise RuntimeError("two\nlines")

    made = {"a": lambda: {"step": broken}, "b": broken, "c": lambda: {"step": lambda: None}}
    found = alternate(made, Clock(CPU), rounds=1, seconds=1)
    assert found["a"].note == found["b"].note == "RuntimeError: two lines"
    assert found["c"].rounds == 1 and list(found) == ["a", "b", "c"]


def test_every_op_is_measured():
    dispatched = {name for name in ops.__all__ if hasattr(getattr(ops, name), "reference")}
    assert {name.split()[0] for name in OPS} >= dispatched
    assert {op.case(2).module for op in OPS.values()} >= {case.module for case in CASES.values()}
    assert {peer.op for peer in PEERS} <= OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_called(name):
    case = OPS[name].case(2)
    rows, weights = case.make_tensors(4, 8, torch.float32)
    outs = case.run(reference_ops(), [x.float() for x in rows], [w.float() for w in weights])
    assert all(out.isfinite().all() for out in outs)


def test_packages_that_are_missing_are_said_so(tmp_path, monkeypatch):
    for package in ("liger_kernel", "fla", "hyper_connections"):
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    rows = [*benchmarks.run("ops", tmp_path, **TOY | {"streams": [2], "variants": ["peers"]})]
    rows += benchmarks.run(
        "chain", tmp_path, **TOY | {"arms": ["prenorm"], "variants": ["eager", "peers"]}
    )
    missing = [row for row in rows if "not installed" in row["note"]]
    assert len(missing) == len(PEERS) + 1
    assert table(tmp_path / "ops.csv")[0]["forward ms"] == "not measured"


def test_what_has_not_begun_in_time_is_left_out(tmp_path):
    rows = list(benchmarks.run("decode", tmp_path, arms=["prenorm"], **TOY, limit=0.0))
    assert [row["note"] for row in rows] == ["not begun within 0 s"] and rows[0][
        "ms a token"
    ] is None


@pytest.mark.parametrize("benchmark", ["ops", "step", "memory"])
def test_without_a_gpu_its_rows_say_what_is_on_paper(benchmark, tmp_path):
    given = TOY | {
        "device": "none",
        "arms": ["prenorm"],
        "variants": ["kernel", "compiled"],
        "ops": ["width_connection"],
    }
    rows = list(benchmarks.run(benchmark, tmp_path, **given))
    for row in table(tmp_path / f"{benchmark}.csv"):
        assert row["device"] == "none at hand" and row["dtype"] == "bfloat16"
    if benchmark == "memory":
        assert all(row["MiB"] > 0 for row in rows)
    else:
        assert {row["note"] for row in rows} == {"no GPU at hand"}
        floors, ms = {
            "ops": ("forward floor MB", "forward+backward ms"),
            "step": ("floor MB", "ms"),
        }[benchmark]
        assert all(row[floors] > 0 and row[ms] is None for row in rows)


def test_the_peer_is_denseformer():
    """Held to ours with the same weights, forward and backward."""
    D, layers = 8, 3
    ours, theirs = Depth("denseformer", D, layers), DenseFormer(D, 2 * layers, sublayer)
    weights = dict(ours.named_parameters())
    assert len(weights) == len(theirs.weights)
    with torch.no_grad():
        for own, other in zip(weights.values(), theirs.weights, strict=True):
            other.copy_(torch.randn_like(other))
            own.copy_(other.view_as(own))
    inputs = [torch.randn(2, 3, D).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    outs = [model(x) for model, x in zip((ours, theirs), inputs, strict=True)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for own, other in zip(weights.values(), theirs.weights, strict=True):
        torch.testing.assert_close(own.grad.flatten(), other.grad.flatten())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chian"], "did you mean 'chain'"),
        (["chain", "--arms", "hiper"], "did you mean 'hyper'"),
        (["ops", "--ops", "sinkhorm"], "did you mean 'sinkhorn'"),
        (["ops", "--dtype", "bf16"], "bfloat16"),
        (["ops", "--dims", "0"], "at least 1"),
        (["step", "--device", "tpu"], "cuda"),
        (["ops", "--variants", "fast"], "eager"),
        (["chain", "--laiers", "2"], "did you mean '--layers'"),
    ],
)
def test_errors(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 1
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())
