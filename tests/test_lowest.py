"""The versions that .ci/run tries at the lower end are those that pyproject.toml promises."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
NOT_TRIED = {"ruff", "mypy"}


def test_the_lowest_versions_are_those_of_the_project():
    lines = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in ("hf", "train", "eval", "kernels", "test"):
        requirements += project["optional-dependencies"][extra]
    promised = {}
    for requirement in map(Requirement, requirements):
        if requirement.name in NOT_TRIED | {"crosslayer"}:
            continue
        assert requirement.specifier, f"{requirement.name} has no lower end"
        for clause in requirement.specifier:
            if clause.operator == ">=":
                promised[requirement.name] = Version(clause.version)
    assert {name: Version(version) for name, version in lowest.items()} == promised


def test_malicious_releases_are_excluded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    train = {r.name: r for r in map(Requirement, project["optional-dependencies"]["train"])}
    for name in ("lightning", "pytorch-lightning"):
        allowed = list(train[name].specifier.filter(["2.6.1", "2.6.2", "2.6.3", "2.6.4"]))
        assert allowed == ["2.6.1", "2.6.4"]
