"""What `crosslayer inspect` shows to a model: a text's sequences, or images, and their groups."""

import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..data.images import class_order
from ..data.readers import Document, list_text_files
from ..data.sources import TextSource, read_documents
from ..evaluate.language_models import check_context, context_limit
from ..hf.attach import find_backbone
from ..run_folders import step_of_name
from .image_batches import ImageBatches, join_batches, make_image_batches
from .inspection import InspectionSubject
from .observation import ModelInputs
from .text_batches import find_sink_ids, make_text_batches

_DEFAULT_CONTEXT = 256  # tokens in a sequence
_LABELLED_DOCUMENTS = 20_000  # that are read to find the labels


def text_subject(
    model: Any,
    tokenizer: Any,
    data: str,
    sequences: int,
    batch_size: int,
    context: int,
    read: Callable[[str], Iterator[Document]] = read_documents,
) -> InspectionSubject:
    """A language model with sequences of a text.

    In a folder without text files, each subfolder is a group. So is each label of documents, like
    those of a .jsonl file with a field "label". Groups share the sequences equally.

    Args:
        model: a language model.
        tokenizer: of transformers.
        data: a source of documents.
        sequences: the number of sequences.
        batch_size: sequences in a batch.
        context: tokens in a sequence.
        read: reads the documents of a source.

    Raises:
        ValueError: a number is not positive, or the text has no sequence of two tokens.
    """
    sources = _split_documents(data, sequences, read)
    share = max(1, sequences // len(sources))
    groups: dict[str, list[ModelInputs]] = {}
    for name, documents in sources.items():
        try:
            groups[name] = make_text_batches(tokenizer, documents, share, context, batch_size)
        except ValueError as error:
            of_group = f", group {name}" if name else ""
            raise ValueError(f"{data}{of_group}: {error}") from None
    batches = list(chain.from_iterable(groups.values()))
    named = groups if len(groups) > 1 else {}
    return InspectionSubject(model, batches, find_sink_ids(tokenizer), groups=named)


def choose_context(model: Any, context: int | None) -> int:
    """The context given, or `_DEFAULT_CONTEXT`, or the model's where that is smaller.

    Raises:
        ValueError: the model's is smaller than the one given, or that is less than 2.
    """
    if context is not None:
        return check_context(model, context)
    return min(_DEFAULT_CONTEXT, context_limit(model) or _DEFAULT_CONTEXT)


def check_layer(model: Any, layer: int | None) -> None:
    """Raise a ValueError for the number of a layer that a model does not have.

    One more than that of the last layer stands for the readout.
    """
    backbone, wiring = find_backbone(model)
    layers = len(wiring.find_layers(backbone))
    if layer is not None and not 0 <= layer <= layers:
        raise ValueError(
            f"--layer must be from 0 to {layers - 1}, or {layers} for the readout, got {layer}"
        )


def image_subject(
    model: Any, folder: Path, data: str, images: int, batch_size: int
) -> InspectionSubject:
    """A model of images with those of a folder, whose subfolders are classes and groups.

    Args:
        model: of images.
        folder: of the model, whose preprocessor_config.json may say how pixels are normed.
        data: the folder of images.
        images: of all classes together.
        batch_size: images in a batch.

    Raises:
        ValueError: a number is not positive, or the folder has no images.
    """
    groups = make_image_batches(Path(data), model.config, folder, images, batch_size)
    named = groups if len(groups) > 1 else {}
    return InspectionSubject(model, join_batches(groups), groups=named)


def describe_subject(subject: InspectionSubject) -> str:
    """What the model sees, like "64 sequences of up to 256 tokens, 16,384 in all"."""
    if isinstance(subject.batches, ImageBatches):
        text = f"{len(subject.batches.files)} images"
    else:
        sequences = sum(len(batch["input_ids"]) for batch in subject.batches)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in subject.batches)
        context = max(batch["input_ids"].shape[1] for batch in subject.batches)
        text = f"{sequences} sequences of up to {context} tokens, {tokens:,} in all"
    if subject.groups:
        kind = "classes" if isinstance(subject.batches, ImageBatches) else "groups"
        text += f", {len(subject.groups)} {kind}"
    return text


def find_step(source: str) -> tuple[str, int | None]:
    """The run's folder and the step of a model that `train` kept: RUN/models/step-000400."""
    path = Path(os.path.abspath(source))
    step = step_of_name(path.name)
    return ("", None) if step is None else (str(path.parent.parent), step)


def _split_documents(
    data: str, most: int, read: Callable[[str], Iterator[Document]]
) -> dict[str, Iterator[Document]]:
    """The documents of each group; of one group, called "", where there are none.

    Of documents with labels, at most `_LABELLED_DOCUMENTS` are read, as they may be sorted by
    label. Of each label, no more are kept than the sequences can need: one a sequence.
    """
    folder = Path(data)
    if TextSource.parse(data).kind == "files" and folder.is_dir():
        parents = {name.rpartition("/")[0].partition("/")[0] for _, name in list_text_files(folder)}
        if len(parents) > 1 and "" not in parents:
            return {name: read(str(folder / name)) for name in sorted(parents, key=class_order)}
    documents = read(data)
    first = list(islice(documents, most))
    if not first:
        raise ValueError(f"{data}: empty")
    if not all(document.label for document in first):
        return {"": chain(first, documents)}
    by_label: dict[str, list[Document]] = {}
    for document in chain(first, islice(documents, max(0, _LABELLED_DOCUMENTS - len(first)))):
        of_label = by_label.setdefault(document.label, [])
        if len(of_label) < most:
            of_label.append(document)
    by_label.pop("", None)  # documents without a label among later ones
    return {label: iter(by_label[label]) for label in sorted(by_label, key=class_order)}
