"""`crosslayer inspect`: what the connections of trained models do, as a report with figures."""

import os
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import check_new_file, lock_folder
from ..run_folders import (
    TRAINED_MODEL_FOLDER,
    is_comparison_folder,
    is_run_folder,
    last_saved_model,
)
from ..validation import check_positive, did_you_mean
from .console import InspectionBar, make_console, silence_libraries
from .options import add_model_options, choose_device, make_parser, parse_model_dtype

if TYPE_CHECKING:
    from ..inspect.inspection import InspectionSubject, ModelInspection
    from ..inspect.report import TrainingReport
    from ..inspect.sections import Section, TrainingView

_TRAINING = "training"  # stands for all views of training in --sections
_MOST_REASONS = 2  # more views that cannot be drawn are one line


def parser() -> Any:
    command = make_parser(
        "Show what the connections of trained models do: a report with figures, side by side for "
        "several models. A model without a connection is shown as pre-norm or post-norm, whichever "
        "it is. For the folders of crosslayer train and compare the report shows the training too."
    )
    add = command.add_argument
    add(
        "models",
        type=str,
        nargs="+",
        help="folders (connected model, transformers model, published checkpoint, run or "
        "comparison) or Hub names",
    )
    add(
        "--data",
        type=str,
        default="stdlib",
        help="text or .jsonl file or folder, files of token ids, or a folder of crosslayer data "
        "prepare; default: the standard library's sources. For a ViT, a folder of images, with a "
        "subfolder for each class",
    )
    add("--out", type=str, default="inspection", help="folder for report.html and its files")
    add("--sequences", type=int, default=64, help="sequences, or images, that the models see")
    add(
        "--context",
        type=int | None,
        default=None,
        help="tokens in a sequence; default: 256, or the model's context where that is smaller",
    )
    add("--batch", type=int, default=8, help="sequences in a batch")
    add(
        "--average",
        type=bool,
        default=False,
        help="treat models of the same configuration as seeds of one arm: show their mean and "
        "deviation",
    )
    add(
        "--sections",
        type=str,
        nargs="+",
        default=["standard"],
        help="sections of the report, like unfolded,cosines, or all; only the analyses that they "
        "need are run. docs/inspect.md lists them, and so does the message on an unknown one. "
        "training: only the views of run folders, for which no model is opened. Default: "
        "all but sources and pruning",
    )
    add(
        "--layer",
        type=int | None,
        default=None,
        help="the layer that the sections patterns and sources show; default: for patterns the "
        "layer at three quarters of the depth, for sources all layers",
    )
    add(
        "--running-mean",
        type=float,
        default=0.99,
        help="decay of the running mean of training losses, from one logged line to the next",
    )
    add_model_options(command)
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..inspect.report import REPORT_FILE, write_inspection_report

    check_positive(sequences=options.sequences, batch=options.batch)
    if not 0 <= options.running_mean < 1:
        raise ValueError(f"--running-mean must be from 0 to below 1, got {options.running_mean}")
    folder = Path(options.out)
    check_new_file(folder / REPORT_FILE)
    choice = _choose_sections(options.sections)
    sections, views = choice.sections, choice.views
    sources = list(dict.fromkeys(str(Path(source)) for source in options.models))  # m/ is m
    models, runs, lacks_models = _find_sources(sources)
    _check_sources(options, choice, models, runs)
    console = make_console()
    start = time.perf_counter()
    training = _read_training(runs, views, options.running_mean) if runs and views else None
    inspections: list[ModelInspection] = []
    setup = ""
    if sections and lacks_models:
        console.print("Runs without a saved model appear only in the views of training.")
    with lock_folder(folder):
        check_new_file(folder / REPORT_FILE)  # another process may have finished meanwhile
        if sections and models:
            inspections, setup = _inspect_models(options, models, sections, console)
        if training is not None:
            count = sum(len(group.seeds) for group in training.groups)
            setup = f"{count} {'run' if count == 1 else 'runs'}. {setup}"
        with console.status("drawing"):
            not_drawn = write_inspection_report(inspections, folder, setup, sections, training)
    _print_remarks(inspections, training, console)
    if choice.names_each and inspections:
        for name in _sections_to_explain(sections, not_drawn, inspections):
            console.print(f"{name} is not drawn: nothing in these models to show there")
    console.print(f"Report: {folder / REPORT_FILE} ({time.perf_counter() - start:.0f} s)")
    return 0


