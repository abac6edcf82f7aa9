"""`crosslayer data`: tokenise a corpus once into a folder that training maps into memory; look at it; check it."""

import logging
import os
from typing import Any

from . import console as shared
from .console import make_parser

HEAD = ("set", "documents", "tokens", "bytes", "bytes per token", "dtype", "shards", "checksum")


def parser() -> Any:
    return make_parser(
        "Tokenise training data once into a folder that `--data FOLDER` then maps into memory."
    )


def actions(parser: Any) -> list[Any]:
    commands = parser.add_subcommands(required=True, dest="action")
    prepare = make_parser(
        "Tokenise a source into a folder, in bounded memory. One that was interrupted starts over."
    )
    prepare.add_argument(
        "source", type=str, help="stdlib; a text, .jsonl (each also .gz) or .parquet file or a folder of them; or "
        "datasets:NAME[,CONFIG][@SPLIT] of the Hub or a local folder",
    )  # fmt: skip
    prepare.add_argument(
        "--tokenizer", type=str, default="bytes", help="bytes, bpe:SIZE (trained on the data), or a path to a "
        "tokenizer.json",
    )  # fmt: skip
    prepare.add_argument("--out", type=str, required=True, help="the folder, new or empty")
    prepare.add_argument(
        "--valid", nargs="+", type=str, default=[], metavar="NAME=SOURCE",
        help="validation sets; without any, a part of the source is held out",
    )  # fmt: skip
    prepare.add_argument(
        "--workers",
        type=int | None,
        default=None,
        help="threads of the tokenizer; all cores' by default",
    )
    show, verify = (
        make_parser(what)
        for what in (
            "What a prepared folder holds.",
            "Read all of a prepared folder and compare checksums.",
        )
    )
    for action in (show, verify):
        action.add_argument("folder", type=str, help="a prepared folder")
    for name, action in (("prepare", prepare), ("show", show), ("verify", verify)):
        commands.add_subcommand(name, action)
    return [prepare, show, verify]


def run(options: Any) -> int:
    return {"prepare": prepare, "show": table_of, "verify": verify}[options.action](
        options[options.action]
    )


def prepare(options: Any) -> int:
    if options.workers is not None:
        if options.workers < 1:
            raise ValueError(f"workers must be at least 1, got {options.workers}")
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    valid = {}
    for given in options.valid:
        name, equals, source = given.partition("=")
        if not (name and equals and source):
            raise ValueError(f"--valid {given}: expected NAME=SOURCE")
        if name in valid:
            raise ValueError(f"--valid {given}: there are two validation sets {name}")
        valid[name] = source
    for name in ("datasets", "huggingface_hub"):  # their retries would tear the progress bar
        logging.getLogger(name).setLevel(logging.ERROR)
    from ..data.prepared import prepare_corpus

    console = shared.make_console()
    try:
        with progress(console) as watch:
            prepare_corpus(options.source, options.tokenizer, options.out, valid, watch)
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left of it.")
        return 130
    shown(options.out, console)
    return 0


def progress(console: Any) -> Any:
    """A line for each set that is being read: documents and bytes so far."""
    from contextlib import contextmanager

    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB"), TimeElapsedColumn(),
    )  # fmt: skip

    @contextmanager
    def bars() -> Any:
        with Progress(*columns, console=console, refresh_per_second=4) as lines:
            tasks: dict[str, Any] = {}

            def watch(name: str, documents: int, text_bytes: int) -> None:
                if name not in tasks:
                    tasks[name] = lines.add_task(name, total=None, documents=0, megabytes=0.0)
                lines.update(tasks[name], documents=documents, megabytes=text_bytes / 1e6)

            yield watch

    return bars()


def table_of(options: Any) -> int:
    shown(options.folder, shared.make_console())
    return 0


def shown(folder: str, console: Any) -> None:
    from ..data.prepared import open_prepared

    prepared = open_prepared(folder)
    kind = prepared.tokenizer
    table = shared.make_table(f"{folder}: {prepared.source}", HEAD)
    for name, tokens in prepared.sets.items():
        documents = sum(len(shard.documents) for shard in tokens.shards)
        dtype = tokens.shards[0].header["dtype"]
        sizes = (
            f"{documents:,}",
            f"{len(tokens):,}",
            f"{tokens.text_bytes:,}",
            f"{tokens.text_bytes / len(tokens):.3f}",
        )
        table.add_row(name, *sizes, dtype, str(len(tokens.shards)), tokens.digest)
    shared.print_table(table, console)
    console.print(
        f"Tokenizer: {kind.name}, vocabulary {kind.vocab:,}, {kind.digest}.", soft_wrap=True
    )


def verify(options: Any) -> int:
    from ..data.prepared import verify_corpus

    count = verify_corpus(options.folder)
    print(f"{options.folder}: {count} shards are as they were written")
    return 0
