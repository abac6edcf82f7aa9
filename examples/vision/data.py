"""Labelled images and latents as map-style datasets, for a Vision Transformer and for DiT.

    examples = load_images("imagenet", size=224, augmentation="random resized crop")
    examples.train[0]     # {"pixel_values": [3 224 224] float32 in [-1, 1], "labels": int}

An image folder is laid out as for torchvision: train/CLASS/*.jpg and val/CLASS/*.jpg. An .npz has
the arrays x_train, y_train, x_test and y_test; x is uint8 [N H W] or [N H W C] for images, a float
[N C H W] for latents.
"""

import hashlib
import random
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crosslayer.data.images import PILLOW_MODES, class_order, list_images, open_image, scale_pixels
from crosslayer.data.sampler import ResumableSampler
from crosslayer.train.task import Examples
from crosslayer.validation import check_choice
from examples.vision.augment import AUGMENTATIONS, MAX_LEVEL, mix_up, rand_augment

LARGEST_ALPHA = 1e3  # of Mixup; Python's generator of the Beta distribution never ends near 1e308


class EpochSampler(ResumableSampler):
    """Yields epoch · length + index, so that each epoch augments an image anew."""

    def __iter__(self) -> Iterator[int]:
        for epoch, index in self.positions():
            yield epoch * self.length + index


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[dict[str, Any]]):
    """Item i is image i mod length. Its augmentation depends on i alone.

    Mixup also depends on the other images of its micro-batch.
    """

    images: Sequence[Path] | np.ndarray
    labels: list[int]
    size: int
    channels: int
    augmentation: str = "none"
    randaugment_level: float | None = None
    mixup_alpha: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
        """A micro-batch: what a DataLoader calls."""
        examples = [self[item] for item in items]
        if self.mixup_alpha is None:
            return examples
        return mix_up(examples, self.mixup_alpha, random.Random(f"mixup {items[0]}"))

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = item % len(self)
        image = open_image(self.images[index], self.channels)
        rng = random.Random(f"image {item}")
        image = AUGMENTATIONS[self.augmentation](image, self.size, rng)
        if self.randaugment_level is not None:
            image = rand_augment(image, self.randaugment_level, rng)
        return {"pixel_values": scale_pixels(image), "labels": self.labels[index]}


@dataclass(frozen=True, eq=False)
class LatentDataset(Dataset[dict[str, Any]]):
    """Item i is latent i mod length, as it was saved, mirrored with probability 1/2 if `flip`."""

    latents: np.ndarray
    labels: list[int]
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = item % len(self)
        latent: Tensor = torch.from_numpy(self.latents[index].astype(np.float32))
        if self.flip and random.Random(f"latent {item}").random() < 0.5:
            latent = latent.flip(-1)
        return {"pixel_values": latent, "labels": self.labels[index]}


def load_images(
    source: str,
    size: int,
    channels: int = 3,
    augmentation: str = "none",
    randaugment_level: float | None = None,
    mixup_alpha: float | None = None,
) -> Examples:
    """Training and validation images.

    Args:
        source: a folder with train/ and val/, or an .npz.
        size: height and width to which images are cropped and resized.
        channels: 1 for grey, 3 for colour.
        augmentation: of the training images, a key of `AUGMENTATIONS`.
        randaugment_level: 0 to 20; None for no RandAugment.
        mixup_alpha: of Mixup's Beta distribution; None for no Mixup.

    Raises:
        ValueError: an option is out of range, or the source is missing or has another layout.
    """
    check_choice("augmentation", augmentation, AUGMENTATIONS)
    if channels not in PILLOW_MODES:
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if randaugment_level is not None and not 0 <= randaugment_level <= MAX_LEVEL:
        raise ValueError(
            f"randaugment_level must be from 0 to {MAX_LEVEL}, got {randaugment_level}"
        )
    if mixup_alpha is not None and not 0 < mixup_alpha <= LARGEST_ALPHA:
        raise ValueError(
            f"mixup_alpha must be greater than 0 and at most {LARGEST_ALPHA:g}, got {mixup_alpha}"
        )
    path = Path(source)
    if path.is_dir():
        splits = _Splits(*list_images(path / "train"), *list_images(path / "val"))
    else:
        splits = _load_npz(path)
        for x in (splits.x_train, splits.x_test):
            has_layout = x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3, 4))
            if x.dtype != np.uint8 or not has_layout or x.size == 0:
                raise ValueError(
                    f"{path}: images are {x.dtype} {list(x.shape)}, expected uint8 "
                    "[N H W] or [N H W C] with 1, 3 or 4 channels"
                )
    class_names, train_labels, test_labels = _number_classes(source, splits)
    if len(class_names) == 1:
        raise ValueError(f"{source}: has one class, {class_names[0]!r}; expected at least two")
    train = ImageDataset(
        splits.x_train,
        train_labels,
        size,
        channels,
        augmentation,
        randaugment_level,
        mixup_alpha,
    )
    valid = ImageDataset(splits.x_test, test_labels, size, channels)
    return _make_examples(path, splits, train, valid, len(class_names))


