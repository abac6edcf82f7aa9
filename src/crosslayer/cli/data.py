"""`crosslayer data`: tokenise a corpus once into a folder that training maps into memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .console import (
    can_redraw,
    make_console,
    make_progress,
    make_table,
    print_table,
    silence_libraries,
)
from .options import make_parser

if TYPE_CHECKING:
    from ..data.token_streams import ProgressCallback, StreamCounts

_SHOWN_IDS = 20  # of each set, as text, so that a wrong tokenizer is noticed
_LINE_SECONDS = 60  # between two lines of progress in a log file
_COLUMNS = ("set", "documents", "tokens", "bytes", "bytes per token")


def parser() -> Any:
    return make_parser("Tokenise training data once into a folder for `--data FOLDER`.")


def actions(parser: Any) -> list[Any]:
    commands = parser.add_subcommands(required=True, dest="action")
    prepare = make_parser("Tokenise a source into a new folder.")
    prepare.add_argument(
        "source", type=str, help="stdlib; a text, .jsonl (each also .gz or .zst) or .parquet file "
        "or a folder of them; .bin or .npy files of token ids, also by a pattern like train_*.bin; "
        "datasets:OWNER/NAME[,CONFIG][@SPLIT] of the Hub or a local folder; or "
        "hf://datasets/OWNER/NAME/PATTERN",
    )  # fmt: skip
    prepare.add_argument(
        "--tokenizer", type=str, default="bytes", help="bytes, bpe:SIZE (trained on the data), a "
        "path to a tokenizer.json, or a name on the Hub like openai-community/gpt2",
    )  # fmt: skip
    prepare.add_argument("--out", type=str, required=True, help="the folder, new or empty")
    prepare.add_argument(
        "--valid", type=dict[str, str], default={},
        help="validation sets by name, like --valid.wiki=wiki.jsonl; without any, a part of the "
        "source is held out",
    )  # fmt: skip
    show = make_parser("Show what a prepared folder holds.")
    show.add_argument("folder", type=str, help="a prepared folder")
    commands.add_subcommand("prepare", prepare, help=prepare.description.rstrip("."))
    commands.add_subcommand("show", show, help=show.description.rstrip("."))
    return [prepare, show]


def run(options: Any) -> int:
    if options.action == "prepare":
        _prepare(options.prepare)
        _show(options.prepare.out)
    else:
        _show(options.show.folder)
    return 0


def _prepare(options: Any) -> None:
    silence_libraries()  # their bars and messages would tear the progress bar
    from ..data.prepared import prepare_corpus
    from ..files import expand_place

    source = expand_place(options.source)
    tokenizer = expand_place(options.tokenizer)
    valid = {name: expand_place(place) for name, place in options.valid.items()}
    with _progress_lines() as show_progress:
        prepare_corpus(source, tokenizer, options.out, valid, show_progress)


@contextmanager
def _progress_lines() -> Iterator["ProgressCallback"]:
    """A line for each set: documents and bytes so far. In a log file a new one every minute."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB"),
        TimeElapsedColumn(),
    )
    console = make_console()
    last_line = time.monotonic()
    with make_progress(console, *columns) as progress:
        # the first line is there while the source is opened and a BPE is trained
        tasks = {"train": progress.add_task("train", total=None, documents=0, megabytes=0.0)}

        def show_progress(name: str, counts: "StreamCounts") -> None:
            nonlocal last_line
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=None, documents=0, megabytes=0.0)
            megabytes = counts.text_bytes / 1e6
            progress.update(tasks[name], documents=counts.documents, megabytes=megabytes)
            if not can_redraw(console) and time.monotonic() - last_line > _LINE_SECONDS:
                last_line = time.monotonic()
                line = f"{name}: {counts.documents:,} documents, {megabytes:,.1f} MB so far"
                console.print(line)

        yield show_progress


def _show(folder: str) -> None:
    from ..data.prepared import open_prepared

    prepared = open_prepared(folder)
    table = make_table(f"{folder}: {prepared.source}", _COLUMNS)
    for name, counts in prepared.counts.items():
        ratio = f"{counts.text_bytes / counts.tokens:.3f}"
        table.add_row(name, *(f"{count:,}" for count in counts), ratio)
    console = make_console()
    print_table(table, console)
    tokenizer = prepared.tokenizer
    lines = [f"Tokenizer: {tokenizer.name}, vocabulary {tokenizer.vocab:,}, {tokenizer.digest}."]
    for name, stream in prepared.streams.items():
        first = stream.window(0, min(_SHOWN_IDS, len(stream))).numpy()
        lines.append(f"{name} begins with {tokenizer.decode(first)!r}")
    for line in lines:
        console.print(line)
