"""`crosslayer compare`: train a backbone with several connections on the same batches."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import (
    ProgressBars,
    hold_folder,
    is_rank_zero,
    make_console,
    make_table,
    print_table,
    silence_libraries,
)
from .options import (
    DEFAULT_ARMS,
    add_recipe,
    add_settings,
    add_specs,
    make_parser,
    recipe_from_options,
)

if TYPE_CHECKING:
    from ..train.compare import Comparison
    from ..train.recipe import Arm, Recipe
    from ..train.run_state import StepResult

DEFAULTS = False  # a recipe comes between an option's default and its given value


def parser() -> Any:
    command = make_parser(
        "Compare connections: train them on the same batches from the same weights, and report. "
        "The same command resumes what was stopped."
    )
    add_recipe(command)
    command.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs of each arm; with more than one the report has standard deviations and 95 % "
        "intervals",
    )
    command.add_argument(
        "--search-rates",
        type=bool,
        default=False,
        help="first find the best learning rate of each arm with the first seed: the given rate, "
        "twice and half of it, and so on",
    )
    command.add_argument(
        "--out",
        type=str,
        default=None,
        help="folder of results.json and the report; default: compare- and a hash of the settings "
        "and the data",
    )
    add_specs(command, "arms of the recipe (default: all of them), or connections")
    add_settings(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    recipe = recipe_from_options(options, DEFAULT_ARMS)
    search_rates = options.get("search_rates", False)
    return compare_and_report(recipe, options.get("seeds", 1), options.get("out"), search_rates)


def compare_and_report(
    recipe: "Recipe", seeds: int, out: str | None, search_rates: bool = False
) -> int:
    """Run a comparison with progress bars, write its report and print its table; the exit code."""
    from ..train.compare import prepare_comparison
    from ..train.rate_search import names_at_rates

    comparison = prepare_comparison(recipe, seeds, Path(out) if out else None, search_rates)
    if not comparison.missing_runs() and is_rank_zero():
        make_console().print("All runs had ended already; nothing is trained.")
        names = {name for arm in comparison.recipe.arms for name in names_at_rates(arm.name)}
        if any(run.arm in names for run in comparison.results.diverged):
            make_console().print(
                "Diverged runs are not tried again; choose another --out to train them anew."
            )
    with hold_folder(comparison.folder):
        return _run_and_report(comparison)


def _run_and_report(comparison: "Comparison") -> int:
    from ..train.compare import run_comparison
    from ..train.parallel import shutdown_distributed
    from ..train.report import comparison_table, write_comparison_report
    from ..train.report_notes import run_notes, table_notes

    console = make_console()
    stopped = False
    try:
        with ProgressBars(console, comparison.recipe.task.unit) as bars:
            run_comparison(comparison, _show_steps(comparison, bars))
    except KeyboardInterrupt:
        stopped = True
    if not stopped:
        shutdown_distributed()
    code = 130 if stopped else int(bool(comparison.without_memory))
    if not is_rank_zero():
        return code

    columns, rows = comparison_table(comparison)
    if not rows:
        console.print(f"{_why_no_rows(comparison, stopped)}; nothing to report.")
        for note in run_notes(comparison):
            console.print(note)
        return code or 1
    write_comparison_report(comparison)
    table = make_table("crosslayer compare", columns)
    for row in rows:
        table.add_row(*row)
    print_table(table, console)
    for note in table_notes(comparison):
        console.print(note)
    if stopped:
        finished = len(comparison.results.runs)
        noun = "run" if finished == 1 else "runs"
        console.print(f"Stopped with {finished} finished {noun}. The same command resumes.")
    console.print(f"Report: {comparison.folder / 'report.html'}")
    return code


def _why_no_rows(comparison: "Comparison", stopped: bool) -> str:
    if stopped:
        return "Stopped before any arm had finished"
    return "No run has ended" if comparison.without_memory else "Every run diverged"


def _show_steps(comparison: "Comparison", bars: ProgressBars) -> Callable[..., None]:
    """Shows each step of each run in a bar."""
    steps: dict[str, int] = {}  # of each arm; settings are not read at every step

    def show_step(arm: "Arm", seed: int, result: "StepResult") -> None:
        if arm.name not in steps:
            steps[arm.name] = comparison.recipe.settings(arm).optimization.steps
        name = arm.name if comparison.seeds == 1 else f"{arm.name}, seed {seed}"
        bars.show_step(name, steps[arm.name], result)

    return show_step