def load_latents(source: str, size: int, channels: int, augmentation: str = "none") -> Examples:
    """Training and validation latents: images as an autoencoder has encoded them.

    Args:
        source: an .npz with x_train and x_test [N channels size size].
        size: height and width of a latent.
        channels: channels of a latent.
        augmentation: of the training latents, "none" or "flip" (nearly the latent of the mirrored
            image).

    Raises:
        ValueError: the file is missing or has other arrays.
    """
    check_choice("augmentation", augmentation, dict.fromkeys(("none", "flip")))
    path = Path(source)
    splits = _load_npz(path)
    for x in (splits.x_train, splits.x_test):
        if x.shape[1:] != (channels, size, size) or not np.issubdtype(x.dtype, np.floating):
            raise ValueError(
                f"{path}: latents are {x.dtype} {list(x.shape)}, expected a float "
                f"[N {channels} {size} {size}]"
            )
    class_names, train_labels, test_labels = _number_classes(source, splits)
    train = LatentDataset(splits.x_train, train_labels, augmentation == "flip")
    valid = LatentDataset(splits.x_test, test_labels)
    return _make_examples(path, splits, train, valid, len(class_names))


class _Splits(NamedTuple):
    x_train: Any  # paths or an array
    y_train: list[str]  # names of classes
    x_test: Any
    y_test: list[str]


def _make_examples(
    path: Path, splits: _Splits, train: Any, valid: Any, num_classes: int
) -> Examples:
    if path.is_file():
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
    else:
        digest = hashlib.sha256()
        for file in (*splits.x_train, *splits.x_test):
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
    return Examples(
        train=train,
        valid={"validation": valid},
        num_classes=num_classes,
        digest=digest.hexdigest()[:16],
        sizes={"images to train on": len(train), "held out": len(valid)},
        sampler=EpochSampler,
    )


def _load_npz(path: Path) -> _Splits:
    expected = (
        "expected a folder with train/ and val/, or an .npz with the arrays "
        f"{', '.join(_Splits._fields)}"
    )
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "no such file or folder"
        raise ValueError(f"{path}: {expected} ({problem})")
    try:
        with np.load(path) as arrays:
            splits = [np.atleast_1d(arrays[name]) for name in _Splits._fields]
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        AttributeError,
        TypeError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(f"{path}: {expected} ({error})") from None
    x_train, y_train, x_test, y_test = splits
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if not len(x) or y.size != len(x) or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(
                f"{path}: has {len(x)} images and {y.dtype} labels {list(y.shape)}, expected an "
                "integer for each image"
            )
    return _Splits(x_train, [str(y) for y in y_train.flat], x_test, [str(y) for y in y_test.flat])


def _number_classes(source: str, splits: _Splits) -> tuple[list[str], list[int], list[int]]:
    """The sorted names of the classes; the class numbers of training and validation images."""
    names = sorted(set(splits.y_train), key=class_order)
    unknown = set(splits.y_test) - set(names)
    if unknown:
        raise ValueError(f"{source}: no training image of the validation class {min(unknown)!r}")
    number = {name: i for i, name in enumerate(names)}
    train_labels = [number[name] for name in splits.y_train]
    return names, train_labels, [number[name] for name in splits.y_test]
