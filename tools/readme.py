"""Writes what README and docs/ have from elsewhere: the table of connections from their docstrings, the tables of
proofs and of families from the tests, and the table and picture of docs/results.json, which is a `crosslayer compare`
without arguments.

    python tools/readme.py
"""

import inspect
import json
import re
from pathlib import Path

import proofs

import crosslayer
from crosslayer.compare import Comparison
from crosslayer.registry import options
from crosslayer.report import curves, markdown, picture, tradeoff
from crosslayer.train.run import Settings

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "connections.md"
FAMILIES = ROOT / "docs" / "families.md"
CELLS = (
    "How many arms (connections, and on two bodies their options too) the tests in tests/hf try with each thing people "
    "do, on a small random model of each family. What only a GPU can show is in tests/hf/test_gpu.py."
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
        arguments = ", ".join(f"{k}={v!r}" for k, v in options(method).items())
        source = f"[{paper[1]}](https://arxiv.org/abs/{paper[2]})"
        start = "yes" if method.starts_as_prenorm else "no"
        lines.append(f"| `{name}({arguments})` | {what} | {source} | {start} |")
    return "\n".join(lines) + "\n"


def measured() -> Comparison:
    results = json.loads(RESULTS.read_text("utf8"))
    arms = list(dict.fromkeys(run["arm"] for run in results["runs"]))
    seeds = 1 + max(run["seed"] for run in results["runs"])
    return Comparison(Settings(**results["settings"]), arms, seeds, RESULTS.parent, None, results)


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
        FAMILIES: f"# Families\n\n{CELLS}\n\n{proofs.matrix()}",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf8")
    PICTURE.write_text(picture(measured(), curves, tradeoff), "utf8")
