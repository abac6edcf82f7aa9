"""Texts of numbers for people, and tables of such texts in Markdown."""

import math
from collections.abc import Sequence

from .intervals import Interval, MeanStd

NOT_KNOWN = "–"
_TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def format_size(parameters: float) -> str:
    """Like "405M", "1.4B" or "15T"."""
    if not math.isfinite(parameters):
        return "?"
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * factor:  # which has three digits, like 1,000 of the next unit
            return f"{parameters / factor:.3g}{suffix}"
    return f"{parameters:.0f}"


def format_number(value: float) -> str:
    """Like "18,240" or "9.13"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def choose_time_unit(seconds: float) -> tuple[float, str]:
    """The seconds of the largest unit of which there are two at least, and its name."""
    return next((pair for pair in _TIME_UNITS if seconds >= 2 * pair[0]), _TIME_UNITS[-1])


def format_duration(seconds: float) -> str:
    """Like "2.8 hours"."""
    scale, unit = choose_time_unit(seconds)
    return f"{format_number(seconds / scale)} {unit}"


def format_mean_std(value: MeanStd, form: str) -> str:
    """Like "2.0811 ± 0.1267"; `form` is the mean's format, like "+.4f"."""
    text = f"{value.mean:{form}}"
    if value.std is not None:
        text += f" ± {value.std:{form.lstrip('+')}}"
    return text


def format_interval(interval: Interval | None) -> str:
    """Like "-0.0123 (-0.0150 to -0.0096)"; a single seed has no interval."""
    if interval is None:
        return NOT_KNOWN
    if math.isnan(interval.low):
        return f"{interval.mean:+.4f} (one seed)"
    return f"{interval.mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"


def format_loss(loss: float | None) -> str:
    """Like "2.0811", or "diverged"."""
    if loss is None:
        return NOT_KNOWN
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def markdown_table(
    columns: Sequence[str], rows: Sequence[dict[str, str]], texts: Sequence[str] | None = None
) -> str:
    """A table. texts: the columns that are aligned as text; by default the first."""
    texts = columns[:1] if texts is None else texts
    alignments = ["---" if column in texts else "---:" for column in columns]
    cells = [[row[column] for column in columns] for row in rows]
    # | is markup, inside of backticks too
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, *cells)]
    lines.insert(1, " | ".join(alignments))
    return "\n".join(f"| {line} |" for line in lines)
