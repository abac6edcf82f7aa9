"""What the studies become: parts of pages, figures, rows of the connections' pages."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import crosslayer
from benchmarks.evidence.claims import SeedLosses
from benchmarks.evidence.figures import MAIN_ARMS, Figure, study_figures
from benchmarks.evidence.overview import OVERVIEW_FILE, overview_figure
from benchmarks.evidence.pruning import read_pruned_models
from benchmarks.evidence.rates import rate_figure, rate_table
from benchmarks.evidence.size_tables import difference_matrix, multiplier_table
from benchmarks.evidence.studies import BASELINE, RESULTS, ROOT, UNSCALED, Part, Study, read_parts
from benchmarks.evidence.summary import connection_tables, summary_table
from benchmarks.evidence.tables import arms_tables, claims_table
from crosslayer.files import write_text_atomic

README = ROOT / "README.md"
# Between them they have all parts of studies.yaml.
EVIDENCE_PAGES = (ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence-settings.md")
CAPTIONS = {
    "curves": "Validation loss, mean over seeds",
    "differences": "Difference to pre-norm on the way, with 95 % intervals",
    "intervals": "Difference of every arm to pre-norm at the end, with 95 % intervals",
    "rates": "Validation loss by learning rate and depth, means and ranges over seeds",
}


def picture_links(part: Part, studies: Mapping[str, Study]) -> str:
    """The pictures of a part's studies that have results."""
    links = []
    for plan in part.plans:
        if plan.name in studies:
            for name in study_figures(studies[plan.name]):
                links.append(f"![{CAPTIONS[name]}](evidence/{plan.name}-{name}.svg)")
    return "\n\n".join(links)


def rate_picture_link(part: Part, studies: Mapping[str, Study]) -> str:
    """The picture of the losses at each rate."""
    return f"![{CAPTIONS['rates']}](evidence/{_rate_file(part)})"


def _rate_file(part: Part) -> str:
    words = re.findall(r"\w+", part.title.lower())
    return f"{'-'.join(words)}.svg"


# What a part of the page may show.
PARTS: dict[str, Callable[[Part, Mapping[str, Study]], str]] = {
    "pictures": picture_links,
    "arms": arms_tables,
    "differences": difference_matrix,
    "multipliers": multiplier_table,
    "rate picture": rate_picture_link,
    "rates": rate_table,
}


def evidence_sections(studies: Mapping[str, Study]) -> dict[str, str]:
    """The text of each marked part of `EVIDENCE_PAGES`, by its name."""
    sections = {}
    for part in read_parts():
        texts = [PARTS[name](part, studies) for name in part.shows]
        sections[part.title] = "\n\n".join(text for text in texts if text)
    tested: dict[str, SeedLosses] = {**studies, UNSCALED + "pruning": read_pruned_models()}
    return sections | {"Claims": claims_table(tested)}


def summary_sections(studies: Mapping[str, Study]) -> dict[str, str]:
    """The text of each marked part of README.md, by its name."""
    first = [BASELINE, "postnorm", "resi_dual", "altup"]
    arms = first + [arm for arm in MAIN_ARMS if arm not in first]
    return {"In short": summary_table(studies, arms)}


def page_texts(studies: Mapping[str, Study]) -> dict[Path, str]:
    """The pages, with the texts of their marked parts.

    Raises:
        ValueError: a part is on no page, or a page has a part that is unknown.
    """
    readme = README.read_text("utf8")
    texts = {README: fill_page(readme, summary_sections(studies))}
    unplaced = evidence_sections(studies)
    for file in EVIDENCE_PAGES:
        page = file.read_text("utf8")
        own = {name: unplaced.pop(name) for name in marked_parts(page) if name in unplaced}
        texts[file] = fill_page(page, own)
    if unplaced:
        raise ValueError(f"no page has the parts {list(unplaced)}")
    return texts


def marked_parts(page: str) -> list[str]:
    """The names in `<!-- evidence: NAME -->`."""
    return re.findall(r"<!-- evidence: (.*) -->", page)


def fill_page(page: str, sections: Mapping[str, str]) -> str:
    """The page with other texts between `<!-- evidence: NAME -->` and `<!-- /evidence -->`.

    Raises:
        ValueError: the page has not the same parts.
    """
    marks = marked_parts(page)
    if sorted(marks) != sorted(sections):
        raise ValueError(f"the page has the parts {marks}, expected {list(sections)}")
    for name, text in sections.items():
        start, end = f"<!-- evidence: {name} -->\n", "<!-- /evidence -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n{text}\n\n{end}{after}"
    return page


def connections_text(studies: Mapping[str, Study]) -> str:
    """The file of the connections' rows, which the pages of the connections show."""
    return json.dumps(connection_tables(studies, crosslayer.available()), indent=1) + "\n"


def page_figures(studies: Mapping[str, Study]) -> dict[str, Figure]:
    """The figure of all settings and those of the parts, by the names of their files."""
    figures: dict[str, Figure] = {OVERVIEW_FILE: overview_figure(studies)}
    for part in read_parts():
        if "rate picture" in part.shows:
            figures[_rate_file(part)] = rate_figure(part, studies)
        if "pictures" not in part.shows:
            continue
        for plan in part.plans:
            if plan.name in studies:
                for name, figure in study_figures(studies[plan.name]).items():
                    figures[f"{plan.name}-{name}.svg"] = figure
    return figures


def write_pages(studies: Mapping[str, Study]) -> None:
    """Write the parts of the pages, the figures and the rows of the connections."""
    for file, text in page_texts(studies).items():
        write_text_atomic(file, text)
    write_text_atomic(RESULTS / "connections.json", connections_text(studies))
    for name, figure in page_figures(studies).items():
        (RESULTS / name).write_bytes(figure.render())
