"""Batches of images for analyses, class by class, opened when they are asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from torch import Tensor

from ..data.images import PILLOW_MODES, class_order, list_images, open_image, scale_pixels
from ..files import read_json
from ..validation import check_positive
from .observation import ModelInputs

# of image processors in transformers: the mean and deviation that pixels from 0 to 1 are normed by
_PROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True, eq=False)
class ImageBatches(Sequence[ModelInputs]):
    """Batches of `pixel_values`, and of `labels` where the classes are known to the model.

    Args:
        files: of the images.
        labels: the number of each image's class; None for batches without labels.
        batch_size: images in a batch.
        shape: channels, height and width that the model takes.
        mean: of the pixels from 0 to 1 that the model takes for 0, [C].
        std: of the pixels that the model takes for 1, [C].
    """

    files: Sequence[Path]
    labels: Sequence[int] | None
    batch_size: int
    shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return math.ceil(len(self.files) / self.batch_size)

    def __getitem__(self, place: Any) -> Any:
        """A batch, or those of a slice, which are not opened yet."""
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            files = slice(start * self.batch_size, stop * self.batch_size)
            labels = None if self.labels is None else self.labels[files]
            return replace(self, files=self.files[files], labels=labels)
        if not 0 <= place < len(self):
            raise IndexError(place)
        chosen = slice(place * self.batch_size, (place + 1) * self.batch_size)
        batch = {"pixel_values": torch.stack([self._open_pixels(f) for f in self.files[chosen]])}
        if self.labels is not None:
            batch["labels"] = torch.tensor(self.labels[chosen])
        return batch

    def _open_pixels(self, file: Path) -> Tensor:
        channels, height, width = self.shape
        image = ImageOps.fit(open_image(file, channels), (width, height))
        pixels = (scale_pixels(image) + 1) / 2
        return (pixels - self.mean[:, None, None]) / self.std[:, None, None]


def make_image_batches(
    source: Path, config: Any, processor: Path, images: int, batch_size: int
) -> dict[str, ImageBatches]:
    """Batches of each class of a folder, of about the same number of images.

    The largest middle part of an image is resized to the model's size. Its pixels go from -1 to 1,
    or by the mean and deviation of the model's `preprocessor_config.json`, or from 0 to 1 where
    `do_normalize` is false there.

    Args:
        source: a folder with a subfolder for each class.
        config: of a ViT.
        processor: the model's folder.
        images: of all classes together. A class has at least one.
        batch_size: images in a batch.

    Raises:
        ValueError: a number is not positive, the folder has no images, or the model takes no images
            of 1 or 3 channels.
    """
    check_positive(sequences=images, batch_size=batch_size)
    shape = _image_shape(config)
    mean, std = _pixel_moments(processor / _PROCESSOR_FILE, shape[0])
    files_of_class: dict[str, list[Path]] = {}
    for file, name in zip(*list_images(source), strict=True):
        files_of_class.setdefault(name, []).append(file)
    names = sorted(files_of_class, key=class_order)
    numbers = _class_numbers(names, config)
    share = max(1, images // len(names))
    batches = {}
    for name in names:
        files = files_of_class[name][:share]
        labels = None if numbers is None else [numbers[name]] * len(files)
        batches[name] = ImageBatches(files, labels, batch_size, shape, mean, std)
    return batches


def join_batches(groups: Mapping[str, ImageBatches]) -> ImageBatches:
    """The batches of all groups, in their order."""
    parts = list(groups.values())
    first = parts[0]
    files = [file for part in parts for file in part.files]
    labels = None
    if first.labels is not None:
        labels = [label for part in parts for label in part.labels or ()]
    return replace(first, files=files, labels=labels)


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    if config.num_channels not in PILLOW_MODES:
        raise ValueError(
            f"the model takes images of {config.num_channels} channels, expected 1 or 3"
        )
    return config.num_channels, height, width


def _class_numbers(names: list[str], config: Any) -> dict[str, int] | None:
    """The classifier's number of each class: by its label, or by the order of all its classes."""
    label2id = config.label2id
    if all(name in label2id for name in names):
        return {name: int(label2id[name]) for name in names}
    if len(names) == config.num_labels:
        return {name: number for number, name in enumerate(names)}
    return None


def _pixel_moments(file: Path, channels: int) -> tuple[Tensor, Tensor]:
    content = read_json(file) if file.is_file() else {}
    if content.get("do_normalize") is False:
        return torch.zeros(channels), torch.ones(channels)
    moments = []
    for key in ("image_mean", "image_std"):
        values = content.get(key, [0.5] * channels)
        is_list = isinstance(values, list) and len(values) == channels
        if not is_list or not all(isinstance(value, int | float) for value in values):
            raise ValueError(f"{file}: {key} is {values!r}, expected {channels} numbers")
        moments.append(torch.tensor(values, dtype=torch.float32))
    if (moments[1] <= 0).any():
        raise ValueError(f"{file}: image_std must be positive, got {moments[1].tolist()}")
    return moments[0], moments[1]
