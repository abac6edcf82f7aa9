"""The report of `crosslayer inspect`: inspection.json, figures as SVG and PNG, and report.html."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_json, write_text_atomic
from ..html_pages import render_notes, render_page, render_table
from ..number_texts import NOT_KNOWN, format_duration, format_number, format_size
from ..plotting import render_figure
from .inspection import to_json_value
from .run_groups import join_titles, split_by_data
from .sections import Section, TrainingView
from .sections.section import FigurePanels, InspectedModels
from .training_summary import GroupedRuns, GroupSummary, measure_scaling, summarise_training

JSON_FILE = "inspection.json"
REPORT_FILE = "report.html"
_FIGURE_FOLDER = "figures"


@dataclass
class TrainingReport:
    """What the report shows of run folders.

    Attributes:
        groups: a summary of each group of runs.
        scaling: power law and compute multiplier of each series, where there is one.
        pictures: views with their panels.
        not_drawn: what each view that the runs cannot feed needs, by its name.
        notes: sentences on which runs are left out or apart.
    """

    groups: list[GroupSummary]
    scaling: dict[str, Any]
    pictures: list[tuple[TrainingView, FigurePanels]]
    not_drawn: dict[str, str]
    notes: list[str]


def draw_views(runs: GroupedRuns, views: Sequence[TrainingView]) -> TrainingReport:
    """The views of training that the runs can feed."""
    scaling = {}
    parts = split_by_data(runs.groups)
    for title, part in parts:
        for series in measure_scaling(part):
            if series.power_law is not None:
                found = {"power_law": series.power_law, "multiplier": series.multiplier}
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
    report = TrainingReport(summarise_training(runs), scaling, [], {}, notes)
    for view in views:
        panels = view.draw_panels(runs)
        if panels:
            report.pictures.append((view, panels))
        else:
            report.not_drawn[view.name] = view.needs
    return report


def write_inspection_report(
    models: InspectedModels,
    folder: Path,
    setup: str,
    sections: Sequence[Section],
    training: TrainingReport | None,
) -> list[str]:
    """Write inspection.json, the figures and report.html, with the models side by side.

    Args:
        models: an inspection each.
        folder: created if it does not exist.
        setup: a sentence on what the models saw.
        sections: to draw, where the models have the analyses that they need.
        training: of the runs' folders; None for no view of training.

    Returns:
        The names of the sections in which no model has anything to show.
    """
    pictures = folder / _FIGURE_FOLDER
    pictures.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"setup": setup, "models": to_json_value(models)}
    panels_of_sections = [(section, section.panels(models)) for section in sections]
    drawn: list[tuple[Section | TrainingView, FigurePanels]] = []
    if training is not None:
        parts = {"groups": training.groups, "scaling": training.scaling}
        content["training"] = to_json_value(parts)
        drawn += training.pictures
    drawn += panels_of_sections
    write_json(folder / JSON_FILE, content)
    body = ""
    for section, panels in drawn:
        if not panels:
            continue
        files = render_figure(panels, suffixes=("svg", "png"))
        for suffix, data in files.items():
            (pictures / f"{section.name}.{suffix}").write_bytes(data)
        body += f"<h2>{html.escape(section.title)}</h2>\n<p>{html.escape(section.text)}</p>\n"
        shape = ' class="wide"' if len(panels) > 1 else ""  # scrolls on a narrow screen
        body += f"<figure{shape}>{files['svg'].decode()}</figure>\n"
    write_text_atomic(folder / REPORT_FILE, _page_html(models, setup, body, training))
    return [section.name for section, panels in panels_of_sections if not panels]


def _page_html(
    models: InspectedModels, setup: str, body: str, training: TrainingReport | None
) -> str:
    title = f"What the connections of {_joined([model.name for model in models])} do"
    tables = _findings_html(models) if models else ""
    if training is not None:
        tables += _training_html(training.groups)
        if not models:
            title = f"Training of {_joined([group.label for group in training.groups])}"
    return render_page(title, setup, f"{tables}{_notes_html(models, training)}{body}")


def _joined(names: Sequence[str]) -> str:
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {len(names) - 5} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _range_text(ends: tuple[float, float]) -> str:
    lowest, highest = ends
    return "" if lowest == highest else f"{lowest:.4f} to {highest:.4f}"


# title of a column, the field of a `GroupSummary`, and its text, of values that are not None
_TRAINING_COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("run", "label", str),
    ("connection", "connection", str),
    ("data", "data", str),
    ("seeds", "seeds", lambda seeds: str(len(seeds))),
    ("parameters", "parameters", format_size),
    ("loss on the first validation set", "loss", "{:.4f}".format),
    ("range over seeds", "loss_range", _range_text),
    ("spikes", "spikes", str),
    ("times fewer tokens", "speedup", "{:.2f}".format),
    ("time of training", "seconds", format_duration),
    ("training, tokens (images) per second", "training_speed", format_number),
    ("inference, examples per second", "inference_speed", format_number),
    ("mean accuracy of tasks", "accuracy", "{:.3f}".format),
]


def _training_html(groups: Sequence[GroupSummary]) -> str:
    """A row for each group, with the columns that any group has a text in."""
    titles = []
    columns = []
    for title, field, show in _TRAINING_COLUMNS:
        values = [getattr(group, field) for group in groups]
        texts = ["" if value is None else show(value) for value in values]
        if any(texts):
            titles.append(title)
            columns.append(texts)
    return render_table(titles, zip(*columns, strict=True), "numbers")


def _number(value: float) -> str:
    return NOT_KNOWN if math.isnan(value) else f"{value:.2f}"


def _listed(values: Sequence[Any]) -> str:
    shown = "; ".join(map(str, values[:8]))
    if len(values) > 8:
        shown += f" and {len(values) - 8} more"
    return shown or "none"


# title of a row, the analysis, the field of its result ("": the result), and its text
_FINDINGS: list[tuple[str, str, str, Callable[[Any], str]]] = [
    ("Λ score (1: as pre-norm)", "findings", "lambda_score", _number),
    (
        "weight of the embedding in the readout (1: as the mean source)",
        "findings",
        "embedding_in_readout",
        _number,
    ),
    ("share of weights on attentions", "findings", "attention_share", _number),
    ("reach of attentions (1: as MLPs)", "findings", "attention_reach", _number),
    (
        "sub-layers that became parallel",
        "findings",
        "parallel_pairs",
        lambda pairs: _listed([f"{a} ∥ {b}" for a, b in pairs]),
    ),
    ("wasted sub-layers", "findings", "wasted", _listed),
    ("sources that streams carry with opposite signs", "findings", "opposite_signs", _listed),
    ("largest error of the unfolded map", "unfolded", "error", "{:.1e}".format),
    ("alarms", "alarms", "", _listed),
]


def _findings_html(models: InspectedModels) -> str:
    rows = [["connection", *(model.connection for model in models)]]
    for title, analysis, field, show in _FINDINGS:
        if any(analysis in model.results for model in models):
            texts = []
            for model in models:
                result = model.results.get(analysis)
                value = getattr(result, field, None) if field else result
                texts.append("" if value is None else show(value))
            rows.append([title, *texts])
    return render_table(["", *(model.name for model in models)], rows)


def _notes_html(models: InspectedModels, training: TrainingReport | None) -> str:
    notes = []
    for model in models:
        notes += [f"{model.name}: {line}." for line in model.failures()]
        unfolded = model.results.get("unfolded")
        if unfolded is not None and unfolded.by_projection:
            notes.append(
                f"{model.name}: its connection weighs channels separately. The numbers of its "
                f"unfolded map are projections, of {unfolded.tokens} tokens."
            )
    if training is not None:
        notes = training.notes + notes
    shown = render_notes(notes)
    if training is not None and training.not_drawn:
        lines = render_notes(f"{name} needs {needs}." for name, needs in training.not_drawn.items())
        shown += f"<details><summary>Views that need other runs</summary>{lines}</details>\n"
    return shown
