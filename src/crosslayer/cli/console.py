"""What the commands share: parsers, options of a run, progress bars, tables."""

import argparse
import logging
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import torch

from ..files import lock_folder
from ..methods import available
from ..validation import parse_dtype

if TYPE_CHECKING:
    from ..train.recipe import Arm, Recipe
    from ..train.run_state import StepResult

DEFAULT_SPECS = ["prenorm", "denseformer", "mudd", "hyper", "attnres", "mgr"]


class OneLineParser(argparse.ArgumentParser):
    """argparse's parser for benchmarks and examples: it raises its errors, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_parser(description: str) -> Any:
    """A parser of jsonargparse that raises its errors. Options cannot be abbreviated."""
    from jsonargparse import ArgumentParser

    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def add_specs(parser: Any, option: str, what: str = "connections") -> None:
    """An option that takes one or several connections. what: the help's words for them."""
    parser.add_argument(
        option,
        nargs="+",
        default=DEFAULT_SPECS,
        type=str,
        help=f'{what}, separated by spaces or commas, like prenorm "mudd(dilation=2)"; known: '
        + ", ".join(available()),
    )


def parse_specs(option: str, words: Sequence[str]) -> list[str]:
    """The connections among the words of an option of `add_specs`.

    Raises:
        ValueError: there is none.
    """
    from ..spec import split_specs

    specs = split_specs(" ".join(words))
    if not specs:
        raise ValueError(f"{option} names no connection; known: {', '.join(available())}")
    return specs


def add_recipe(parser: Any) -> None:
    """The argument RECIPE and the option --scale."""
    parser.add_argument(
        "recipe",
        nargs="?",
        type=str,
        default=None,
        help="a .yaml file of arms and options. The options replace the defaults below",
    )
    parser.add_argument(
        "--scale",
        type=str,
        default="full",
        help="full, or tiny: a model of the recipe's structure, small enough for a CPU",
    )


def add_settings(parser: Any) -> None:
    """The options of `Settings` in their groups, but those of `YAML_ONLY`.

    `save_every` is --save-every.
    """
    import docstring_parser

    from ..train.settings import GROUPS, YAML_ONLY, default_of

    for settings_group in GROUPS:
        doc = docstring_parser.parse(settings_group.__doc__)
        help_texts = {param.arg_name: param.description for param in doc.params}
        types = get_type_hints(settings_group)
        title = (doc.short_description or "").partition(".")[0]
        group = parser.add_argument_group(title)
        for option in fields(settings_group):
            if option.name in YAML_ONLY:
                continue
            group.add_argument(
                "--" + option.name.replace("_", "-"),
                type=types[option.name],
                default=default_of(option),
                help=help_texts[option.name],
            )


def recipe_from_options(options: Any, arms: Sequence[str]) -> "Recipe":
    """The recipe of the command line: that of a file, or one of these arms.

    Args:
        options: the given ones alone, without defaults. Options of `Settings` override the file's.
        arms: if neither a file nor --arms is given.
    """
    from ..train.recipe import Arm, Recipe, load_recipe
    from ..train.settings import GROUP_OF_OPTION

    overrides = {name: options[name] for name in GROUP_OF_OPTION if name in options}
    if options.get("recipe") is None:
        if "scale" in options:
            raise ValueError(
                "--scale needs a recipe; without one, use options like --layers and --dim"
            )
        specs = parse_specs("--arms", options.get("arms", arms))
        return Recipe(_unique_arms(map(Arm.from_row, specs)), overrides=overrides)

    recipe = load_recipe(options.recipe, options.get("scale", "full"), **overrides)
    if "arms" in options:
        arms_by_name = {arm.name: arm for arm in recipe.arms}
        chosen = []
        for word in options.arms:
            if word in arms_by_name:  # a name may have spaces and commas
                chosen.append(arms_by_name[word])
            else:
                for spec in parse_specs("--arms", [word]):
                    chosen.append(arms_by_name.get(spec) or _arm_beside(arms_by_name, spec))
        recipe.arms = _unique_arms(chosen)
    return recipe


def _arm_beside(arms: Collection[str], spec: str) -> "Arm":
    """An arm that a recipe does not have; an error names those that it has."""
    from ..train.recipe import Arm

    try:
        return Arm.from_row(spec)
    except ValueError as error:
        raise ValueError(f"{error}; arms of the recipe: {', '.join(arms)}") from None


def _unique_arms(arms: Iterable["Arm"]) -> list["Arm"]:
    return list({arm.name: arm for arm in arms}.values())


