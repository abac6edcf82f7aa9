"""What the studies become: marked parts of docs/evidence.md, figures, rows of the connections."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import crosslayer
from benchmarks.evidence.figures import study_figures
from benchmarks.evidence.studies import RESULTS, ROOT, Study, read_parts
from benchmarks.evidence.tables import (
    claims_table,
    connection_tables,
    difference_matrix,
    main_tables,
    multiplier_table,
)
from crosslayer.files import write_text_atomic

PAGE = ROOT / "docs" / "evidence.md"
CAPTIONS = {
    "curves": "Validation loss by tokens and by training time, mean over seeds",
    "differences": "Difference to pre-norm by tokens and by training time, with 95 % intervals",
    "intervals": "Difference of every arm to pre-norm at the end, with 95 % intervals",
}


def page_sections(studies: Mapping[str, Study]) -> dict[str, str]:
    """The text of each marked part of the page, by its name."""
    parts = {part.title: part for part in read_parts()}
    sections = {}
    for title, part in parts.items():
        if len(part.plans) == 1:
            plan = part.plans[0]
            pictures = study_figures(studies[plan.name]) if plan.name in studies else {}
            figures = [f"![{CAPTIONS[name]}](evidence/{plan.name}-{name}.svg)" for name in pictures]
            text = "\n\n".join([*figures, main_tables(plan, studies)])
        else:
            text = difference_matrix(part, studies)
        if title.startswith("Size"):
            text += multiplier_table(part, studies)
        sections[title] = text
    sections["Claims"] = claims_table(studies)
    return sections


def fill_page(page: str, sections: Mapping[str, str]) -> str:
    """The page with other texts between `<!-- evidence: NAME -->` and `<!-- /evidence -->`.

    Raises:
        ValueError: the page has not the same parts.
    """
    marks = re.findall(r"<!-- evidence: (.*) -->", page)
    if sorted(marks) != sorted(sections):
        raise ValueError(f"the page has the parts {marks}, expected {list(sections)}")
    for name, text in sections.items():
        pattern = rf"(<!-- evidence: {re.escape(name)} -->\n).*?(<!-- /evidence -->)"
        page = re.sub(
            pattern, lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page, flags=re.S
        )
    return page


def connections_text(studies: Mapping[str, Study]) -> str:
    """The file of the connections' rows, which the pages of the connections show."""
    return json.dumps(connection_tables(studies, crosslayer.available()), indent=1) + "\n"


def write_pages(studies: Mapping[str, Study], page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Write the page, the figures and the rows of the connections."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(page, fill_page(page.read_text("utf8"), page_sections(studies)))
    write_text_atomic(folder / "connections.json", connections_text(studies))
    for study in studies.values():
        for name, figure in study_figures(study).items():
            (folder / f"{study.plan.name}-{name}.svg").write_bytes(figure.render()["svg"])