def _sections_to_explain(
    sections: "list[Section]", not_drawn: list[str], inspections: "list[ModelInspection]"
) -> list[str]:
    """The sections that are not drawn although none of their analyses failed."""
    failed = {analysis for inspection in inspections for analysis in inspection.not_done}
    names = [section.name for section in sections if failed.isdisjoint(section.analyses)]
    return [name for name in names if name in not_drawn]


def _print_remarks(
    inspections: "list[ModelInspection]", training: "TrainingReport | None", console: Any
) -> None:
    """Print alarms, analyses that failed, and views that could not be drawn."""
    for inspection in inspections:
        for line in [*inspection.results.get("alarms", []), *inspection.failures()]:
            console.print(f"{inspection.name}: {line}")
    if training is None:
        return
    for line in training.notes:
        console.print(line)
    if len(training.not_drawn) > _MOST_REASONS:
        names = ", ".join(training.not_drawn)
        console.print(f"Not drawn: {names}. The report says what each needs.")
    else:
        for name, needs in training.not_drawn.items():
            console.print(f"{name} is not drawn; it needs {needs}")


class _Sources(NamedTuple):
    """What the command was given.

    Attributes:
        models: their folders or names of the Hub, by the name for the reader.
        runs: the folders of runs and comparisons, whose models are among `models`.
        lacks_models: whether one of these runs has no saved model.
    """

    models: dict[str, str]
    runs: list[Path]
    lacks_models: bool


def _find_sources(given: list[str]) -> _Sources:
    """The models and the folders of runs among what the command was given.

    The models of runs are their last ones.
    """
    from ..inspect.runs import find_compared_models

    models: dict[str, str] = {}
    runs = []
    lacks_models = False
    for source, name in zip(given, _short_names(given), strict=True):
        folder = Path(source)
        found: dict[str, Path | None]
        if is_run_folder(folder):
            found = {name: last_saved_model(folder)}
        elif is_comparison_folder(folder):
            found = find_compared_models(folder)
            if len(given) > 1:
                found = {f"{name}/{arm}": model for arm, model in found.items()}
        else:
            models[name] = source
            continue
        runs.append(folder)
        models |= {run: str(model) for run, model in found.items() if model}
        lacks_models |= None in found.values()
    return _Sources(models, runs, lacks_models)


def _check_sources(
    options: Any, choice: "_SectionChoice", models: dict[str, str], runs: list[Path]
) -> None:
    """Raise a ValueError where nothing could be drawn of what --sections names, or not with these
    options.
    """
    from ..data.sources import check_exists

    sections, views = choice.sections, choice.views
    if sections and models:
        check_exists(options.data)
        choose_device(options.device)
        parse_model_dtype(options.dtype)
    if not models and (choice.names_each or not views) and sections:
        raise ValueError(
            f"{', '.join(options.models)}: no model, which {sections[0].name} needs (a run of "
            "train has one when it has ended; compare saves one of each run with --keep-models 1); "
            f"--sections {_TRAINING} draws the views of training"
        )
    if not runs and choice.names_each and views:
        raise ValueError(
            f"{', '.join(options.models)}: no folder of crosslayer train or compare, which "
            f"{views[0].name} needs"
        )


def _read_training(
    folders: list[Path], views: "list[TrainingView]", decay: float
) -> "TrainingReport":
    from ..inspect.report import draw_views
    from ..inspect.run_groups import group_runs
    from ..inspect.runs import read_runs
    from ..inspect.training_summary import GroupedRuns

    runs = [run for folder in folders for run in read_runs(folder)]
    if not runs:
        raise ValueError(f"{', '.join(map(str, folders))}: no run has logged anything yet")
    return draw_views(GroupedRuns(group_runs(runs), decay), views)


