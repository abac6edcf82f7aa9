"""`crosslayer bench`: what connections cost in time and memory, measured on this machine."""

from pathlib import Path
from typing import Any

from .console import add_arms, make_console, make_parser, make_table, print_table, silence_libraries

DEFAULTS = False  # what is not given depends on the benchmark and the device
OUT = "benchmarks/results"
FIRM = ("layers", "tokens", "dtype", "cache")  # the same in all rows of a table, and in its title

LISTS = {
    "ops": (str, "of ops: which of them; all where none is named"),
    "variants": (str, "what is measured: kernel, eager, compiled, peers"),
    "dims": (int, "widths, one after the other"),
    "streams": (int, "of ops: numbers of streams, or of sources"),
}


def parser() -> Any:
    from benchmarks import BENCHMARKS
    from benchmarks.settings import Settings

    command = make_parser(
        "What connections cost in time and memory, measured on this machine, beside PreNorm and peers. "
        "What is not given depends on the benchmark and on the device, whatever the defaults below say."
    )
    command.add_argument(
        "benchmarks", nargs="+", type=str, help="one or several of " + ", ".join(BENCHMARKS)
    )
    command.add_argument(
        "--out", type=str, default=OUT, help="folder of the .csv files that rows are added to"
    )
    add_arms(command)
    for name, (kind, about) in LISTS.items():
        command.add_argument(f"--{name}", nargs="+", type=kind, help=about)
    command.add_class_arguments(Settings, None, skip={"arms", *LISTS})
    return command


def run(options: Any) -> int:
    silence_libraries()
    import benchmarks

    given = {
        name: value
        for name, value in options.items()
        if name not in ("benchmarks", "out", "config")
    }
    out, console = Path(options.get("out", OUT)), make_console()
    for name in options.benchmarks:
        benchmarks.ready(name, out, **given)
    for name in options.benchmarks:
        rows = list(benchmarks.run(name, out, **given))
        columns = [c for c in (*benchmarks.columns(name), "note") if shown(c)]
        table = make_table(title(name, rows), columns)
        for row in rows:
            table.add_row(*(cell(c, row.get(c)) for c in columns))
        print_table(table, console)
        console.print(f"Rows added to {out / name}.csv")
    return 0


def shown(column: str) -> bool:
    """A table has the numbers that are read; the file has them all."""
    return column not in (*FIRM, "rounds", "copy GB/s") and not column.endswith(
        ("spread ms", " MB")
    )


def title(name: str, rows: list[dict[str, Any]]) -> str:
    first = rows[0] if rows else {}
    firm = [f"{key} {first[key]}" for key in FIRM if key in first]
    copied = [f"copy {first['copy GB/s']:,.0f} GB/s"] if first.get("copy GB/s") else []
    return ", ".join(
        [
            f"crosslayer bench {name}: {first.get('device')}, {first.get('threads')} threads",
            *firm,
            *copied,
        ]
    )


def cell(column: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return (
        f"{value:.1%}" if "of " in column else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    )
