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
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from crosslayer.data.sampler import BatchSampler
from crosslayer.train.task import Examples
from crosslayer.validation import check_choice
from examples.vision.augment import AUGMENTATIONS, MAX_LEVEL, mix_up, rand_augment

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PILLOW_MODES = {1: "L", 3: "RGB"}  # by number of channels


class EpochSampler(BatchSampler):
    """Yields epoch · length + index, so that each epoch augments an image anew."""

    def __iter__(self) -> Iterator[int]:
        share = self.batch // self.ranks
        for count, index in enumerate(super().__iter__()):
            step = self.start + count // share
            position = step * self.batch + self.rank * share + count % share
            epoch = position // self.length
            yield epoch * self.length + index


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[dict[str, Any]]):
    """Item i is image i mod length. Its augmentation depends on the seed and on i alone.

    Mixup also depends on the other images of its micro-batch.
    """

    images: Sequence[Path] | np.ndarray
    labels: list[int]
    size: int
    channels: int
    augmentation: str = "none"
    randaugment_level: float | None = None
    mixup_alpha: float | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
        """A micro-batch: what a DataLoader calls."""
        examples = [self[item] for item in items]
        if self.mixup_alpha is None:
            return examples
        return mix_up(examples, self.mixup_alpha, random.Random(f"{self.seed} mixup {items[0]}"))

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = item % len(self)
        image = _open_image(self.images[index], PILLOW_MODES[self.channels])
        rng = random.Random(f"{self.seed} {item}")
        image = AUGMENTATIONS[self.augmentation](image, self.size, rng)
        if self.randaugment_level is not None:
            image = rand_augment(image, self.randaugment_level, rng)
        pixels = torch.from_numpy(np.array(image, np.float32))
        pixels = pixels.view(self.size, self.size, self.channels).permute(2, 0, 1)
        return {"pixel_values": pixels.contiguous() / 127.5 - 1, "labels": self.labels[index]}


@dataclass(frozen=True, eq=False)
class LatentDataset(Dataset[dict[str, Any]]):
    """Item i is latent i mod length, as it was saved, mirrored with probability 1/2 if `flip`."""

    latents: np.ndarray
    labels: list[int]
    flip: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = item % len(self)
        latent: Tensor = torch.from_numpy(self.latents[index].astype(np.float32))
        if self.flip and random.Random(f"{self.seed} {item}").random() < 0.5:
            latent = latent.flip(-1)
        return {"pixel_values": latent, "labels": self.labels[index]}


def load_images(
    source: str,
    size: int,
    channels: int = 3,
    augmentation: str = "none",
    randaugment_level: float | None = None,
    mixup_alpha: float | None = None,
    seed: int = 0,
) -> Examples:
    """Training and validation images.

    Args:
        source: a folder with train/ and val/, or an .npz.
        size: height and width to which images are cropped and resized.
        channels: 1 for grey, 3 for colour.
        augmentation: of the training images, a key of `AUGMENTATIONS`.
        randaugment_level: 0 to 20; None for no RandAugment.
        mixup_alpha: of Mixup's Beta distribution; None for no Mixup.
        seed: of the augmentation.

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
    if mixup_alpha is not None and not mixup_alpha > 0:
        raise ValueError(f"mixup_alpha must be greater than 0, got {mixup_alpha}")
    path = Path(source)
    if path.is_dir():
        splits = _Splits(*_list_images(path / "train"), *_list_images(path / "val"))
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
        seed,
    )
    valid = ImageDataset(splits.x_test, test_labels, size, channels)
    return _make_examples(path, splits, train, valid, len(class_names))


def load_latents(
    source: str, size: int, channels: int, augmentation: str = "none", seed: int = 0
) -> Examples:
    """Training and validation latents: images as an autoencoder has encoded them.

    Args:
        source: an .npz with x_train and x_test [N channels size size].
        size: height and width of a latent.
        channels: channels of a latent.
        augmentation: of the training latents, "none" or "flip" (nearly the latent of the mirrored
            image).
        seed: of the augmentation.

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
    train = LatentDataset(splits.x_train, train_labels, augmentation == "flip", seed)
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
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
    else:
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


def _open_image(source: Path | np.ndarray, mode: str) -> Image.Image:
    """An image in one of `PILLOW_MODES`, whatever its own mode."""
    if isinstance(source, np.ndarray):
        if source.shape[-1] == 1 and source.ndim == 3:
            source = source[:, :, 0]
        return Image.fromarray(source).convert(mode)
    try:
        with Image.open(source) as image:
            if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8
                image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
            return image.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source}: cannot be read as an image ({error})") from None


def _list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """The images below a folder's class subfolders, and the class of each."""
    images: list[Path] = []
    labels: list[str] = []
    class_folders = []
    if folder.is_dir():
        class_folders = [f for f in folder.iterdir() if f.is_dir() and f.name[0] != "."]
    for class_folder in sorted(class_folders):
        files = sorted(f for f in class_folder.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise ValueError(
                f"{class_folder}: a class without images ({', '.join(IMAGE_SUFFIXES)})"
            )
        for file in files:
            if not file.is_file():  # a FIFO would be waited for
                raise ValueError(f"{file}: not a regular file")
        images += files
        labels += [class_folder.name] * len(files)
    if not images:
        raise ValueError(f"{folder}: has no class subfolders with images")
    return images, labels


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
    names = sorted(set(splits.y_train), key=_class_order)
    unknown = set(splits.y_test) - set(names)
    if unknown:
        raise ValueError(f"{source}: no training image of the validation class {min(unknown)!r}")
    number = {name: i for i, name in enumerate(names)}
    train_labels = [number[name] for name in splits.y_train]
    return names, train_labels, [number[name] for name in splits.y_test]


def _class_order(name: str) -> tuple[bool, int, str]:
    """Numbers come first, in numerical order."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
