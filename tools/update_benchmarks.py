"""Writes the tables of benchmarks/README.md that come from benchmarks/results/.

python -m tools.update_benchmarks
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.evidence.pages import fill_page
from benchmarks.results import NOT_MEASURED, Row, read_rows
from crosslayer.files import write_text_atomic
from crosslayer.number_texts import NOT_KNOWN, markdown_table

FOLDER = Path(__file__).parent.parent / "benchmarks"
PAGE = FOLDER / "README.md"
# What a kernel should have at most, by the columns of machine_code.csv.
TARGETS = {"load rounds": 2, "barriers": 12, "spilled bytes": 0}
# The columns of the table of kernels: those of machine_code.csv that they show, and their formats.
KERNEL_COLUMNS = {
    "registers": ("registers", ".0f"),
    "waits for memory": ("load rounds", ".0f"),
    "waits for other warps": ("barriers", ".0f"),
    "spilled bytes": ("spilled bytes", ".0f"),
    "programs an SM": ("blocks an SM", ".0f"),
    "modelled of copy": ("modelled of copy", ".0%"),
}
SHAPE_COLUMNS = ("op", "pass", "sources or streams")


def kernel_table(rows: Iterable[Row]) -> str:
    """The kernels that miss a target: ranges over D, norms and versions of triton."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        direction = row["kernel"].rpartition("_")[2]
        if direction not in ("forward", "backward"):
            direction = "both"  # a part of either
        op = row["op"].removesuffix(" normed")
        groups[op, direction, int(row["n"] or 1)].append(row)
    lines = []
    for key, group in groups.items():
        if any(int(row[name]) > most for row in group for name, most in TARGETS.items()):
            shape = dict(zip(SHAPE_COLUMNS, map(str, key), strict=True))
            ranges = {title: value_range(group, *c) for title, c in KERNEL_COLUMNS.items()}
            lines.append(shape | ranges)
    return markdown_table([*SHAPE_COLUMNS, *KERNEL_COLUMNS], lines, SHAPE_COLUMNS[:2])


def value_range(rows: Sequence[Row], name: str, form: str) -> str:
    """The least and the largest value of a column, like "4 to 13"."""
    values = [float(row[name]) for row in rows if row[name] != NOT_MEASURED]
    if not values:
        return NOT_KNOWN
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def compile_table(rows: Iterable[Row]) -> str:
    """How many kernels a model compiles, and the seconds with each version of triton."""
    seconds: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        version = "triton " + ".".join(row["triton"].split(".")[:2])
        line = seconds[row["connection"], row["layers"]]
        line["kernels"] = row["compiled kernels"]
        line[version] = f"{float(row['compile seconds']):.0f} s"
    versions = sorted({version for line in seconds.values() for version in line} - {"kernels"})
    lines = [
        {"connection": f"`{name}`", "layers": layers, **dict.fromkeys(versions, NOT_KNOWN), **line}
        for (name, layers), line in seconds.items()
    ]
    return markdown_table(["connection", "layers", "kernels", *versions], lines)


def page_sections() -> dict[str, str]:
    """The text of each marked part of the page, by its name."""
    return {
        "kernels": kernel_table(read_rows(FOLDER / "results" / "machine_code.csv")),
        "compilation": compile_table(read_rows(FOLDER / "results" / "compile_time.csv")),
    }


def main() -> None:
    write_text_atomic(PAGE, fill_page(PAGE.read_text("utf8"), page_sections()))


if __name__ == "__main__":
    main()
