"""What the commands share: how they are parsed, their tables, and silence from the frameworks beneath."""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

from ..registry import available

ARMS = ["prenorm", "denseformer", "mudd", "hyper", "attnres", "mgr"]


def parser(description: str) -> Any:
    from jsonargparse import ArgumentParser

    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)


def add_arms(parser: Any) -> None:
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, type=str,
        help='connections, separated by spaces or commas, like prenorm "mudd(dilation=2)"; known: '
        + ", ".join(available()),
    )  # fmt: skip


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


def quiet() -> None:
    """Nobody comparing connections needs the frameworks' greetings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
