"""What the commands print, and which process prints: progress bars, tables, silenced libraries."""

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import lock_folder

if TYPE_CHECKING:
    from ..train.run_state import StepResult


def is_rank_zero() -> bool:
    """Whether this process prints: the only one, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Hold `folder` for this command: rank 0 does, for all ranks.

    Raises:
        ValueError: another process holds it.
    """
    return lock_folder(folder) if is_rank_zero() else nullcontext()


def make_console(**options: Any) -> Any:
    """A terminal of rich that shows names and paths literally: brackets are no markup, and no line
    is broken, but in a notebook, which would cut off its end.
    """
    from rich.console import Console

    console = Console(markup=False, emoji=False, **options)
    console.soft_wrap = not console.is_jupyter
    return console


def can_redraw(console: Any) -> bool:
    """Whether a line that was printed can be drawn again.

    Not so in a log file, nor in a cell that runs a command: a notebook has it print colours, for
    which rich takes the pipe for a terminal.
    """
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return bool(console.is_terminal and console.file.isatty())


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


def _stop_progress(progress: Any) -> None:
    # rich 14 and earlier end bars that are disabled with an empty line too
    if not progress.disable:
        progress.stop()


class ProgressBars:
    """The progress of runs, on rank 0 alone: bars, or in a log file a line for each evaluation and
    for the first step.

    A run's bar appears with its first step: errors in options or data come before it.

    Args:
        console: of `make_console`.
        unit: what speed is counted in, like "tokens".
    """

    def __init__(self, console: Any, unit: str):
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        self._progress = make_progress(
            console,
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} " + f"{unit}/s"),
            TextColumn("{task.fields[usage]}"),
            TimeRemainingColumn(),
            disable=not (is_rank_zero() and can_redraw(console)),
        )
        self._console = console
        self._unit = unit
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> "ProgressBars":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bars:
            _stop_progress(self._progress)

    @property
    def have_shown(self) -> bool:
        """Whether any run had a step left to do."""
        return bool(self._bars)

    def show_step(self, name: str, steps: int, result: "StepResult") -> None:
        """Advance the bar of the run called `name` to a step's result, of `steps` in all."""
        if not self._bars:
            self._progress.start()
        is_first = name not in self._bars
        if is_first:
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
        if (is_first or result.evaluation) and self._progress.disable and is_rank_zero():
            self._console.print(_step_line(name, steps, result, self._unit))


def _step_line(name: str, steps: int, result: "StepResult", unit: str) -> str:
    """Like "mudd 54/160: loss 2.510, held-out loss 2.351, 2,900 tokens/s"."""
    losses = [f"loss {result.loss:.3f}"]
    for dataset, metrics in (result.evaluation or {}).items():
        losses.append(f"{dataset} loss {metrics['loss']:.3f}")
    speed = f"{result.tokens_per_second:,.0f} {unit}/s"
    return f"{name} {result.step}/{steps}: {', '.join(losses)}, {speed}"


class InspectionBar:
    """The progress of analyses: a bar for the step that runs, or in a log file a line for each.

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
            disable=not can_redraw(console),
        )
        self._console = console
        self._task: Any = None

    def __enter__(self) -> "InspectionBar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        _stop_progress(self._progress)

    def show_step(self, name: str, step: str, done: int, total: int) -> None:
        """Show that a step of the model called `name` has done so many of its batches."""
        description = f"{name}: {step}"
        if self._task is None:
            self._task = self._progress.add_task(description, total=total)
        elif done == 0:
            self._progress.reset(self._task, total=total)
        self._progress.update(self._task, description=description, completed=done, total=total)
        if done == 0 and self._progress.disable:
            self._console.print(description)


def make_table(title: str, columns: Sequence[str]) -> Any:
    """A table of rich whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def print_table(table: Any, console: Any) -> None:
    """Print a table. A narrow terminal may wrap its lines, but no number is cut off."""
    needed_width = make_console(width=99_999).measure(table).maximum
    make_console(width=max(console.width, needed_width)).print(table, soft_wrap=False)


def silence_libraries() -> None:
    """Silence start-up messages of transformers and Lightning, and the Hub's retries."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # one error instead of every retry
    for name in ("huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it raises the same
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    # a pending write is a Linear's output, which is a view; nothing writes into it
    warnings.filterwarnings("ignore", ".*returned a view tensor")
