"""Copies a finished comparison into README and docs/: the table, its numbers and the figure.

crosslayer compare --out compare-readme
python tools/update_results.py compare-readme
"""

import json
import re
import shutil
import sys
from pathlib import Path

from crosslayer.train.compare import Comparison
from crosslayer.train.recipe import Arm, Recipe
from crosslayer.train.report import curves, picture, tradeoff

ROOT = Path(__file__).parent.parent


def update(folder: Path) -> None:
    """Write docs/results.json, docs/compare.svg and the table between README's markers.

    Args:
        folder: what `crosslayer compare --out` wrote.
    """
    shutil.copyfile(folder / "results.json", ROOT / "docs" / "results.json")
    report = (folder / "report.md").read_text("utf8")
    table = "".join(line + "\n" for line in report.splitlines() if line.startswith("|"))
    readme = ROOT / "README.md"
    block = re.compile(r"(<!-- results -->\n)(?:\|.*\n)+")
    readme.write_text(block.sub(lambda match: match[1] + table, readme.read_text("utf8")), "utf8")
    figure = picture(read_comparison(folder), curves, tradeoff)
    (ROOT / "docs" / "compare.svg").write_text(figure, "utf8")


def read_comparison(folder: Path) -> Comparison:
    results = json.loads((folder / "results.json").read_text("utf8"))
    recipe = Recipe([Arm.of(name) for name in results["arms"]], results["settings"])
    seeds = 1 + max(run["seed"] for run in results["runs"])
    return Comparison(recipe, seeds, folder, {}, results)


if __name__ == "__main__":
    update(Path(sys.argv[1]))
