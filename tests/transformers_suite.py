"""transformers' own tests of its models, on connected models.

It needs a folder with the tests of transformers at the installed version and the packages that they
import, and fetches nothing. Options that are not its own are pytest's:

    python -m tests.transformers_suite PATH
    python -m tests.transformers_suite PATH --families llama --specs mudd -k generate

A family's tests run on the plain host first, then with each connection: every model with layers
that `connect` recognises is connected as it is built. What passes on the host alone is listed, and
makes the exit code 1. The tests that transformers marks as slow need the Hub and are skipped.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import transformers

SPEC_VARIABLE = "CROSSLAYER_CONNECT"  # set in the process that runs the tests, and in its children
HOST = "host"  # in place of a connection: the models as they are
FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral")
SPECS = ("mudd", "hyper", "attnres")


def connect_what_is_built(spec: str) -> Callable[[], int]:
    """Let transformers connect every model that it builds in this process.

    Returns:
        A function that returns how many models have been connected.
    """
    import crosslayer.hf  # noqa: F401  # the patch of post_init that connects
    from crosslayer.hf.attach import find_backbone

    post_init = transformers.PreTrainedModel.post_init
    connected = 0

    def connecting_post_init(self: Any) -> None:
        nonlocal connected
        if self.base_model is self and _is_recognised(find_backbone, self):
            self.config.crosslayer = spec
            connected += 1
        post_init(self)

    transformers.PreTrainedModel.post_init = connecting_post_init
    return lambda: connected


def _is_recognised(find_backbone: Callable[[Any], Any], model: Any) -> bool:
    try:
        find_backbone(model)
    except ValueError:
        return False
    return True


def test_file(checkout: Path, family: str) -> Path:
    """The file of a family's tests.

    Raises:
        SystemExit: it is not there.
    """
    file = checkout / "tests" / "models" / family / f"test_modeling_{family}.py"
    if not file.is_file():
        sys.exit(f"{file}: no such file; PATH is a checkout of huggingface/transformers")
    return file


def run_tests(checkout: Path, family: str, spec: str, options: list[str]) -> dict[str, str]:
    """Run a family's tests on models with a connection; returns the outcome of each test.

    Raises:
        SystemExit: pytest found no test, or did not finish.
    """
    # Both repositories have a package `tests`, and -P keeps ours out of the way.
    command = [sys.executable, "-P", __file__, "-q", "--tb=short", "--rootdir", str(checkout)]
    source = Path(__file__).resolve().parent.parent / "src"
    paths = [str(checkout), str(source), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, SPEC_VARIABLE: spec, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"== {family} × {spec}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command += [f"--junitxml={results}", str(test_file(checkout, family)), *options]
        code = subprocess.run(command, env=environment, cwd=checkout).returncode
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(f"{family} × {spec}: pytest ended with exit code {code}")
        return read_outcomes(results)


def read_outcomes(results: Path) -> dict[str, str]:
    """The outcome of each test, "passed", "skipped" or "failed", from a file of pytest's."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "skipped" if "skipped" in found else "passed"
        if found & {"failure", "error"}:
            outcome = "failed"
        # A test with subtests has several entries.
        name = case.attrib["name"]
        outcomes[name] = min(outcome, outcomes.get(name, outcome))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a folder with the tests of transformers")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    arguments, options = parser.parse_known_args()
    checkout = arguments.checkout.resolve()
    summary = []
    worse = []
    for family in arguments.families:
        host = run_tests(checkout, family, HOST, options)
        summary.append(f"{family} × {HOST}: {dict(Counter(host.values()))}")
        for spec in arguments.specs:
            outcomes = run_tests(checkout, family, spec, options)
            summary.append(f"{family} × {spec}: {dict(Counter(outcomes.values()))}")
            for name, outcome in host.items():
                if outcome == "passed" and outcomes.get(name) != "passed":
                    worse.append(f"{family} × {spec}: {name} {outcomes.get(name, 'did not run')}")
    print("\n".join(summary))
    sys.exit("\n".join(["passed on the host alone:", *worse]) if worse else 0)


if __name__ in ("__main__", "__mp_main__") and SPEC_VARIABLE in os.environ:
    chosen_spec = os.environ[SPEC_VARIABLE]
    if chosen_spec != HOST:
        count_connected = connect_what_is_built(chosen_spec)
    if __name__ == "__main__":
        exit_code = pytest.main(sys.argv[1:])
        if chosen_spec != HOST:
            print(f"{count_connected()} models were connected in this process")
        sys.exit(exit_code)
elif __name__ == "__main__":
    main()
