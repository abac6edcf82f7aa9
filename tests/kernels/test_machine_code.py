"""What kernels wait for by their machine code, and how many a model compiles; without a GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import machine_code
from benchmarks.cases import attention_case, mix_case, project_case
from benchmarks.chain import ConnectionChain
from benchmarks.compilation import compile_launches
from benchmarks.compile_time import model_launches
from benchmarks.results import read_rows
from benchmarks.settings import BenchmarkSettings

triton = pytest.importorskip("triton")

# Ops, numbers of sources or streams, and widths, of which the committed table is made again here.
# Where each load waits for a sum, or each sum for the one before, a kernel waits twice as often.
CHECKED = [
    ("add_norm", 1, 4096),
    ("gate_pool", 2, 4096),
    ("gate_pool normed", 4, 2048),
    ("depth_attention", 4, 4096),
    ("depth_attention", 12, 2048),
    ("depth_attention normed", 25, 2048),
    ("depth_mix", 12, 2048),
    ("depth_mix normed", 4, 4096),
    ("depth_mix static", 25, 2048),
    ("width_connection", 8, 4096),
    ("write_norm_project joint", 4, 2048),
    ("hyper_connection normed", 4, 2048),
    ("single_pass_connection", 4, 2048),
    ("sinkhorn", 4, 2048),
]
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "machine_code.csv"
WAITS = ("kernel", "load rounds", "barriers", "spilled bytes")


def share_rows(programs, pieces, like):
    """`launch.split_count` as on a GPU while few tokens are decoded."""
    return min(3, pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [mix_case(9, 2, False, 1, 1), mix_case(9, 4, False), attention_case(9)]
)
def test_sources_that_differ_compile(case):
    """The first one is frozen and float32. triton joins the types of both branches."""

    def run(op, rows, weights):
        outs = case.run(op, [rows[0].detach().float(), *rows[1:]], weights)
        return [out for out in outs if out.requires_grad]

    kernels = compile_launches(case._replace(run=run), 2, 256, torch.bfloat16)
    assert len(kernels) == 2


def test_sums_of_a_single_row_compile(monkeypatch):
    """Where one token is decoded: triton compiles an integer that is 1 as a constant."""
    monkeypatch.setattr("crosslayer.kernels.launch.split_count", share_rows)
    kernels = compile_launches(project_case(1, 24, False), 1, 256, torch.bfloat16)
    assert "join_splits" in [kernel.name for kernel in kernels]


@pytest.mark.parametrize(
    ("op", "n", "D"),
    [
        case if case[0] == "add_norm" else pytest.param(*case, marks=pytest.mark.slow)
        for case in CHECKED
    ],
)
def test_kernels_wait_as_the_table_says(op, n, D):
    version = triton.__version__.rsplit(".", 1)[0]
    committed = [
        tuple(row[name] for name in WAITS)
        for row in read_rows(TABLE)
        if row["triton"].startswith(version)
        and (row["op"], int(row["n"] or 1), int(row["D"])) == (op, n, D)
    ]
    if not committed:
        pytest.skip(f"{TABLE.name} has no rows of triton {version}")
    settings = BenchmarkSettings.for_benchmark(
        "machine_code", device="cpu", ops=[op], streams=[n], dims=[D]
    )
    found = [tuple(str(row[name]) for name in WAITS) for row in machine_code.measure(settings)]
    assert found == committed


@pytest.mark.parametrize(
    ("spec", "most"), [("mudd", 24), ("attnres", 13), ("attnres(block_size=4)", 7)]
)
def test_number_of_compiled_kernels(spec, most):
    """24 layers compile a kernel for each bucket of sources; another number of tokens, none."""
    first, *others = kernel_names(spec, [(2, 8), (1, 3), (1, 1)])
    assert len(first) <= most
    assert others == [first] * 2


def test_number_of_kernels_compiled_to_decode(monkeypatch):
    """Programs share a row of each generator. What joins them is compiled for powers of two."""
    monkeypatch.setattr("crosslayer.kernels.launch.split_count", share_rows)
    (names,) = kernel_names("mudd", [(1, 1)])
    assert names.count("join_splits") <= 6


def kernel_names(spec: str, sizes: list[tuple[int, int]]) -> list[list[str]]:
    """The kernels compiled so far after each batch [batch, tokens] of 24 layers in bfloat16."""
    chain = ConnectionChain(spec, 256, 24, norm=nn.RMSNorm).bfloat16()
    so_far = model_launches(chain, [(*size, 256) for size in sizes], torch.bfloat16)
    return [[launch.kernel.__name__ for launch in launches] for launches in so_far]
