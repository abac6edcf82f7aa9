"""`crosslayer compare`: train one body with several connections on the same batches, and report."""

from pathlib import Path
from typing import Any

from .console import (
    ARMS,
    add_arms,
    add_settings,
    first_rank,
    make_console,
    make_parser,
    make_table,
    print_table,
    progress_bars,
    recipe_of,
    silence_libraries,
)

DEFAULTS = False  # between an option's default and what is given there is a recipe


def parser() -> Any:
    command = make_parser(
        "Train one body with several connections on the same batches from the same weights, and report."
    )
    command.add_argument(
        "recipe", nargs="?", type=str | None, default=None, help="a .yaml file of arms and options"
    )
    command.add_argument(
        "--scale",
        type=str,
        default="full",
        help="tiny: a recipe's structure, small enough for a CPU",
    )
    command.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs of each arm; more than one gives means and spreads",
    )
    command.add_argument(
        "--out", type=str | None, default=None, help="folder of results.json and the report"
    )
    add_arms(command)
    add_settings(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..train import compare
    from ..train.parallel import shutdown_distributed
    from ..train.report import cells, columns, write_report

    console = make_console()
    out = options.get("out")
    comparison = compare.prepare(
        recipe_of(options, ARMS), options.get("seeds", 1), Path(out) if out else None
    )
    stopped = False
    try:
        with progress_bars(console) as watcher:
            watchers: dict[tuple[str, int], Any] = {}

            def watch(arm: Any, seed: int, progress: Any) -> None:
                if (arm.name, seed) not in watchers:
                    name = arm.name if comparison.seeds == 1 else f"{arm.name}, seed {seed}"
                    watchers[arm.name, seed] = watcher(name, comparison.recipe.settings(arm))
                watchers[arm.name, seed](progress)

            compare.run(comparison, watch)
    except KeyboardInterrupt:
        stopped = True
    code = 130 if stopped else 0
    if not stopped:
        shutdown_distributed()
    if not first_rank():
        return code
    rows = cells(comparison)
    if not rows:
        why = "Stopped before any arm had finished" if stopped else "Every run diverged"
        console.print(f"{why}; nothing to report.")
        return code or 1
    write_report(comparison)
    table = make_table("crosslayer compare", columns(comparison))
    for row in rows:
        table.add_row(*row)
    print_table(table, console)
    if stopped:
        console.print(
            f"Stopped: {len(comparison.runs)} runs had finished. The same command goes on with the others."
        )
    console.print(f"Report: {comparison.folder / 'report.html'}")
    return code
