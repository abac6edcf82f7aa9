"""`crosslayer compare | cost`: the library from the command line. Every command is a thin layer over a function."""

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .registry import available, nearest, separate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code. What is wrong with the input is one line on stderr, never a traceback."""
    try:
        return command(arguments)
    except ModuleNotFoundError as error:
        if error.name not in ("jsonargparse", "rich", "lightning", "matplotlib", "transformers"):
            raise
        message = f"{error.name} is not installed; pip install 'crosslayer[train]'"
    except (ValueError, OSError, ArgumentError) as error:
        message = " ".join(str(error).split())
    print(f"crosslayer: {message}", file=sys.stderr)
    return 1


def command(arguments: Sequence[str] | None) -> int:
    from jsonargparse import ArgumentParser

    from .compare import ARMS
    from .costs import GPUS, sized
    from .train.run import Settings

    compare = ArgumentParser(
        description="Train one body with several connections on the same batches from the same weights, and report.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    compare.add_argument("--config", action="config", help="a YAML file of these options")
    compare.add_argument("--seeds", type=int, default=1, help="runs of each arm; more than one gives means and spreads")
    compare.add_argument("--out", type=str | None, default=None, help="folder of results.json and the report")
    compare.add_class_arguments(Settings, None)

    cost = ArgumentParser(
        description="What connections cost on a body before it is trained: parameters, FLOPs, memory, and the least "
        "time their traffic takes.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    cost.add_function_arguments(sized, None)
    cost.add_argument("--batch", type=int, default=8, help="sequences a step on one GPU")
    cost.add_argument("--context", type=int, default=2048, help="tokens a sequence")
    cost.add_argument("--gpu", type=str, default="H100", help="whose memory sets the floor: " + ", ".join(GPUS))

    commands = {"compare": compare, "cost": cost}
    for sub in commands.values():
        sub.add_argument(
            "--arms", nargs="+", default=ARMS, type=str,
            help='connections, separated by spaces or commas, like prenorm "mudd(dilation=2)"; known: '
            + ", ".join(available()),
        )  # fmt: skip

    parser = ArgumentParser(
        prog="crosslayer",
        description="What connects the layers of a Transformer, as one library.",
        exit_on_error=False,
        allow_abbrev=False,
        version=__version__,
    )
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name, sub in commands.items():
        subcommands.add_subcommand(name, sub)
    try:
        given = parser.parse_args(arguments)
    except ArgumentError as error:
        unknown = re.search(r"unrecognized arguments: (--[^ =]+)", str(error))
        asked = next((a for a in arguments or sys.argv[1:] if a in commands), None)
        if not unknown or asked is None:
            raise
        known = [f"--{option}" for option in ("config", *commands[asked].get_defaults().keys())]
        raise ValueError(
            f"unknown option {unknown[1]}{nearest(unknown[1], known)}; see crosslayer {asked} --help"
        ) from None
    options = given[given.command]
    if given.command == "cost":
        return run_cost(options)
    return run_compare(options, Settings(**{name: options[name] for name in Settings.__dataclass_fields__}))


def run_cost(options: Any) -> int:
    quiet()
    from rich.console import Console

    from . import costs

    if options.gpu not in costs.GPUS:
        raise ValueError(
            f"unknown GPU {options.gpu!r}{nearest(options.gpu, costs.GPUS)}; known: {', '.join(costs.GPUS)}"
        )
    sizes = {name: options[name] for name in ("family", "layers", "dim", "heads", "vocab")}
    arms = separate(" ".join(options.arms))
    rows = costs.estimates(arms, costs.sized(**sizes), options.batch, options.context)
    gpu = costs.GPUS[options.gpu]
    console, table = Console(), grid("crosslayer cost", costs.HEAD)
    for row in rows:
        table.add_row(*costs.cells(row, gpu))
    show(table, console)
    console.print(costs.legend(rows[0], gpu), soft_wrap=True)
    return 0


def grid(title: str, head: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def show(table: Any, console: Any) -> None:
    from rich.console import Console

    # a narrow terminal may wrap a row, but no number is cut off
    Console(width=max(console.width, Console(width=999).measure(table).maximum)).print(table)


def run_compare(options: Any, settings: Any) -> int:
    quiet()
    from rich.console import Console

    from . import compare
    from .report import HEAD, cells, report

    console = Console()
    arms = separate(" ".join(options.arms))
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

    from . import compare

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


def quiet() -> None:
    """Nobody comparing connections needs the frameworks' greetings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


if __name__ == "__main__":
    sys.exit(main())
