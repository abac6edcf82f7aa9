"""A comparison as a person reads it: the table, report.md, and report.html with its pictures inside."""

import html
import io
from collections.abc import Callable
from typing import Any

from ..files import write_text_atomic
from .compare import Comparison, Row, result_table
from .task import LANGUAGE, find_task

# Okabe and Ito's colours, told apart without red and green
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"]

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .note { color: #555; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
th { border-bottom: 2px solid #999; font-weight: 600; } tr.best td { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; }
.charts svg { width: 100%; height: auto; }
"""


def columns(comparison: Comparison) -> list[str]:
    """The head of the table."""
    rows = result_table(comparison)
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    paper = ["paper"] * (comparison.recipe.scale == "full" and any(row.paper for row in rows))
    return [
        "arm",
        "parameters",
        "extra",
        "val loss",
        *metrics,
        "vs prenorm",
        pace(comparison),
        "activations",
        *paper,
    ]


def cells(comparison: Comparison) -> list[list[str]]:
    """The rows of the table, as `columns` names them."""

    def with_spread(value: float | None, around: float | None, form: str) -> str:
        if value is None:
            return "–"
        return f"{value:{form}}" + (f" ± {around:{form.lstrip('+')}}" if around is not None else "")

    def cell(row: Row, column: str) -> str:
        known = {
            "arm": row.arm,
            "parameters": f"{row.parameters:,}",
            "extra": f"{row.extra:.2%}",
            "val loss": with_spread(row.loss, row.loss_spread, ".4f"),
            "vs prenorm": with_spread(row.difference, row.difference_spread, "+.4f"),
            pace(comparison): "–" if row.relative_speed is None else f"{row.relative_speed:.2f}×",
            "activations": "–" if row.relative_memory is None else f"{row.relative_memory:.2f}×",
            "paper": ", ".join(f"{name} {value:g}" for name, value in row.paper.items()) or "–",
        }
        value, around = row.metrics.get(column, (None, None))
        return known.get(column) or with_spread(value, around, ".4f")

    return [
        [cell(row, column) for column in columns(comparison)] for row in result_table(comparison)
    ]


def notes(comparison: Comparison) -> list[str]:
    results, env, rows = (
        comparison.results,
        comparison.results["environment"],
        result_table(comparison),
    )
    model, data, optimization, engine = comparison.recipe.settings()
    sizes = " and ".join(
        f"{count:,} {name}" for name, count in results["data"].items() if name != "sha256"
    )
    entropy = (
        f"; order-0 entropy {results['entropy']:.3f} bits a byte" if results["entropy"] else ""
    )
    text = [
        f"{model.family} body, {model.layers} layers, width {model.dim}, {model.heads} heads; {optimization.steps} "
        f"steps of {data.batch} × {data.context} {data.tokenizer if data.tokenizer == 'bytes' else 'tokens'}, "
        f"{'Muon and AdamW' if optimization.optimizer == 'muon' else 'AdamW'} at {optimization.lr:g}, "
        f"precision {engine.precision}."
        + (f" Scale: {results['scale']}." if results["scale"] != "full" else ""),
        f"Data: {data.data}, {sizes}{entropy}.",
        f"Measured on {env['device']}; torch {env['torch']}, Python {env['python']}, crosslayer {env['crosslayer']}.",
        "Every arm sees the same batches in the same order from the same body weights. vs prenorm is the difference in "
        "validation loss ("
        + unit(comparison)
        + "); speed and activations (what one forward pass keeps for the backward) are "
        "ratios to prenorm's, by the reference implementation, not by fused kernels.",
    ]
    seeds = max((row.seeds for row in rows), default=0)
    if seeds > 1:
        text.append(
            f"Mean ± standard deviation over {seeds} seeds; differences are taken seed by seed."
        )
    else:
        text.append("One seed each: --seeds 3 shows how much of a difference is chance.")
    for run in comparison.results["diverged"]:
        text.append(
            f"{run['arm']}, seed {run['seed']}: diverged, its loss was {run['loss']} at step {run['step']}."
        )
    for run in comparison.runs:
        if run["skipped"]:
            count = len(run["skipped"])
            text.append(
                f"{run['arm']}, seed {run['seed']}: the batches of {count} unstable steps were skipped."
            )
    missing = list(dict.fromkeys(arm.name for arm, _ in comparison.missing))
    if missing:
        text.append(f"Not finished: {', '.join(missing)}. The same command goes on from here.")
    return text


def markdown(comparison: Comparison) -> str:
    head = columns(comparison)
    lines = [
        "# crosslayer compare",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" + " ---: |" * (len(head) - 1),
    ]
    lines += ["| " + " | ".join([f"`{first}`", *rest]) + " |" for first, *rest in cells(comparison)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(comparison)), ""])


def page(comparison: Comparison) -> str:
    rows = result_table(comparison)
    best = min(rows, key=lambda row: row.loss).arm
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(comparison))
    body = ""
    for row in cells(comparison):
        data = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f'<tr class="best">{data}</tr>' if row[0] == best else f"<tr>{data}</tr>"
    lead, *rest = (html.escape(note) for note in notes(comparison))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>crosslayer compare</title><style>{STYLE}</style></head><body>
<h1>crosslayer compare</h1>
<p>{lead}</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<div class="charts">
<figure><h2>Validation loss while training</h2>{picture(comparison, curves)}</figure>
<figure><h2>Loss against throughput</h2>{picture(comparison, tradeoff)}</figure>
</div>
<div class="note">{"".join(f"<p>{note}</p>" for note in rest)}</div>
</body></html>
"""


def curves(axes: Any, comparison: Comparison) -> None:
    """Validation loss against step, the mean over seeds with their range shaded."""
    axes.set_xlabel("step")
    for arm, colour in colours(comparison).items():
        runs = [r["curve"] for r in comparison.runs if r["arm"] == arm]
        if not runs:
            continue
        known = [dict(run) for run in runs]
        steps = [
            step for step in known[0] if all(step in run for run in known)
        ]  # each may have its own --evals
        losses = [[run[step] for run in known] for step in steps]
        mean = [sum(at) / len(at) for at in losses]
        axes.plot(steps, mean, color=colour, label=arm, linewidth=1.6, marker="o", markersize=3)
        if len(runs) > 1:
            axes.fill_between(
                steps,
                [min(at) for at in losses],
                [max(at) for at in losses],
                color=colour,
                alpha=0.15,
            )
    axes.legend(frameon=False, fontsize=9)


def tradeoff(axes: Any, comparison: Comparison) -> None:
    """Final loss against throughput: down and to the right is better."""
    axes.set_xlabel(f"{pace(comparison).removesuffix('/s')} a second")
    for i, row in enumerate(sorted(result_table(comparison), key=lambda row: row.speed)):
        colour, at = colours(comparison)[row.arm], (row.speed, row.loss)
        axes.errorbar(*at, yerr=row.loss_spread, color=colour, marker="o", markersize=7, capsize=3)
        # neighbours along the axis are labelled above and below by turns
        offset = {"xytext": (0, -17 if i % 2 else 9), "textcoords": "offset points", "ha": "center"}
        axes.annotate(row.arm, at, fontsize=9, color=colour, **offset)
    axes.margins(x=0.2, y=0.15)


def colours(comparison: Comparison) -> dict[str, str]:
    return {arm.name: COLOURS[i % len(COLOURS)] for i, arm in enumerate(comparison.arms)}


def picture(comparison: Comparison, *panels: Callable[[Any, Comparison], None]) -> str:
    """An SVG of panels side by side, each with the validation loss upwards."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global state and no display

    out = io.StringIO()
    # the same picture from the same numbers, and names as they are
    with matplotlib.rc_context({"svg.hashsalt": "crosslayer", "text.parse_math": False}):
        figure = Figure(figsize=(6 * len(panels), 4.2), layout="constrained")
        for axes, draw in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            draw(axes, comparison)
            axes.set_ylabel(f"validation loss ({unit(comparison)})")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def pace(comparison: Comparison) -> str:
    """What speed is counted in."""
    return f"{find_task(comparison.recipe.settings().model).unit}/s"


def unit(comparison: Comparison) -> str:
    """Of the validation loss."""
    settings = comparison.recipe.settings()
    return (
        f"nats a {'byte' if settings.data.tokenizer == 'bytes' else 'token'}"
        if find_task(settings.model) is LANGUAGE
        else "loss"
    )


def write_report(comparison: Comparison) -> None:
    """Write report.md and report.html beside results.json."""
    write_text_atomic(comparison.folder / "report.md", markdown(comparison))
    write_text_atomic(comparison.folder / "report.html", page(comparison))