def is_first_rank() -> bool:
    """Whether this process prints: the only one, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Hold `folder` for this command: rank 0 does, for all ranks.

    Raises:
        ValueError: another process holds it.
    """
    return lock_folder(folder) if is_first_rank() else nullcontext()


def make_console(**options: Any) -> Any:
    """A terminal of rich that shows names and paths literally: brackets are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


def make_progress(console: Any, *columns: Any, **options: Any) -> Any:
    """Progress bars of rich that begin with the names of their tasks, shown literally.

    Args:
        console: of `make_console`.
        columns: after the name.
        options: further ones of `rich.progress.Progress`.
    """
    from rich.progress import Progress, TextColumn

    # Without `markup=False` a column takes [words] in brackets for styles, and drops them.
    name = TextColumn("{task.description}", markup=False)
    return Progress(name, *columns, console=console, refresh_per_second=4, **options)


class ProgressBars:
    """Progress bars of runs, on rank 0 alone.

    A run's bar appears with its first step: errors in options or data come before it.

    Args:
        console: of `make_console`.
        unit: what speed is counted in, like "tokens".
    """

    def __init__(self, console: Any, unit: str):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = make_progress(
            console,
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} " + f"{unit}/s"),
            TextColumn("{task.fields[usage]}"),
            TimeRemainingColumn(),
            disable=not is_first_rank(),
        )
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> "ProgressBars":
        return self

    def __exit__(self, *_: Any) -> None:
        # rich 14 and earlier end bars that are disabled with an empty line too
        if self._bars and not self._progress.disable:
            self._progress.stop()

    def show_step(self, name: str, steps: int, result: "StepResult") -> None:
        """Advance the bar of the run called `name` to a step's result, of `steps` in all."""
        if not self._bars:
            self._progress.start()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(
                name, total=steps, loss=float("nan"), speed=0, usage=""
            )
        usage = f"{result.memory / 2**30:.1f} GiB"
        if result.mfu is not None:
            usage = f"MFU {result.mfu:.0%}, {usage}"
        self._progress.update(
            self._bars[name],
            completed=result.step,
            loss=result.loss,
            speed=result.tokens_per_second,
            usage=usage,
        )


class InspectionBar:
    """A progress bar of analyses: one line, for the step that runs.

    Args:
        console: of `make_console`.
    """

    def __init__(self, console: Any):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = make_progress(
            console,
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> "InspectionBar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def show_step(self, name: str, step: str, done: int, total: int) -> None:
        """Show that a step of the model called `name` has done so many of its batches."""
        description = f"{name}: {step}"
        if self._task is None:
            self._task = self._progress.add_task(description, total=total)
        elif done == 0:
            self._progress.reset(self._task, total=total)
        self._progress.update(self._task, description=description, completed=done, total=total)


def make_table(title: str, columns: Sequence[str]) -> Any:
    """A table of rich whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def print_table(table: Any, console: Any) -> None:
    """Print a table. A narrow terminal may wrap its lines, but no number is cut off."""
    needed_width = make_console(width=999).measure(table).maximum
    make_console(width=max(console.width, needed_width)).print(table)


def silence_libraries() -> None:
    """Silence start-up messages of transformers and Lightning, and the Hub's retries."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # one error instead of every retry
    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    # a pending write is a Linear's output, which is a view; nothing writes into it
    warnings.filterwarnings("ignore", ".*returned a view tensor")


def add_model_options(command: Any) -> None:
    """Add how a model is opened: --tokenizer, --device and --dtype."""
    command.add_argument(
        "--tokenizer",
        type=str,
        default=None,
        help="folder, tokenizer.json, Hub name or bytes; default: the model's own",
    )
    command.add_argument(
        "--device", type=str, default=None, help="cuda or cpu; default: a GPU if available"
    )
    command.add_argument(
        "--dtype", type=str, default="auto", help="dtype of the weights; default: as saved"
    )


def parse_model_dtype(name: str) -> torch.dtype | str:
    """The dtype called `name`, or "auto" for that of the saved weights."""
    return name if name == "auto" else parse_dtype(name)


def choose_device(name: str | None) -> torch.device:
    """The device called `name`, or a GPU where there is one and no name is given.

    Raises:
        ValueError: torch cannot use the device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without the device asserts
        raise ValueError(
            f"cannot use the device {name!r} ({str(error).splitlines()[0]})"
        ) from error
    return device