def _inspect_models(
    options: Any, models: dict[str, str], sections: "list[Section]", console: Any
) -> "tuple[list[ModelInspection], str]":
    """The analyses that the sections need of every model, and a sentence on what it saw."""
    from ..inspect.inspection import inspect_model
    from ..inspect.seed_averages import average_groups, describe_configuration
    from ..inspect.subjects import describe_subject, find_step

    device = choose_device(options.device)
    analyses = {analysis for section in sections for analysis in section.analyses}
    inspections = []
    configurations = []
    seen: dict[str, list[str]] = {}  # what was shown to which models
    steps = [find_step(source) for source in models.values()]
    runs = _short_names([run for run, _ in steps])
    with InspectionBar(console) as bar:
        for (name, source), run, (_, step) in zip(models.items(), runs, steps, strict=True):
            bar.show_step(name, "opening", 0, 1)
            subject = _open_subject(source, options, device)
            seen.setdefault(describe_subject(subject), []).append(name)
            configurations.append(describe_configuration(subject.model))
            show_step = partial(bar.show_step, name)
            inspection = inspect_model(name, subject, analyses, show_step)
            run = "" if step is None else run
            inspections.append(replace(inspection, run=run, step=step))
            del subject  # before the next model is opened
    if options.average:
        inspections = average_groups(inspections, configurations)
        if not any(inspection.seeds for inspection in inspections):
            console.print(
                "No two models have the same configuration and steps: there is no mean over seeds."
            )
    shown = [f"{', '.join(names)}: {subject}" for subject, names in seen.items()]
    return inspections, f"{options.data}. {'; '.join(shown)}."


def _open_subject(source: str, options: Any, device: Any) -> "InspectionSubject":
    """A model with what it is shown: images where it is one of images, else texts."""
    from ..convert.pretrained import (
        check_tokenizer,
        open_id_tokenizer,
        open_image_model,
        open_model,
        open_tokenizer,
        takes_images,
    )
    from ..data.sources import read_documents
    from ..data.token_sources import has_token_ids, read_id_documents
    from ..hf.loading import find_folder
    from ..inspect.subjects import check_layer, choose_context, image_subject, text_subject

    dtype = parse_model_dtype(options.dtype)
    sizes = (options.sequences, options.batch)
    if takes_images(source):
        if options.data == "stdlib":
            raise ValueError(
                f"{source} takes images: name --data, a folder with a folder of images a class"
            )
        model = open_image_model(source, dtype).to(device)
        subject = image_subject(model, find_folder(source), options.data, *sizes)
    else:
        tokenizer = open_tokenizer(options.tokenizer or source)
        model = open_model(source, dtype).to(device)
        check_tokenizer(tokenizer, model)
        context = choose_context(model, options.context)
        read: Any = read_documents
        if has_token_ids(options.data):
            read = partial(
                read_id_documents, tokenizer=open_id_tokenizer(options.tokenizer or source)
            )
        subject = text_subject(model, tokenizer, options.data, *sizes, context=context, read=read)
    check_layer(model, options.layer)
    return replace(subject, layer=options.layer)


def _short_names(sources: list[str]) -> list[str]:
    """The last part of each path; where two are equal, each path without the folders they share.

    A run's model has the name of the run.
    """
    names = {}
    for source in sources:
        path = Path(os.path.abspath(source))  # "." has no name
        names[source] = path.parent.name if path.name == TRAINED_MODEL_FOLDER else path.name
    if len(set(names.values())) < len(names):
        folders = [Path(source).parts[:-1] for source in names]
        levels = zip(*folders, strict=False)
        shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
        names = {source: str(Path(*Path(source).parts[shared:])) for source in names}
    return [names[source] for source in sources]


class _SectionChoice(NamedTuple):
    """What --sections names.

    Attributes:
        sections: of the report, in its order.
        views: of training.
        names_each: whether the user named them, and not "all" or "standard".
    """

    sections: "list[Section]"
    views: "list[TrainingView]"
    names_each: bool


def _choose_sections(words: list[str]) -> _SectionChoice:
    """The sections and the views of training that the words name, separated by spaces or commas.

    "all" stands for all of both, "standard" for those that are drawn by default, and "training" for
    the views.

    Raises:
        ValueError: a section is not known.
    """
    from ..inspect.sections import SECTIONS, TRAINING_VIEWS

    views = [view.name for view in TRAINING_VIEWS]
    known = {
        "all": [*views, *(section.name for section in SECTIONS)],
        "standard": [*views, *(section.name for section in SECTIONS if section.is_standard)],
        _TRAINING: views,
    }
    known |= {name: [name] for name in known["all"]}
    names = list(filter(None, ",".join(words).split(",")))
    for name in names:
        if name not in known:
            raise ValueError(
                f"--sections: {name!r} is unknown{did_you_mean(name, known)}; "
                f"known: {', '.join(known)}"
            )
    if not names:
        raise ValueError(f"--sections names none; known: {', '.join(known)}")
    chosen = {part for name in names for part in known[name]}
    return _SectionChoice(
        sections=[section for section in SECTIONS if section.name in chosen],
        views=[view for view in TRAINING_VIEWS if view.name in chosen],
        names_each={"all", "standard"}.isdisjoint(names),
    )
