"""`crosslayer compare`: train one body with several connections on the same batches, and report."""

from pathlib import Path
from typing import Any

from ..registry import separate
from .shared import add_arms, grid, quiet, show
from .shared import parser as empty


def parser() -> Any:
    from ..train.run import Settings

    command = empty("Train one body with several connections on the same batches from the same weights, and report.")
    command.add_argument("--config", action="config", help="a YAML file of these options")
    command.add_argument("--seeds", type=int, default=1, help="runs of each arm; more than one gives means and spreads")
    command.add_argument("--out", type=str | None, default=None, help="folder of results.json and the report")
    command.add_class_arguments(Settings, None)
    add_arms(command)
    return command


def run(options: Any) -> int:
    quiet()
    from rich.console import Console

    from .. import compare
    from ..report import HEAD, cells, report
    from ..train.run import Settings

    console = Console()
    arms = separate(" ".join(options.arms))
    settings = Settings(**{name: options[name] for name in Settings.__dataclass_fields__})
    comparison = compare.prepare(settings, arms, options.seeds, Path(options.out) if options.out else None)
    stopped = False
    try:
        watched(comparison, console)
    except KeyboardInterrupt:
        stopped = True
    rows = compare.table(comparison)
    if not rows:
        console.print("Stopped before any arm had finished; nothing to report.")
        return 130
    report(comparison)
    table = grid("crosslayer compare", HEAD)
    for row in rows:
        table.add_row(*cells(row))
    show(table, console)
    if stopped:
        console.print(f"Stopped: {len(comparison.runs)} runs had finished. The same command goes on with the others.")
    console.print(f"Report: {comparison.folder / 'report.html'}")
    return 130 if stopped else 0


def watched(comparison: Any, console: Any) -> None:
    """Run it under a progress bar an arm: loss, tokens a second, time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .. import compare

    columns = [
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn(),
    ]  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=4) as bars:
        tasks: dict[tuple[str, int], Any] = {}

        def watch(arm: str, seed: int, progress: Any) -> None:
            if (arm, seed) not in tasks:
                name = arm if comparison.seeds == 1 else f"{arm}, seed {seed}"
                tasks[arm, seed] = bars.add_task(name, total=comparison.settings.steps, loss=float("nan"), speed=0)
            bars.update(tasks[arm, seed], completed=progress.step, loss=progress.loss, speed=progress.tokens_per_second)

        compare.run(comparison, watch)
