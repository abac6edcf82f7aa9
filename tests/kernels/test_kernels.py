"""Runs `suite.py` under triton's interpreter and `ptx.py` without it, each in its own process.

triton reads the environment variable of its interpreter when it is imported, which other tests of
the same worker may already have done.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.cases import CASES, FAST, LARGEST, PATHS

pytest.importorskip("triton")
HERE = Path(__file__).parent
MODULES = sorted({case.module for case in CASES.values()})


def run_python(*args: str, **environment: str) -> str:
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    env.pop("PYTEST_ADDOPTS", None)
    process = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=HERE.parent.parent, env=env
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-4000:]
    return process.stdout


def run_suite(expression: str) -> str:
    options = ("-m", "pytest", "-q", "-n", "0", str(HERE / "suite.py"), "-k", expression)
    printed = run_python(*options, TRITON_INTERPRET="1")
    assert "passed" in printed
    return printed


def test_every_kernel_in_the_interpreter():
    """Forward and backward of a case for each kernel."""
    printed = run_suite(f"test_accuracy and 3x63 and ({' or '.join(FAST)})")
    assert int(re.search(r"(\d+) passed", printed)[1]) >= len(FAST)


def test_programs_share_rows_where_tokens_are_few(monkeypatch):
    from crosslayer.kernels import launch

    like = torch.empty(0)
    monkeypatch.setattr(launch, "processor_count", lambda like: 132)
    assert launch.split_count(1, 64, like) == 64  # a token
    assert launch.split_count(1, 200, like) == 132
    assert launch.split_count(66, 64, like) == 2
    assert launch.split_count(256, 64, like) == 1  # 8 sequences of 2,048 tokens
    assert launch.split_count(0, 64, like) >= 1


def test_fast_cases_cover_every_module():
    assert sorted({CASES[name].module for name in FAST}) == MODULES


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_in_the_interpreter(module):
    run_suite(" or ".join(name for name, case in CASES.items() if case.module == module))


@pytest.mark.slow
def test_connections_in_the_interpreter():
    """And all other tests that have none of the cases."""
    run_suite(f"not ({' or '.join(CASES)})")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "cases"),
    [(80, "bfloat16", PATHS + LARGEST), (100, "float32", PATHS)],
    ids=["80", "100"],
)
def test_compiles_for_gpus(capability, dtype, cases, tmp_path):
    """`test_machine_code.py` compiles most of them for 90."""
    run_python(
        str(HERE / "ptx.py"),
        str(capability),
        dtype,
        *cases,
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
