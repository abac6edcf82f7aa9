"""What connections cost in time and memory, measured: `crosslayer bench ops chain step decode memory`.

    for row in bench.run("chain", Path("benchmarks/results"), arms=["hyper"], dims=[512]):
        print(row["arm"], row["variant"], row["forward+backward PreNorms"])

ops      each kernel beside its reference, eager and compiled, beside peers, and against the bytes it must move
chain    a row of connections around sub-layers that only copy, beside PreNorm's and other packages'
step     a whole training step of a llama, beside PreNorm's
decode   a token with a static cache, beside PreNorm's
memory   the most a training step's activations take, kept or recomputed

All variants of a row's group are measured in one process by turns, and every row is in `NAME.csv` with its conditions
as soon as it is known.
"""

import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import keep_pages
from benchmarks.rows import Row, append, check, conditions
from benchmarks.settings import Settings
from crosslayer.validation import did_you_mean

BENCHMARKS = ("ops", "chain", "step", "decode", "memory")


def columns(benchmark: str) -> tuple[str, ...]:
    """What a benchmark's rows say beside their conditions and their note."""
    return import_module(f"{__name__}.{benchmark}").COLUMNS


def ready(benchmark: str, out: Path, **given: Any) -> Settings:
    """The settings of a benchmark; nothing is written, and a ValueError says what is wrong with them or the folder."""
    if benchmark not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise ValueError(
            f"unknown benchmark {benchmark!r}{did_you_mean(benchmark, BENCHMARKS)}; known: {known}"
        )
    check(out / f"{benchmark}.csv", columns(benchmark))
    return Settings.of(benchmark, **given)


def run(benchmark: str, out: Path, **given: Any) -> Iterator[Row]:
    """The rows of a benchmark, each as it is measured, once it is in the folder's .csv file.

    Args:
        benchmark: one of `BENCHMARKS`.
        out: a folder, made where it is not there.
        given: options of `Settings`.
    """
    settings = ready(benchmark, out, **given)
    if settings.device == "cpu":
        keep_pages()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    out.mkdir(parents=True, exist_ok=True)
    about = conditions(settings.on, command(benchmark, given))
    for row in import_module(f"{__name__}.{benchmark}").measure(settings):
        note = "; ".join(part for part in (settings.note, row.get("note", "")) if part)
        full = about | row | {"note": note}
        append(out / f"{benchmark}.csv", columns(benchmark), [full])
        yield full


def command(benchmark: str, given: dict[str, Any]) -> str:
    """The command line that gives the same rows."""
    words = ["crosslayer", "bench", benchmark]
    for name, value in given.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
