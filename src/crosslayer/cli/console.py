"""What the commands share: how they are parsed, their tables, and silence from the frameworks beneath."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..spec import available

ARMS = ["prenorm", "denseformer", "mudd", "hyper", "attnres", "mgr"]


def make_parser(description: str) -> Any:
    from jsonargparse import ArgumentParser

    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def add_arms(parser: Any) -> None:
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, type=str,
        help='connections, separated by spaces or commas, like prenorm "mudd(dilation=2)"; known: '
        + ", ".join(available()),
    )  # fmt: skip


def add_settings(parser: Any) -> None:
    """The options of a run, in their groups."""
    from ..train.settings import PARTS

    for part in PARTS:
        parser.add_class_arguments(part, None)


def recipe_of(options: Any, arms: Sequence[str]) -> Any:
    """The recipe that was named, or one of these arms, with what was given beside it before all else.

    Args:
        options: those that were given, and no others.
        arms: where neither a recipe nor `--arms` is given.
    """
    from ..spec import split_specs
    from ..train.recipe import Arm, Recipe, load_recipe
    from ..train.settings import OPTIONS

    given = {name: options[name] for name in OPTIONS if name in options}
    if options.get("recipe") is None:
        if "scale" in options:
            raise ValueError(
                "--scale makes a recipe smaller; without one, give sizes like --layers and --dim"
            )
        return Recipe(
            unique(map(Arm.of, split_specs(" ".join(options.get("arms", arms))))), {}, "full", given
        )
    recipe = load_recipe(options.recipe, options.get("scale", "full"), **given)
    if "arms" in options:
        known = {arm.name: arm for arm in recipe.arms}
        names = [
            name
            for word in options.arms
            for name in ([word] if word in known else split_specs(word))
        ]
        recipe.arms = unique(known[name] if name in known else Arm.of(name) for name in names)
    return recipe


def unique(arms: Iterable[Any]) -> list[Any]:
    return list({arm.name: arm for arm in arms}.values())


def first_rank() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def make_console(**options: Any) -> Any:
    """A terminal that shows names and paths as they are: what is in brackets is no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


@contextmanager
def progress_bars(console: Any) -> Iterator[Callable[[str, Any], Callable[[Any], None]]]:
    """Progress bars: given a name and its settings, one that takes a run's `Progress`. Rank 0 alone shows them."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ..train.task import find_task as kind

    columns = [
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} {task.fields[unit]}/s"), TextColumn("{task.fields[rest]}"),
        TimeRemainingColumn(),
    ]  # fmt: skip
    with Progress(
        *columns, console=console, refresh_per_second=4, disable=not first_rank()
    ) as shown:

        def begin(name: str, settings: Any) -> Callable[[Any], None]:
            task = shown.add_task(
                name, total=settings.optimization.steps, loss=float("nan"), speed=0, rest="",
                unit=kind(settings.model).unit,
            )  # fmt: skip

            def watch(now: Any) -> None:
                share = "" if now.mfu is None else f"MFU {now.mfu:.0%}, "
                shown.update(
                    task, completed=now.step, loss=now.loss, speed=now.tokens_per_second,
                    rest=f"{share}{now.memory / 2**30:.1f} GiB",
                )  # fmt: skip

            return watch

        yield begin


def make_table(title: str, head: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def print_table(table: Any, console: Any) -> None:
    # a narrow terminal may wrap a row, but no number is cut off
    make_console(width=max(console.width, make_console(width=999).measure(table).maximum)).print(
        table
    )


def silence_libraries() -> None:
    """Nobody comparing connections needs the frameworks' greetings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    # a pending write is a Linear's output, which is a view; nothing writes into it
    warnings.filterwarnings("ignore", ".*returned a view tensor")
