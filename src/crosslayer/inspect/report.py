"""The report of `crosslayer inspect`: inspection.json, figures as SVG and PNG, and report.html."""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_text_atomic
from ..plotting import render_figure
from .inspection import to_json_value
from .run_groups import (
    format_duration,
    format_number,
    format_size,
    join_titles,
    split_by_data,
)
from .sections import SECTIONS, Section, TrainingView
from .sections.section import Models, Panels
from .training_summary import GroupSummary, TrainingRuns, measure_scaling, summarise_training

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
table { margin-bottom: 1.2rem; border-collapse: collapse; font-variant-numeric: tabular-nums;
        font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top;
         border-bottom: 1px solid var(--line); }
figure { margin: 0; background: #fff; border-radius: 6px; padding: .4rem; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; display: block; }
@media (max-width: 40rem) { figure.wide svg { max-width: none; width: 60rem; } }
"""


@dataclass
class TrainingReport:
    """What the report shows of run folders.

    Attributes:
        groups: a summary of each group of runs.
        scaling: power law and compute multiplier of each series, where there is one.
        pictures: views with their panels.
        not_drawn: a line for each view that the runs cannot feed, with what it needs.
        notes: sentences on which runs are left out or apart.
    """

    groups: list[GroupSummary]
    scaling: dict[str, Any]
    pictures: list[tuple[TrainingView, Panels]]
    not_drawn: list[str]
    notes: list[str]


def draw_views(runs: TrainingRuns, views: Sequence[TrainingView]) -> TrainingReport:
    """The views of training that the runs can feed."""
    scaling = {}
    parts = split_by_data(runs.groups)
    for title, part in parts:
        for series in measure_scaling(part):
            if series.law is not None:
                found = {"law": series.law, "multiplier": series.multiplier}
                scaling[join_titles(series.label, title)] = found
    notes = []
    if len(parts) > 1:
        titles = "; ".join(title for title, _ in parts)
        notes.append(
            "Losses are compared only between runs with the same tokenizer, training and "
            f"validation data. There are {len(parts)} such sets of runs: {titles}."
        )
    for group in runs.groups:
        for run in group.duplicates:
            notes.append(
                f"{run.folder} is left out: {group.label} has a run with the same seed, settings "
                "and data already."
            )
    report = TrainingReport(summarise_training(runs), scaling, [], [], notes)
    for view in views:
        panels = view.draw_panels(runs)
        if panels:
            report.pictures.append((view, panels))
        else:
            report.not_drawn.append(f"{view.name} is not drawn; it needs {view.needs}")
    return report


def write_report(
    models: Models,
    folder: Path,
    setup: str,
    sections: Sequence[Section] = SECTIONS,
    training: TrainingReport | None = None,
) -> Path:
    """Write inspection.json, the figures and report.html, with the models side by side.

    Args:
        models: an inspection each.
        folder: created if it does not exist.
        setup: a sentence on what the models saw.
        sections: to draw, where the models have the analyses that they need.
        training: of the runs' folders; None for no view of training.

    Returns:
        The path of report.html.
    """
    pictures = folder / FIGURE_FOLDER
    pictures.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"setup": setup, "models": to_json_value(models)}
    drawn: list[tuple[Section | TrainingView, Panels]] = []
    if training is not None:
        parts = {"groups": training.groups, "scaling": training.scaling}
        content["training"] = to_json_value(parts)
        drawn += training.pictures
    drawn += [(section, section.panels(models)) for section in sections]
    write_text_atomic(folder / JSON_FILE, json.dumps(content, indent=1))
    body = ""
    for section, panels in drawn:
        if not panels:
            continue
        files = render_figure(panels)
        for suffix, data in files.items():
            (pictures / f"{section.name}.{suffix}").write_bytes(data)
        body += f"<h2>{html.escape(section.title)}</h2>\n<p>{html.escape(section.text)}</p>\n"
        shape = ' class="wide"' if len(panels) > 1 else ""  # scrolls on a narrow screen
        body += f"<figure{shape}>{files['svg'].decode()}</figure>\n"
    write_text_atomic(folder / REPORT_FILE, _page_html(models, setup, body, training))
    return folder / REPORT_FILE


def _page_html(models: Models, setup: str, body: str, training: TrainingReport | None) -> str:
    title = f"What the connections of {_joined([model.name for model in models])} do"
    tables = _findings_html(models) if models else ""
    if training is not None:
        tables += _training_html(training.groups)
        if not models:
            title = f"Training of {_joined([group.label for group in training.groups])}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>crosslayer inspect: {html.escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(setup)}</p>
<div class="scroll">{tables}</div>
{_notes_html(models, training)}
{body}
</body></html>
"""


def _joined(names: Sequence[str]) -> str:
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {len(names) - 5} more"
    return " and ".join(names)


# title of a column, and a group's text in it
TRAINING_COLUMNS: list[tuple[str, Callable[[GroupSummary], str]]] = [
    ("run", lambda group: group.label),
    ("connection", lambda group: group.connection),
    ("data", lambda group: group.data),
    ("seeds", lambda group: str(len(group.seeds))),
    ("parameters", lambda group: _shown(group.parameters, format_size)),
    ("loss on the first validation set", lambda group: _shown(group.loss, "{:.4f}".format)),
    (
        "range over seeds",
        lambda group: (
            _shown(group.loss_range, lambda ends: f"{ends[0]:.4f} to {ends[1]:.4f}")
            if len(group.seeds) > 1
            else ""
        ),
    ),
    ("spikes", lambda group: str(group.spikes)),
    ("times fewer tokens", lambda group: _shown(group.speedup, "{:.2f}".format)),
    ("time of training", lambda group: _shown(group.seconds, format_duration)),
    (
        "training, tokens (images) per second",
        lambda group: _shown(group.training_speed, format_number),
    ),
    (
        "inference, examples per second",
        lambda group: _shown(group.inference_speed, format_number),
    ),
    ("mean accuracy of tasks", lambda group: _shown(group.accuracy, "{:.3f}".format)),
]


def _training_html(groups: Sequence[GroupSummary]) -> str:
    """A row for each group, with the columns that any group has a text in."""
    columns = [(title, [show(group) for group in groups]) for title, show in TRAINING_COLUMNS]
    columns = [(title, texts) for title, texts in columns if any(texts)]
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in columns)
    rows = ""
    for texts in zip(*(texts for _, texts in columns), strict=True):
        rows += "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in texts) + "</tr>"
    return f"<table><tr>{head}</tr>{rows}</table>"


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


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


def _notes_html(models: Models, training: TrainingReport | None) -> str:
    notes = []
    for model in models:
        notes += [f"{model.name}: {line}." for line in model.not_done]
        unfolded = model.results.get("unfolded")
        if unfolded is not None and unfolded.by_projection:
            notes.append(
                f"{model.name}: its connection weighs channels apart. The numbers of its unfolded "
                f"map are projections, of {unfolded.tokens} tokens."
            )
    if training is not None:
        notes = training.notes + notes
    shown = "".join(map(_note_html, notes))
    if training is not None and training.not_drawn:
        lines = "".join(_note_html(f"{line}.") for line in training.not_drawn)
        shown += f"<details><summary>Views that need other runs</summary>{lines}</details>"
    return shown


def _note_html(note: str) -> str:
    return f'<p class="note">{html.escape(note)}</p>'


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _listed(values: Sequence[str]) -> str:
    shown = ", ".join(values[:8])
    if len(values) > 8:
        shown += f" and {len(values) - 8} more"
    return shown or "none"
