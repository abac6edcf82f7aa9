"""transformers' own tests of its models, on connected models.

It needs a checkout of transformers at the installed version and the packages that its tests import,
and fetches nothing. Options that are not its own are pytest's:

    python -m tests.transformers_suite PATH
    python -m tests.transformers_suite PATH --families llama --specs mudd -k generate

While a file of tests runs, every model of a known family that is built is connected. The tests that
transformers marks as slow need the Hub and are skipped.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

SPEC_VARIABLE = "CROSSLAYER_CONNECT"
INSIDE = "--inside"  # the first argument of the process that runs the tests
FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral")
SPECS = ("mudd", "hyper", "attnres")


def connect_what_is_built(spec: str) -> None:
    """Let transformers connect every model of a known family that it builds in this process."""
    from crosslayer.hf.families import FAMILIES as known_families

    post_init = transformers.PreTrainedModel.post_init

    def connecting_post_init(self: Any) -> None:
        is_decoder = not getattr(self.config, "add_cross_attention", False)
        is_backbone = self.base_model is self and self.config.model_type in known_families
        if is_backbone and is_decoder:
            self.config.crosslayer = spec
        post_init(self)

    transformers.PreTrainedModel.post_init = connecting_post_init


def test_file(checkout: Path, family: str) -> Path:
    """The file of a family's tests.

    Raises:
        SystemExit: it is not there.
    """
    file = checkout / "tests" / "models" / family / f"test_modeling_{family}.py"
    if not file.is_file():
        sys.exit(f"{file}: no such file; PATH is a checkout of huggingface/transformers")
    return file


def run_tests(checkout: Path, family: str, spec: str, options: list[str]) -> int:
    """Run a family's tests on models with a connection; returns pytest's exit code."""
    # Both repositories have a package `tests`, and -P keeps ours out of the way.
    command = [sys.executable, "-P", __file__, INSIDE, "-q", "--rootdir", str(checkout)]
    source = Path(__file__).resolve().parent.parent / "src"
    paths = [str(checkout), str(source), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, SPEC_VARIABLE: spec, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"== {family} × {spec}", flush=True)
    file = str(test_file(checkout, family))
    return subprocess.run([*command, file, *options], env=environment, cwd=checkout).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of huggingface/transformers")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    arguments, options = parser.parse_known_args()
    failed = []
    for family in arguments.families:
        for spec in arguments.specs:
            if run_tests(arguments.checkout, family, spec, options):
                failed.append(f"{family} × {spec}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        connect_what_is_built(os.environ[SPEC_VARIABLE])
        sys.exit(pytest.main(sys.argv[2:]))
    main()
