"""Copies a finished comparison into docs/: its numbers, its figure and its table.

crosslayer compare --out compare-docs
python tools/update_results.py compare-docs/results.json
"""

import re
import sys
from pathlib import Path

from crosslayer.train.compare import Comparison
from crosslayer.train.comparison_results import read_results
from crosslayer.train.report import markdown_report, plot_curves, plot_tradeoff, render_svg

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.json"
PAGE = ROOT / "docs" / "training.md"


def read_comparison(file: Path) -> Comparison:
    """The comparison that wrote a results.json."""
    return Comparison.from_results(read_results(file), file.parent)


def results_table(comparison: Comparison) -> str:
    """The page's table, which is that of the report."""
    report = markdown_report(comparison).splitlines()
    return "".join(f"{line}\n" for line in report if line.startswith("|"))


def replace_table(page: str, table: str) -> str:
    """The page with another table of results."""
    return re.sub(r"(<!-- results -->\n)(?:\|.*\n)+", lambda match: match[1] + table, page)


def main(file: Path) -> None:
    comparison = read_comparison(file)
    RESULTS.write_text(file.read_text("utf8"), "utf8")
    figure = render_svg(comparison, plot_curves, plot_tradeoff)
    (ROOT / "docs" / "compare.svg").write_text(figure, "utf8")
    text = replace_table(PAGE.read_text("utf8"), results_table(comparison))
    PAGE.write_text(text, "utf8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
