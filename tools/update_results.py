"""Copies a finished comparison into docs/: its numbers, its figure and its table.

crosslayer compare --out compare-docs
python tools/update_results.py compare-docs/results.json
"""

import re
import sys
from pathlib import Path

from crosslayer.files import short_digest
from crosslayer.train.compare import Comparison
from crosslayer.train.comparison_results import read_comparison_results
from crosslayer.train.report import markdown_report, plot_differences, plot_tradeoff, render_svg

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.json"
FIGURE = ROOT / "docs" / "compare.svg"
PAGE = ROOT / "docs" / "training.md"


def read_comparison(file: Path) -> Comparison:
    """The comparison that wrote a results.json."""
    return Comparison.from_results(read_comparison_results(file), file.parent)


def results_table(comparison: Comparison) -> str:
    """The page's table, which is that of the report."""
    report = markdown_report(comparison).splitlines()
    return "".join(f"{line}\n" for line in report if line.startswith("|"))


def data_mark(results: str) -> str:
    """What the figure's file ends with: a digest of the results that it shows."""
    return f"<!-- data {short_digest(results)} -->\n"


def replace_table(page: str, table: str) -> str:
    """The page with another table of results.

    Raises:
        ValueError: the page has no such table.
    """
    marked = r"(<!-- results -->\n)(?:\|.*\n)+"
    page, count = re.subn(marked, lambda match: match[1] + table, page)
    if not count:
        raise ValueError("the page has no table after <!-- results -->")
    return page


def main(file: Path) -> None:
    comparison = read_comparison(file)
    results = file.read_text("utf8")
    RESULTS.write_text(results, "utf8")
    figure = render_svg(comparison, plot_differences, plot_tradeoff)
    FIGURE.write_text(figure + data_mark(results), "utf8")
    text = replace_table(PAGE.read_text("utf8"), results_table(comparison))
    PAGE.write_text(text, "utf8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
