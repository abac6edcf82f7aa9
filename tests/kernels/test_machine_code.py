"""What kernels wait for by their machine code, and how many a model compiles; without a GPU."""

import pytest
import torch
from torch import nn

from benchmarks.cases import (
    Case,
    attention_case,
    gate_case,
    hyper_case,
    mix_case,
    norm_case,
    project_case,
    width_connection_case,
)
from benchmarks.chain import ConnectionChain
from benchmarks.compilation import compile_launches
from benchmarks.compile_time import model_launches
from benchmarks.sass import read_machine_code

pytest.importorskip("triton")

# Rounds of loads and barriers that forward and backward may have, a token of width 2048. Where each
# load waits for a sum, or each sum for the one before, there are twice as many. Versions of triton
# differ: these hold for 3.6 and 3.7, which torch 2.11 to 2.13 bring.
LIMITS: dict[str, tuple[Case, tuple[int, int], tuple[int, int]]] = {
    "gate": (gate_case(4, True), (2, 2), (3, 8)),
    "attention": (attention_case(12), (4, 11), (14, 15)),
    "mix": (mix_case(12, 4, False), (6, 13), (0, 20)),
    "mix normed": (mix_case(12, 4, False, 3, 1), (4, 10), (9, 23)),
    "streams": (width_connection_case(4), (1, 2), (0, 10)),
    "hyper": (hyper_case(4), (2, 2), (6, 8)),
}
# Of a thread; it has 64 bytes of a row in float32.
SPILLED_BYTES = 64


def share_rows(programs, pieces, like):
    """`launch.split_count` as on a GPU while few tokens are decoded."""
    return min(3, pieces)


def assert_no_chain(case: Case, rounds: tuple[int, int], barriers: tuple[int, int]) -> None:
    kernels = compile_launches(case, 16, 2048, torch.bfloat16)
    assert len(kernels) == 2
    for kernel, most_rounds, most_barriers in zip(kernels, rounds, barriers, strict=True):
        code = read_machine_code(kernel.binary)
        assert code.load_rounds <= most_rounds, kernel.name
        assert code.barriers <= most_barriers, kernel.name
        assert code.spilled_bytes <= SPILLED_BYTES, kernel.name


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


def test_sums_over_rows_wait_once():
    assert_no_chain(norm_case(1), (1, 2), (3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_loads_do_not_wait_for_sums(name):
    assert_no_chain(*LIMITS[name])


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
