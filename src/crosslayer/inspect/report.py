"""The report of `crosslayer inspect`: inspection.json, figures as SVG and PNG, and report.html."""

import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_text_atomic
from .figures import render_figure
from .inspection import to_json_value
from .sections import SECTIONS, Section
from .sections.section import Models

JSON_FILE = "inspection.json"
REPORT_FILE = "report.html"
FIGURE_FOLDER = "figures"

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --faint: #666; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e6e6e6; --faint: #a0a0a0; --line: #3a3d42; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 48rem; } .note { color: var(--faint); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top;
         border-bottom: 1px solid var(--line); }
figure { margin: 0; background: #fff; border-radius: 6px; padding: .4rem; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; display: block; }
@media (max-width: 40rem) { figure svg { max-width: none; width: 60rem; } }
"""


def write_report(
    models: Models, folder: Path, setup: str, sections: Sequence[Section] = SECTIONS
) -> Path:
    """Write inspection.json, the figures and report.html, with the models side by side.

    Args:
        models: an inspection each.
        folder: created if it does not exist.
        setup: a sentence on what the models saw.
        sections: to draw, where the models have the analyses that they need.

    Returns:
        The path of report.html.
    """
    pictures = folder / FIGURE_FOLDER
    pictures.mkdir(parents=True, exist_ok=True)
    content = {"setup": setup, "models": to_json_value(models)}
    write_text_atomic(folder / JSON_FILE, json.dumps(content, indent=1))
    body = ""
    for section in sections:
        panels = section.panels(models)
        if not panels:
            continue
        files = render_figure(panels)
        for suffix, data in files.items():
            (pictures / f"{section.name}.{suffix}").write_bytes(data)
        svg = files["svg"].decode()
        body += f"<h2>{html.escape(section.title)}</h2>\n<p>{html.escape(section.text)}</p>\n"
        body += f"<figure>{svg[svg.index('<svg') :]}</figure>\n"
    write_text_atomic(folder / REPORT_FILE, _page_html(models, setup, body))
    return folder / REPORT_FILE


def _page_html(models: Models, setup: str, body: str) -> str:
    names = " and ".join(model.name for model in models)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>crosslayer inspect: {html.escape(names)}</title><style>{STYLE}</style></head><body>
<h1>What the connections of {html.escape(names)} do</h1>
<p>{html.escape(setup)}</p>
<div class="scroll">{_findings_html(models)}</div>
{_notes_html(models)}
{body}
</body></html>
"""


# title, the analysis that it shows, and its text
FINDINGS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("Λ-shape score (1: as pre-norm)", "findings", lambda found: _number(found.lambda_score)),
    (
        "weight of the embedding in the readout (1: as the mean source)",
        "findings",
        lambda found: _number(found.embedding_in_readout),
    ),
    (
        "share of weights on attentions",
        "findings",
        lambda found: _number(found.attention_share),
    ),
    (
        "sub-layers that became parallel",
        "findings",
        lambda found: _listed([f"{a} ∥ {b}" for a, b in found.parallel_pairs]),
    ),
    ("wasted sub-layers", "findings", lambda found: _listed(found.wasted)),
    (
        "sources that streams carry with opposite signs",
        "findings",
        lambda found: _listed(found.opposite_signs),
    ),
    ("largest error of the unfolded map", "unfolded", lambda unfolded: f"{unfolded.error:.1e}"),
    ("alarms", "alarms", lambda alarms: _listed(alarms)),
]


def _findings_html(models: Models) -> str:
    rows = [("connection", [model.connection for model in models])]
    for title, analysis, describe in FINDINGS:
        if any(analysis in model.results for model in models):
            cells = [describe(m[analysis]) if analysis in m.results else "" for m in models]
            rows.append((title, cells))
    names = "".join(f"<th>{html.escape(model.name)}</th>" for model in models)
    table = f"<table><tr><th></th>{names}</tr>"
    for title, texts in rows:
        columns = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        table += f"<tr><td>{html.escape(title)}</td>{columns}</tr>"
    return table + "</table>"


def _notes_html(models: Models) -> str:
    notes = []
    for model in models:
        notes += [f"{model.name}: {line}." for line in model.not_done]
        unfolded = model.results.get("unfolded")
        if unfolded is not None and unfolded.by_projection:
            notes.append(
                f"{model.name}: its connection weighs channels apart. The numbers of its unfolded "
                f"map are projections, of {unfolded.tokens} tokens."
            )
    return "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _listed(values: Sequence[str]) -> str:
    shown = ", ".join(values[:8])
    if len(values) > 8:
        shown += f" and {len(values) - 8} more"
    return shown or "none"
