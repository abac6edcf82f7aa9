"""Writes the table and the figure of docs/retrofit.md, from the runs in docs/retrofit/.

python -m tools.update_retrofit
"""

from pathlib import Path

from benchmarks.evidence.pages import fill_page
from crosslayer.files import write_text_atomic
from examples.retrofit import draw_figure, load_runs, report_section

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "retrofit.md"
FIGURE = DOCS / "retrofit.svg"


def page_sections() -> dict[str, str]:
    """The text of the page's marked part, by its name."""
    return {"retrofit": "\n".join(report_section(load_runs(DOCS / "retrofit"), FIGURE.name))}


def main() -> None:
    draw_figure(load_runs(DOCS / "retrofit"), FIGURE)
    write_text_atomic(PAGE, fill_page(PAGE.read_text("utf8"), page_sections()))


if __name__ == "__main__":
    main()
