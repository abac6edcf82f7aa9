"""Measure what connections cost in time and memory on this machine.

    python -m benchmarks chain --specs prenorm hyper --dims 512

ops           each op's kernel, its torch reference (eager and compiled) and peers
chain         connections alone, around sub-layers that copy; also other packages
step          a whole training step of a llama
decode        one token with a static cache
memory        peak activation memory of a training step, stored or recomputed
arms          every arm of a study: a training step, a forward pass, decoding
machine_code  kernels compiled for a GPU, which need not be here: waits and a model of their speed
compile_time  how many kernels a model compiles, and how long that takes
launches      Python's time for a call of each op, which needs no GPU

chain, step, decode, memory and arms compare with pre-norm in the same process. Each row is appended
to OUT/NAME.csv as soon as it is measured.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cases import OPS
from benchmarks.results import Row, append_row, check_columns, describe_conditions, read_rows
from benchmarks.settings import VARIANTS, BenchmarkSettings
from crosslayer.cli.console import make_console, make_table, print_table, silence_libraries
from crosslayer.cli.options import OneLineParser
from crosslayer.errors import error_in_one_line
from crosslayer.number_texts import NOT_KNOWN, format_number
from crosslayer.validation import DTYPES

BENCHMARKS = (
    *("ops", "chain", "step", "decode", "memory", "arms"),
    *("machine_code", "compile_time", "launches"),
)
RESULTS = Path(__file__).parent / "results"
# columns with the same value in every row; they are in the title of the printed table
TITLE_COLUMNS = ("device", "threads", "layers", "tokens", "dtype", "cache", "copy GB/s")
FILE_ONLY_COLUMNS = ("rounds",)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Most defaults depend on the benchmark and the device: see benchmarks/settings.py.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS)
    add("--out", type=Path, default=RESULTS, help="folder of the .csv files")
    add("--specs", nargs="+", help='connections, like prenorm "mudd(dilation=2)"; not for ops')
    add("--study", help="for arms: a study of evidence/studies.yaml")
    add("--arms", nargs="+", help="names of its arms; all by default")
    add("--ops", nargs="+", choices=OPS, help="ops to measure; all by default")
    add("--variants", nargs="+", choices=VARIANTS, help="what to measure")
    add("--dims", nargs="+", type=int, help="widths D, one after the other")
    add("--streams", nargs="+", type=int, help="of ops: numbers of streams or sources")
    add("--layers", type=int, help="layers of the model, or of the chain (two sub-layers each)")
    add("--batch", type=int, help="sequences at once; decode has one")
    add("--context", type=int, help="tokens a sequence; for decode, length of the cache")
    add("--vocab", type=int, help="size of the vocabulary")
    add("--dtype", choices=DTYPES)
    add("--device", choices=("cuda", "cpu"), help="a GPU by default, if there is one")
    add("--compile", choices=("layers", "model"), help="what the variant `compiled` compiles")
    add("--rounds", type=int, help="largest number of rounds; the median is reported")
    add("--seconds", type=float, help="time limit of a group of variants, after compilation")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    silence_libraries()
    try:
        options = vars(make_parser().parse_args(words))
        name = options.pop("benchmark")
        out = options.pop("out")
        rows = list(
            run_benchmark(name, out, shlex.join(["python", "-m", "benchmarks", *words]), **options)
        )
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error_in_one_line(error)}", file=sys.stderr)
        return 1
    print_rows(name, rows)
    if rows:
        print(f"Rows appended to {out / name}.csv")
    return 0


def run_benchmark(name: str, out: Path, command: str = "", **options: Any) -> Iterator[Row]:
    """Yield the rows of a benchmark; each is in the folder's .csv file before it is yielded.

    Args:
        name: one of `BENCHMARKS`.
        out: folder of the .csv files; it is made if it is missing.
        command: the command line, for the column of that name.
        options: fields of `BenchmarkSettings`.

    Raises:
        ValueError: an option is wrong, or the .csv file has other columns. Nothing has been
            written.
    """
    module = import_module(f"benchmarks.{name}")
    settings = BenchmarkSettings.for_benchmark(name, **options)
    file = out / f"{name}.csv"
    check_columns(file, module.COLUMNS)
    settings.earlier_rows = read_rows(file)
    out.mkdir(parents=True, exist_ok=True)
    conditions = describe_conditions(settings.torch_device, command)
    for measured in module.measure(settings):
        row = conditions | {"note": ""} | measured
        append_row(file, module.COLUMNS, row)
        yield row


def print_rows(name: str, rows: list[Row]) -> None:
    """Print the rows as a table; what all rows share is in its title."""
    if not rows:
        print("Nothing is left to measure.")
        return
    columns = [
        column
        for column in [*import_module(f"benchmarks.{name}").COLUMNS, "note"]
        if column not in (*TITLE_COLUMNS, *FILE_ONLY_COLUMNS)
        and not column.endswith((" IQR ms", " MB"))
    ]
    shared = [f"{key} {_format_cell(key, rows[0][key])}" for key in TITLE_COLUMNS if key in rows[0]]
    table = make_table(", ".join([name, *shared]), columns)
    for row in rows:
        table.add_row(*(_format_cell(column, row.get(column)) for column in columns))
    print_table(table, make_console())


def _format_cell(column: str, value: Any) -> str:
    if value is None:
        return NOT_KNOWN
    if not isinstance(value, float):
        return str(value)
    if "of " in column:
        return f"{value:.1%}"
    return format_number(value)


if __name__ == "__main__":
    sys.exit(main())
