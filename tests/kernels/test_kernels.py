"""Runs `suite.py` under triton's interpreter and `ptx.py` without it, each in a process of its own.

The interpreter is chosen by an environment variable that triton reads when it is imported, which other tests of the
same worker may already have done.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import CASES, SLOW

pytest.importorskip("triton")
HERE = Path(__file__).parent
GROUPS = (
    "mix norm",
    "gate sinkhorn",
    "attend merge streams",
    "probe",
)  # of modules, about as long each


def python(*args: str, **environment: str) -> str:
    paths = os.pathsep.join([str(HERE), *(path for path in sys.path if path)])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    env.pop("PYTEST_ADDOPTS", None)
    ran = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=HERE.parent.parent, env=env
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    return ran.stdout


# the first in a plain run, the others take longer
@pytest.mark.parametrize(
    "modules", [GROUPS[0], *(pytest.param(group, marks=pytest.mark.slow) for group in GROUPS[1:])]
)
def test_interpreted(modules):
    interpret("not slow", [name for name, case in CASES.items() if case.module in modules.split()])


@pytest.mark.slow
def test_in_connections():
    interpret("not slow", ["connections", "columns", "taken_along", "hooked", "model"])


def test_every_module_is_in_a_group():
    assert sorted(" ".join(GROUPS).split()) == sorted({case.module for case in CASES.values()})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_interpreted_slowly(name):
    interpret("slow", [name])


def interpret(marks, names):
    suite = (
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        str(HERE / "suite.py"),
        "-m",
        marks,
        "-k",
        " or ".join(names),
    )
    assert "passed" in python(*suite, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "capability",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)],
)
def test_compiles(capability, tmp_path):
    # in a plain run, kernels with fewer sources
    cases = [name for name in CASES if capability != 90 or name not in SLOW]
    out = python(
        str(HERE / "ptx.py"),
        str(capability),
        *cases,
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert out


def test_import_is_free_of_triton():
    python(
        "-c",
        "import sys, crosslayer, crosslayer.ops; assert not {'triton', 'crosslayer.kernels'} & set(sys.modules)",
    )
