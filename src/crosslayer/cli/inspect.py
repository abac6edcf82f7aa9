"""`crosslayer inspect`: what the connections of trained models do, as a report with figures."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import lock_folder
from ..validation import check_positive, did_you_mean, parse_dtype
from .console import InspectionBar, make_console, make_parser, silence_libraries

if TYPE_CHECKING:
    from ..inspect.inspection import InspectionSubject
    from ..inspect.sections import Section


def parser() -> Any:
    command = make_parser(
        "Show what the connections of trained models do: a report with figures, side by side for "
        "several models. A model without a connection is seen as pre-norm."
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
        help="text or .jsonl file or folder; default: the standard library's sources. For a ViT, a "
        "folder of images, with a subfolder a class",
    )
    add("--out", type=str, default="inspection", help="folder for report.html and its files")
    add("--sequences", type=int, default=64, help="sequences, or images, that the models see")
    add("--context", type=int, default=256, help="tokens in a sequence")
    add("--batch-size", type=int, default=8, help="sequences in a batch")
    add(
        "--average",
        type=bool,
        default=False,
        help="show models of the same configuration as seeds: their mean and its deviation",
    )
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
    from ..convert.pretrained import choose_device
    from ..data.sources import check_exists
    from ..inspect.averaging import average_groups, describe_configuration
    from ..inspect.inspection import inspect_model
    from ..inspect.report import REPORT_FILE, write_report
    from ..inspect.subjects import describe_subject, find_step

    check_positive(
        sequences=options.sequences, context=options.context, batch_size=options.batch_size
    )
    folder = Path(options.out)
    if (folder / REPORT_FILE).exists():
        raise ValueError(f"{folder / REPORT_FILE} exists already; choose another folder with --out")
    sections = _choose_sections(options.sections)
    analyses = {analysis for section in sections for analysis in section.analyses}
    check_exists(options.data)
    device = choose_device(options.device)
    console = make_console()
    inspections = []
    configurations = []
    seen = []
    steps = [find_step(source) for source in options.models]
    runs = _short_names([run for run, _ in steps])
    names = _short_names(options.models)
    start = time.perf_counter()
    with lock_folder(folder):
        with InspectionBar(console) as bar:
            for source, name, run, (_, step) in zip(
                options.models, names, runs, steps, strict=True
            ):
                bar.show_step(name, "opening", 0, 1)
                subject = _open_subject(source, options, device)
                seen.append(f"{name}: {describe_subject(subject)}")
                configurations.append(describe_configuration(subject.model))
                show_step = partial(bar.show_step, name)
                subject = replace(subject, layer=options.layer)
                inspection = inspect_model(name, subject, analyses, show_step)
                inspections.append(replace(inspection, run=run, step=step))
        if options.average:
            inspections = average_groups(inspections, configurations)
        setup = f"{options.data}. {'; '.join(seen)}."
        with console.status("drawing"):
            report = write_report(inspections, folder, setup, sections)
    if options.average and not any(inspection.seeds for inspection in inspections):
        console.print("No two models have the same configuration, so there is no mean over seeds.")
    for inspection in inspections:
        for alarm in inspection.results.get("alarms", []):
            console.print(f"{inspection.name}: {alarm}")
    console.print(f"Report: {report} ({time.perf_counter() - start:.0f} s)")
    return 0


def _open_subject(source: str, options: Any, device: Any) -> "InspectionSubject":
    """A model with what it is shown: images where it is one of images, else texts."""
    from ..convert.pretrained import (
        check_tokenizer,
        open_image_model,
        open_model,
        open_tokenizer,
        takes_images,
    )
    from ..hf.checkpoint import find_folder
    from ..inspect.subjects import image_subject, text_subject

    dtype = "auto" if options.dtype == "auto" else parse_dtype(options.dtype)
    sizes = (options.sequences, options.batch_size)
    if takes_images(source):
        model = open_image_model(source, dtype).to(device)
        return image_subject(model, find_folder(source), options.data, *sizes)
    tokenizer = open_tokenizer(options.tokenizer or source)
    model = open_model(source, dtype).to(device)
    check_tokenizer(tokenizer, model)
    return text_subject(model, tokenizer, options.data, *sizes, context=options.context)


def _short_names(sources: list[str]) -> list[str]:
    """The last part of each path, or the paths themselves where two different ones end alike."""
    names = {source: Path(source).name for source in sources}
    has_different_names = len(set(names.values())) == len(names)
    return [names[source] if has_different_names else source for source in sources]


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
