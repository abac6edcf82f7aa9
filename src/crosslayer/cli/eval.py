"""`crosslayer eval`: tasks of lm-evaluation-harness, perplexity of texts and of target spans."""

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import __version__
from ..files import UNFINISHED_SUFFIX, check_new_file, lock_folder, write_json
from ..run_folders import EVALUATION_FILE
from ..validation import check_non_negative, check_positive, dtype_name
from .console import make_console, make_table, print_table, silence_libraries
from .options import add_model, add_model_options, choose_device, make_parser, parse_model_dtype

if TYPE_CHECKING:
    from ..evaluate import EncodedText


def parser() -> Any:
    command = make_parser(
        "Evaluate a language model, connected or not: tasks of lm-evaluation-harness, perplexity "
        "of texts and of target spans."
    )
    add_model(command)
    add = command.add_argument
    add(
        "--tasks",
        nargs="+",
        type=str,
        default=[],
        help="lm-evaluation-harness's names, like lambada_openai piqa; see `lm_eval ls tasks`",
    )
    add(
        "--num-fewshot",
        type=int | None,
        default=None,
        help="examples before each document; default: as the task says",
    )
    add(
        "--include-path",
        type=str,
        default=None,
        help="folder of YAML task files of your own, which may call Python code",
    )
    add(
        "--limit",
        type=int | None,
        default=None,
        help="evaluate only this many documents of each task",
    )
    add(
        "--text",
        nargs="+",
        type=str,
        default=[],
        help="text or .jsonl files or folders, files of token ids, or folders of crosslayer data "
        "prepare: perplexity and bits per byte",
    )
    add(
        "--documents",
        type=Literal["joined", "apart"],
        default="joined",
        help="how --text is split: joined to one stream and cut into windows, as crosslayer train "
        "measures its validation loss; or apart, each on its own, after BOS or the token that ends "
        "a text, with every token scored",
    )
    add(
        "--windows",
        type=int | None,
        default=None,
        help="score only this many windows of joined documents, at equal distances; train scores "
        "eval-batches x batch of them",
    )
    add(
        "--spans",
        nargs="+",
        type=str,
        default=[],
        help=".jsonl files with a context and a target in each line: perplexity of the targets",
    )
    add(
        "--context",
        type=int | None,
        default=None,
        help="tokens that the model sees at once; default: the model's maximum",
    )
    add("--batch", type=int, default=8, help="sequences in a batch")
    add_model_options(command)
    add(
        "--out",
        type=str,
        default=None,
        help=f"folder for {EVALUATION_FILE}; default: only print the results",
    )
    return command


