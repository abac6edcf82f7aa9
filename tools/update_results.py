"""Copies a finished comparison into docs/ and README: its numbers, its figure and its table.

crosslayer compare --out compare-readme
python tools/update_results.py compare-readme/results.json
"""

import json
import re
import sys
from pathlib import Path

from crosslayer.train.compare import Comparison, ComparisonResults
from crosslayer.train.report import markdown_report, plot_curves, plot_tradeoff, render_svg

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.json"
HEADINGS = {"arm": "connection", "activations": "activation memory"}  # the report's, and README's


def read_comparison(file: Path) -> Comparison:
    """The comparison that wrote a results.json."""
    results = ComparisonResults.from_json(json.loads(file.read_text("utf8")))
    return Comparison.from_results(results, file.parent)


def results_table(comparison: Comparison) -> str:
    """README's table: that of the report, with headings in words."""
    report = markdown_report(comparison).splitlines()
    heading, *rows = [line for line in report if line.startswith("|")]
    for name, words in HEADINGS.items():
        heading = heading.replace(f"| {name} |", f"| {words} |")
    return "\n".join([heading, *rows]) + "\n"


def replace_table(readme: str, table: str) -> str:
    """README with another table of results."""
    return re.sub(r"(<!-- results -->\n)(?:\|.*\n)+", lambda match: match[1] + table, readme)


def main(file: Path) -> None:
    comparison = read_comparison(file)
    RESULTS.write_text(file.read_text("utf8"), "utf8")
    figure = render_svg(comparison, plot_curves, plot_tradeoff)
    (ROOT / "docs" / "compare.svg").write_text(figure, "utf8")
    readme = ROOT / "README.md"
    text = replace_table(readme.read_text("utf8"), results_table(comparison))
    readme.write_text(text, "utf8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
