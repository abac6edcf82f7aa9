"""What compiles, and the whole GPU campaign at toy sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bench import TOY, table

import benchmarks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("benchmark", "how"),
    [
        ("ops", "model"),
        ("chain", "layers"),
        ("chain", "model"),
        ("step", "layers"),
        ("decode", "model"),
    ],
)
def test_compiled(benchmark, how, tmp_path):
    given = TOY | {"compile": how, "variants": ["eager", "compiled"]}
    given |= {"ops": ["carry"], "streams": [2]} if benchmark == "ops" else {"arms": ["hyper"]}
    rows = list(benchmarks.run(benchmark, tmp_path, **given))
    assert len(rows) == 2
    assert not [row["note"] for row in rows if row["note"]]


def test_the_campaign(tmp_path):
    """Correctness, then every benchmark; its files are where OUT says, and a part that failed is recorded."""
    pytest.importorskip("triton")
    environment = {**os.environ, "SMALL": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu.sh"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    parts = (tmp_path / "parts.txt").read_text()
    assert "failed" not in parts and "passed" in (tmp_path / "correctness.txt").read_text()
    for name in benchmarks.BENCHMARKS:
        if name != "chain":
            assert table(tmp_path / f"{name}.csv"), name
    broken = {
        **environment,
        "PARTS": "correctness memory",
        "OUT": str(tmp_path / "broken"),
        "LIMIT": "100",
    }
    broken["PYTEST_ADDOPTS"] = "--no-such-option"
    ran = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu.sh"], env=broken, capture_output=True, text=True
    )
    assert (
        ran.returncode == 1
        and "correctness: failed" in (tmp_path / "broken" / "parts.txt").read_text()
    )
    assert {row["note"] for row in table(tmp_path / "broken" / "memory.csv")} == {"kernels failed"}