def _check_options(options: Any, results_file: Path | None) -> None:
    """Raise a ValueError for options that cannot be used, or used together."""
    if not options.tasks and not options.text and not options.spans:
        raise ValueError("nothing to evaluate; name --tasks, --text or --spans")
    if options.documents == "apart" and not options.text:
        raise ValueError("--documents is for --text; leave it out")
    if options.windows is not None:
        if not options.text:
            raise ValueError("--windows is for --text; leave it out")
        if options.documents == "apart":
            raise ValueError(
                "--windows is for joined documents; --documents apart scores every token"
            )
    for name in ("num_fewshot", "limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            raise ValueError(f"--{name.replace('_', '-')} is for --tasks; leave it out")
    _check_numbers(options)
    if results_file is not None:
        check_new_file(results_file)


def _check_numbers(options: Any) -> None:
    """Raise a ValueError for a number that is out of range."""
    check_positive(batch=options.batch)
    if options.windows is not None:
        check_positive(windows=options.windows)
    if options.limit is not None:
        check_positive(limit=options.limit)
    if options.num_fewshot is not None:
        check_non_negative(num_fewshot=options.num_fewshot)
    if options.context is not None and options.context < 2:
        raise ValueError(f"context must be at least 2, got {options.context}")


def run(options: Any) -> int:
    os.environ.setdefault("TQDM_DISABLE", "")  # the harness's progress bars are the only progress
    silence_libraries()
    # The bootstrap of standard errors would fork this process with the model in it.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    from ..convert.pretrained import check_tokenizer, open_model, open_tokenizer
    from ..evaluate import find_tasks, read_spans
    from ..evaluate.language_models import check_context

    # What can be wrong without the tokenizer is found before the model is loaded.
    results_file = None if options.out is None else Path(options.out) / EVALUATION_FILE
    _check_options(options, results_file)
    device = choose_device(options.device)
    dtype = parse_model_dtype(options.dtype)
    texts: dict[str, list[str | EncodedText]] = {}
    for place in options.text:
        texts |= _read_texts(place, options)
    spans = {name: read_spans(name) for name in options.spans}
    task_manager = find_tasks(options.tasks, options.include_path) if options.tasks else None

    tokenizer = open_tokenizer(options.tokenizer or options.model)
    model = open_model(options.model, dtype).to(device)
    check_tokenizer(tokenizer, model)
    context = check_context(model, options.context)
    results: dict[str, Any] = {
        "model": options.model,
        "tokenizer": options.tokenizer or options.model,
        "connection": getattr(model.config, "crosslayer", None),
        "dtype": dtype_name(model.dtype),
        "context": context,
        "versions": {"crosslayer": __version__, "torch": version("torch")},
        "documents": options.documents,
        "windows": options.windows,
    }
    with nullcontext() if results_file is None else lock_folder(results_file.parent):
        if results_file is not None:
            check_new_file(results_file)  # another process may have finished meanwhile
        # Tasks first: their data may be out of reach.
        if options.tasks:
            results["tasks"] = _run_tasks(options, model, tokenizer, task_manager, context)
            _write_unfinished(results, results_file)
        results |= {"text": {}, "spans": {}}
        table = make_table("perplexity", ["file", "metric", "value"])
        scores = _score_files(options, model, tokenizer, texts, spans, context)
        try:
            for option, name, result in scores:
                results[option][name] = _finite_values(result)
                _add_rows(table, name, result)
                _write_unfinished(results, results_file)
        finally:  # one of several files may turn out to be too short
            if table.row_count:
                print_table(table, make_console())
        if results_file is not None:
            _write_results(results, results_file)
    if results_file is not None:
        make_console().print(f"Results: {results_file}")
    return 0


def _write_results(results: dict[str, Any], file: Path) -> None:
    # The harness's results contain functions and dtypes.
    write_json(file, results, default=str)


def _write_unfinished(results: dict[str, Any], results_file: Path | None) -> None:
    """Keep what has been measured beside the file of results, because the rest may fail."""
    if results_file is not None:
        file = results_file.with_name(results_file.name + UNFINISHED_SUFFIX)
        _write_results(results, file)


def _read_texts(place: str, options: Any) -> "dict[str, list[str | EncodedText]]":
    """The documents of a source. A folder with several sets has a name for each."""
    from ..convert.pretrained import open_id_tokenizer
    from ..data.sources import read_documents
    from ..data.token_sources import has_token_ids, read_id_sets
    from ..evaluate import describe_documents, describe_stream
    from ..evaluate.windows import nothing_to_score

    if not has_token_ids(place):
        return {place: [document.text for document in read_documents(place)]}
    tokenizer = open_id_tokenizer(options.tokenizer or options.model)
    texts: dict[str, list[str | EncodedText]] = {}
    for name, stream in read_id_sets(place, tokenizer).items():
        if len(stream) < 2:
            raise ValueError(f"{name}: {nothing_to_score(len(stream))}")
        if options.documents == "joined":
            texts[name] = [describe_stream(stream, tokenizer)]
        else:
            texts[name] = [*describe_documents(stream, tokenizer)]
    return texts


def _run_tasks(
    options: Any, model: Any, tokenizer: Any, task_manager: Any, context: int
) -> dict[str, Any]:
    """The harness's results of --tasks, which are printed."""
    from lm_eval.utils import make_table as format_tasks

    from ..evaluate import evaluate_tasks

    results = evaluate_tasks(
        model,
        tokenizer,
        options.tasks,
        task_manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch,
        context=context,
    )
    print(format_tasks(results))
    if results.get("groups"):
        print(format_tasks(results, "groups"))
    return results


def _score_files(
    options: Any,
    model: Any,
    tokenizer: Any,
    texts: "dict[str, list[str | EncodedText]]",
    spans: dict[str, Any],
    context: int,
) -> Iterator[tuple[str, str, Any]]:
    """The perplexities of the files of --text and of --spans, each with its option and its name."""
    from ..evaluate import joined_perplexity, span_perplexity, text_perplexity

    measures: dict[str, Any] = {
        "joined": partial(joined_perplexity, windows=options.windows),
        "apart": text_perplexity,
    }
    scored: list[tuple[str, Any, dict[str, Any]]] = [
        ("text", measures[options.documents], texts),
        ("spans", span_perplexity, spans),
    ]
    for option, measure, files in scored:
        for name, content in files.items():
            try:
                result = measure(model, tokenizer, content, context, batch_size=options.batch)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            yield option, name, result


def _finite_values(result: Any) -> dict[str, Any]:
    """The fields of a result for JSON, which has no infinity: null in its place."""
    fields = result._asdict()
    return {name: None if value == math.inf else value for name, value in fields.items()}


def _add_rows(table: Any, name: str, result: Any) -> None:
    for metric, value in result._asdict().items():
        if value is None:  # one span has no standard error
            shown = "not known"
        else:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        table.add_row(name, metric, shown)
