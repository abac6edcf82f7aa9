"""Writes what README and docs/ have from elsewhere: the table of connections from their docstrings, the tables of
proofs and of families from the tests, the table of recipes from their files, and the table and picture of
docs/results.json, which is a `crosslayer compare` without arguments.

    python tools/readme.py
"""

import inspect
import json
import re
from pathlib import Path

import torch

import crosslayer
from crosslayer.cost.estimate import count_parameters
from crosslayer.spec import default_options
from crosslayer.train.compare import Comparison
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.report import curves, markdown, picture, tradeoff
from crosslayer.train.task import LANGUAGE, find_task
from tools import proofs

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "connections.md"
FAMILIES = ROOT / "docs" / "families.md"
CELLS = (
    "How many arms (connections, and on two bodies their options too) the tests in tests/hf try with each thing people "
    "do, on a small random model of each family. What only a GPU can show is in tests/hf/test_gpu.py."
)
RECIPES = ROOT / "docs" / "recipes.md"
ABOUT = (
    "The experiments of the papers, one file each: what is compared, on what, how long, and what is expected is in the "
    "comment at its head. Parameters are the body's, without connections; a range is over the arms."
)
PICTURE, RESULTS = ROOT / "docs" / "compare.svg", ROOT / "docs" / "results.json"


def connections() -> str:
    lines = ["| connection | what it is | paper | starts as PreNorm |", "| --- | --- | --- | --- |"]
    for name in crosslayer.available():
        method = crosslayer.make(name).method
        doc = inspect.getdoc(inspect.getmodule(method)) or ""
        what = doc.splitlines()[0].rstrip(".")
        paper = re.search(r"^Paper: (.*?\))(?:, arXiv ([\d.]+\d))?", doc, re.MULTILINE)
        assert paper and paper[2], (
            f"{name}: its docstring needs a line 'Paper: Title (Authors, year), arXiv 0000.00000'"
        )
        arguments = ", ".join(f"{k}={v!r}" for k, v in default_options(method).items())
        source = f"[{paper[1]}](https://arxiv.org/abs/{paper[2]})"
        start = "yes" if method.starts_as_prenorm else "no"
        lines.append(f"| `{name}({arguments})` | {what} | {source} | {start} |")
    return "\n".join(lines) + "\n"


def measured() -> Comparison:
    results = json.loads(RESULTS.read_text("utf8"))
    recipe = Recipe([Arm.of(name) for name in results["arms"]], results["settings"])
    seeds = 1 + max(run["seed"] for run in results["runs"])
    return Comparison(recipe, seeds, RESULTS.parent, {}, results)


def recipes() -> str:
    lines = [
        "| recipe | paper | arms | body, M parameters | steps | trained on |",
        "| --- " * 3 + "| ---: " * 3 + "|",
    ]
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe(file)
        paper = re.match(r"# Paper: (.+?), arXiv ([\d.]+), (.+)", file.read_text("utf8"))
        assert paper, (
            f"{file.name}: its first line must be 'Paper: Name (Authors, year), arXiv 0000.00000, Table 0'"
        )
        arms = [recipe.settings(arm) for arm in recipe.arms]
        language = find_task(arms[0].model) is LANGUAGE
        seen = [
            s.optimization.steps * s.data.batch * (s.data.context if language else 1) / 1e9
            for s in arms
        ]
        with torch.device("meta"):
            bodies = [find_task(s.model).bare(s, s.model.vocab or 256) for s in arms]
        cells = (
            f"[{file.stem}](../recipes/{file.name})",
            f"[{paper[1]}](https://arxiv.org/abs/{paper[2]}), {paper[3]}",
            str(len(arms)),
            span([count_parameters(body)[0] / 1e6 for body in bodies], ",.1f"),
            span([s.optimization.steps for s in arms], ",d"),
            f"{span(seen, '.3g')} B {'tokens' if language else 'images'}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def span(values: list, form: str) -> str:
    """A number, or the least and the largest."""
    ends = dict.fromkeys(format(value, form) for value in (min(values), max(values)))
    return " to ".join(ends)


def pages() -> dict[Path, str]:
    """README and the pages of docs/ as they should be."""
    known, proven = connections(), proofs.table()
    text = README.read_text("utf8")
    results = "\n".join(markdown(measured()).splitlines()[2:]) + "\n"
    for name, content in (("connections", known), ("results", results), ("proofs", proven)):
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(lambda match, content=content: match[1] + content + match[2], text)
    return {
        README: text,
        PAGE: f"# Connections\n\n{known}\n# What holds each to its paper\n\n{proven}",
        RECIPES: f"# Recipes\n\n{ABOUT}\n\n{recipes()}",
        FAMILIES: f"# Families\n\n{CELLS}\n\n{proofs.matrix()}",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf8")
    PICTURE.write_text(picture(measured(), curves, tradeoff), "utf8")
