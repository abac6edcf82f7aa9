"""`crosslayer eval`: lm-evaluation-harness's tasks, a text's perplexity and target spans, of any saved model."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from .console import make_console, make_parser, make_table, print_table, silence_libraries

HEAD = ["task", "shots", "metric", "value", "stderr", "n"]


def parser() -> Any:
    from ..evaluate.tasks import NINE, TASKS

    command = make_parser(
        "Evaluate a saved model, connected or not, with lm-evaluation-harness on local files."
    )
    add = command.add_argument
    add("model", type=str, help="the folder of a saved model")
    add("--tasks", nargs="+", type=str, default=[], help=f"of {', '.join(TASKS)}; without --text and --spans the "
        f"default is the first {len(NINE)}")  # fmt: skip
    add("--fewshot", nargs="+", type=int, default=[0], help="examples before each document, like 0 5; from the same "
        "file, never the document itself")  # fmt: skip
    add(
        "--limit",
        type=int | None,
        default=None,
        help="the first documents of each task and spans file only",
    )
    add("--batch", type=int, default=8, help="sequences at once")
    add(
        "--device",
        type=str | None,
        default=None,
        help="like cuda or cpu; the default is a GPU where there is one",
    )
    add(
        "--dtype",
        type=str,
        default="auto",
        help="float32, bfloat16 or float16; the default is as it was saved",
    )
    add(
        "--text",
        nargs="+",
        type=str,
        default=[],
        help="text, .jsonl or .gz files or folders: their perplexity",
    )
    add("--spans", nargs="+", type=str, default=[], help=".jsonl files with a context and a target a line: the "
        "perplexity of the targets")  # fmt: skip
    add(
        "--context",
        type=int | None,
        default=None,
        help="tokens the model sees at once; the default is all it can",
    )
    add("--stride", type=int | None, default=None, help="by how much the windows over a text move; the default is "
        "the context")  # fmt: skip
    add(
        "--data",
        type=str | None,
        default=None,
        help="folder of the tasks' files; the default is $CROSSLAYER_DATA/eval",
    )
    add(
        "--tokenizer",
        type=str | None,
        default=None,
        help="its folder or tokenizer.json, where the model has none",
    )
    add("--seed", type=int, default=1234, help="which few-shot examples are drawn")
    add(
        "--out",
        type=str | None,
        default=None,
        help="folder of results.json, with which the same command goes on",
    )
    return command


def run(options: Any) -> int:
    silence_libraries()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all it reads is local
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from ..evaluate import evaluate
    from ..evaluate.records import digest
    from ..evaluate.run import RESULTS

    console = make_console()

    def watch(job: Any, index: int, count: int) -> None:
        console.print(f"[{index + 1}/{count}] {job}", highlight=False)

    settings = {name: options[name] for name in ("limit", "dtype", "tokenizer", "context", "seed")}
    if (
        options.out is None
    ):  # one of its own for every setting, so that the same command goes on with the same folder
        options.out = f"eval-{digest(json.dumps([str(Path(options.model).resolve()), settings]).encode())[:8]}"
    others = {
        name: options[name]
        for name in ("fewshot", "device", "data", "text", "spans", "stride", "out")
    }
    try:
        rows = evaluate(
            options.model,
            options.tasks or None,
            batch_size=options.batch,
            watch=watch,
            **settings,
            **others,
        )["results"]
    except KeyboardInterrupt:
        console.print("Stopped. What had finished is kept: the same command goes on.")
        return 130
    table = make_table("crosslayer eval", HEAD)
    for row in rows:
        for cells in lines(row):
            table.add_row(*cells)
    print_table(table, console)
    cut = [f"{row['task']} {row['truncated']}" for row in rows if row.get("truncated")]
    if cut:
        console.print(
            f"Sequences cut from the left to the model's window: {', '.join(cut)}.", soft_wrap=True
        )
    console.print(f"Results: {Path(options.out) / RESULTS}", soft_wrap=True)
    return 0


def lines(row: dict[str, Any]) -> list[list[str]]:
    """A row of the table for each metric."""
    found = []
    for name, metric in row["metrics"].items():
        error = metric.get("stderr")
        shown = "–" if error is None else f"{error:.4f}"
        found.append(
            [
                row["task"],
                str(row.get("shots", "–")),
                name,
                f"{metric['value']:.4f}",
                shown,
                f"{row['n']:,}",
            ]
        )
    return found
