"""What importing the package does to a process, and what pyproject.toml says it needs."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "crosslayer"
# Distributions whose package has another name; the machine that runs the test may lack them.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "hyper_connections": "hyper-connections"}

IMPORT_ALONE = """
import sys
import torch

modules_of_torch = set(sys.modules)
finders = list(sys.meta_path)
import crosslayer

crosslayer.make("mudd(dilation=2)")
crosslayer.available()
crosslayer.Stack
assert sys.meta_path == finders, "an import hook was installed"
packages = {name.partition(".")[0] for name in set(sys.modules) - modules_of_torch}
third_party = packages - set(sys.stdlib_module_names) - {"crosslayer"}
assert not third_party, third_party
assert "crosslayer.kernels" not in sys.modules

import crosslayer.cost

heavy = {"transformers", "lightning", "rich"} & set(sys.modules)
assert not heavy, f"crosslayer.cost imports {heavy}"

import crosslayer.evaluate
from crosslayer.cli.main import main

try:
    main(["--help"])  # which makes the options of all commands
except SystemExit:
    pass
heavy = {"transformers", "lm_eval", "datasets", "lightning"} & set(sys.modules)
assert not heavy, f"crosslayer --help imports {heavy}"
"""

IMPORT_BEFORE_TRANSFORMERS = """
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

def members():
    return [dict(vars(cls)) for cls in (PreTrainedModel, PreTrainedConfig, AutoConfig)]

before = members()
import crosslayer

crosslayer.make("mudd")
assert members() == before, "a class of transformers was changed"

import sys
import crosslayer.hf

assert not any(type(finder).__module__.startswith("crosslayer") for finder in sys.meta_path)
assert "diffusers" not in sys.modules
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_crosslayer_imports_torch_only():
    """And `crosslayer.cost`, `crosslayer.evaluate` and `crosslayer --help` import no framework."""
    run(IMPORT_ALONE)


@pytest.mark.slow
def test_importing_crosslayer_leaves_transformers_alone():
    """And `crosslayer.hf` installs no import hook, and does not import diffusers."""
    run(IMPORT_BEFORE_TRANSFORMERS)


def test_the_command_is_a_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["scripts"]
    entry_point = EntryPoint("crosslayer", scripts["crosslayer"], "console_scripts")
    assert callable(entry_point.load())


def imported_packages() -> set[str]:
    """The top-level packages that a file of the package imports, anywhere in it."""
    packages = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                packages.add(node.module.partition(".")[0])
    return packages - set(sys.stdlib_module_names) - {"crosslayer"}


def declared_distributions(*extras: str) -> set[str]:
    """The names in pyproject.toml's dependencies and in these extras, in lower case with dashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    return {normalised(name) for name in names} - {"crosslayer"}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_distributions() -> set[str]:
    """The distributions of the imported packages, in lower case with dashes."""
    installed = packages_distributions()
    distributions = set()
    for package in imported_packages():
        name = DISTRIBUTIONS.get(package, installed.get(package, [package])[0])
        distributions.add(normalised(name))
    return distributions


def test_every_import_is_declared():
    extras = ("hf", "train", "eval", "kernels", "loggers", "bench", "test")
    assert imported_distributions() <= declared_distributions(*extras)


def test_every_declared_dependency_is_imported():
    declared = declared_distributions("hf", "train", "eval", "kernels")
    # datasets reads .zst files, and parquet with Arrow; lightning is made of the last one
    through_others = {"zstandard", "pyarrow", "pytorch-lightning"}
    assert declared - through_others <= imported_distributions()
