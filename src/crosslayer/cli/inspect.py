"""`crosslayer inspect`: what the connections of trained models do, as a report with figures."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import lock_folder
from ..validation import check_positive, did_you_mean, parse_dtype
from .console import InspectionBar, make_console, make_parser, silence_libraries

if TYPE_CHECKING:
    from ..inspect.sections import Section


def parser() -> Any:
    command = make_parser(
        "Show what the connections of trained language models do: a report with figures, side by "
        "side for several models. A model without a connection is seen as pre-norm."
    )
    add = command.add_argument
    add(
        "models",
        type=str,
        nargs="+",
        help="folders (connected model, transformers model or published checkpoint) or Hub names",
    )
    add(
        "--data",
        type=str,
        default="stdlib",
        help="text or .jsonl file or folder; default: the standard library's sources",
    )
    add("--out", type=str, default="inspection", help="folder for report.html and its files")
    add("--sequences", type=int, default=64, help="number of sequences that the models see")
    add("--context", type=int, default=256, help="tokens in a sequence")
    add("--batch-size", type=int, default=8, help="sequences in a batch")
    add(
        "--sections",
        type=str,
        nargs="+",
        default=["standard"],
        help="of the report, like unfolded,cosines, or all; only the analyses that they need are "
        "run. docs/inspect.md lists them, and so does the message on an unknown one; default: "
        "those that take few passes over the sequences",
    )
    add(
        "--layer",
        type=int | None,
        default=None,
        help="whose attention patterns are drawn and whose mixes lose their sources; default: the "
        "patterns at three quarters of the depth, the sources of all layers",
    )
    add(
        "--tokenizer",
        type=str | None,
        default=None,
        help="folder, tokenizer.json or Hub name; default: each model's own",
    )
    add("--device", type=str | None, default=None, help="cuda or cpu; default: a GPU if available")
    add("--dtype", type=str, default="auto", help="of the weights; default: as saved")
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..convert.pretrained import check_tokenizer, choose_device, open_model, open_tokenizer
    from ..data.sources import check_exists, read_documents
    from ..inspect.inspection import InspectionSubject, inspect_model
    from ..inspect.report import REPORT_FILE, write_report
    from ..inspect.text_batches import find_sink_ids, make_text_batches

    sizes = {"sequences": options.sequences, "context": options.context}
    check_positive(**sizes, batch_size=options.batch_size)
    folder = Path(options.out)
    if (folder / REPORT_FILE).exists():
        raise ValueError(f"{folder / REPORT_FILE} exists already; choose another folder with --out")
    sections = _choose_sections(options.sections)
    analyses = {analysis for section in sections for analysis in section.analyses}
    check_exists(options.data)
    device = choose_device(options.device)
    dtype = "auto" if options.dtype == "auto" else parse_dtype(options.dtype)
    console = make_console()
    inspections = []
    seen = []
    start = time.perf_counter()
    with lock_folder(folder):
        with InspectionBar(console) as bar:
            for source, name in zip(options.models, _short_names(options.models), strict=True):
                bar.show_step(name, "opening", 0, 1)
                tokenizer = open_tokenizer(options.tokenizer or source)
                model = open_model(source, dtype).to(device)
                check_tokenizer(tokenizer, model)
                texts = (document.text for document in read_documents(options.data))
                batches = make_text_batches(
                    tokenizer, texts, **sizes, batch_size=options.batch_size
                )
                seen.append(f"{name}: {_count_tokens(batches)}")
                subject = InspectionSubject(model, batches, find_sink_ids(tokenizer), options.layer)
                show_step = partial(bar.show_step, name)
                inspections.append(inspect_model(name, subject, analyses, show_step))
        setup = f"{options.data} in sequences of up to {options.context} tokens. {'; '.join(seen)}."
        with console.status("drawing"):
            report = write_report(inspections, folder, setup, sections)
    for inspection in inspections:
        for alarm in inspection.results.get("alarms", []):
            console.print(f"{inspection.name}: {alarm}")
    console.print(f"Report: {report} ({time.perf_counter() - start:.0f} s)")
    return 0


def _short_names(sources: list[str]) -> list[str]:
    """The last part of each path, or the paths themselves where two end alike."""
    names = [Path(source).name for source in sources]
    return names if len(set(names)) == len(names) else sources


def _count_tokens(batches: list[Any]) -> str:
    sequences = sum(len(batch["input_ids"]) for batch in batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return f"{sequences} sequences, {tokens:,} tokens"


def _choose_sections(words: list[str]) -> "list[Section]":
    """The sections that the words name, separated by spaces or commas.

    "all" stands for all of them, "standard" for those that are drawn by default.

    Raises:
        ValueError: a section is not known.
    """
    from ..inspect.sections import SECTIONS

    known = {"all": SECTIONS, "standard": [s for s in SECTIONS if s.is_standard]}
    known |= {section.name: [section] for section in SECTIONS}
    names = [name for word in words for name in word.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(
                f"--sections: {name!r} is unknown{did_you_mean(name, known)}; "
                f"known: {', '.join(known)}"
            )
    if not names:
        raise ValueError(f"--sections names none; known: {', '.join(known)}")
    chosen = {section.name for name in names for section in known[name]}
    return [section for section in SECTIONS if section.name in chosen]
