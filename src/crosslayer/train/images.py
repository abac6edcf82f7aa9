"""Images with labels: a folder of class subfolders, or an .npz.

data = images("imagenet", size=224, augment="inception crop")
order = Draws(len(data.train), seed=0, batch=256, start=step)
for batch in DataLoader(data.train, batch_size=256, sampler=order):  # pixel_values [256 3 224 224], labels [256]
    ...
"""

import hashlib
import math
import random
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ..data.sampler import BatchSampler
from ..data.sources import HELD_OUT, VALID_SHARE, hash_share
from ..validation import check_choice, did_you_mean

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
VALID = ("val", "valid", "validation")  # what the folder beside train/ may be called
MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name
PARTS = ("x_train", "y_train", "x_test", "y_test")
Augmentation = Callable[[Any, int, random.Random], Any]  # of a PIL image to one of size x size


def none(image: Any, size: int, draw: random.Random) -> Any:
    """The centre, as large as it goes."""
    from PIL import ImageOps

    return ImageOps.fit(image, (size, size))


def flip(image: Any, size: int, draw: random.Random) -> Any:
    """... mirrored half of the time."""
    from PIL import ImageOps

    image = none(image, size, draw)
    return ImageOps.mirror(image) if draw.random() < 0.5 else image


def inception_crop(image: Any, size: int, draw: random.Random) -> Any:
    """8 to 100 % of the area at an aspect of 3/4 to 4/3 (Szegedy et al., 2014, arXiv 1409.4842), then as `flip`."""
    width, height = image.size
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return flip(image.crop((left, top, left + w, top + h)).resize((size, size)), size, draw)
    return flip(image, size, draw)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": none,
    "flip": flip,
    "inception crop": inception_crop,
}


class Draws(BatchSampler):
    """An order whose epochs draw their augmentations anew: example i of epoch e is e·length + i."""

    def example(self, epoch: int, index: int) -> int:
        return epoch * self.length + index


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[dict[str, Any]]):
    """Images as {"pixel_values": [C size size] float32 in [-1, 1], "labels": int}.

    Item i is image i mod length; how it is augmented depends on the seed and i alone, so that it can be drawn again.
    """

    images: Sequence[Path] | np.ndarray  # files, or [N H W] or [N H W C] uint8
    labels: Sequence[int]
    size: int
    channels: int
    augment: str = "none"
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item < 0:
            raise IndexError(f"image {item} of {len(self)}")
        index = item % len(self)
        image = opened(self.images[index], MODES[self.channels])
        image = AUGMENTATIONS[self.augment](image, self.size, random.Random(f"{self.seed} {item}"))
        pixels = torch.from_numpy(np.array(image, np.float32)).view(
            self.size, self.size, self.channels
        )
        return {
            "pixel_values": pixels.permute(2, 0, 1).contiguous() / 127.5 - 1,
            "labels": self.labels[index],
        }


def opened(source: Path | np.ndarray, mode: str) -> Any:
    from PIL import Image

    if isinstance(source, np.ndarray):
        return Image.fromarray(source).convert(mode)
    try:
        with Image.open(source) as image:
            if image.mode.startswith("I;16"):  # which Pillow would cut off at 255 instead
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert(mode)
            # a palette's transparency has to be resolved first
            return (image.convert("RGBA") if "transparency" in image.info else image).convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source}: cannot be read as an image ({error})") from None


@dataclass(frozen=True)
class Images:
    """Images to train on and to be judged by.

    Args:
        name: the source.
        train: augmented.
        valid: validation sets by name; there is one, "held-out".
        classes: what the labels stand for.
        digest: identifies the data: an .npz's arrays; the names and sizes of files.
    """

    name: str
    train: Any
    valid: dict[str, Any]
    classes: list[str]
    digest: str


class Labelled(NamedTuple):
    """Images of one source that were found, with the name of each one's class."""

    images: Sequence[Path] | np.ndarray
    classes: list[str]


def images(
    source: str,
    size: int,
    channels: int = 3,
    valid: str | None = None,
    augment: str = "none",
    seed: int = 0,
) -> Images:
    """The training and validation images of a source.

    Args:
        source: a folder of class subfolders, below train/ and val/ or split by a hash of each file's name; or an .npz
            with uint8 x_train and x_test, [N H W] or [N H W C], and y_train and y_test.
        size: of the square they are cropped and resized to.
        channels: 1 for grey, 3 for colour.
        valid: a folder of class subfolders or an .npz, whose x_test is taken, to validate on instead.
        augment: of the training images: "none", "flip" or "inception crop".
        seed: of the augmentation.

    Raises:
        ValueError: no images there, or not as described. A broken file is named when it is read.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if channels not in MODES:
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    check_choice("augment", augment, AUGMENTATIONS)
    train, held_out = found(Path(source), whole=valid is not None)
    if valid is not None:
        held_out = (
            found(Path(valid), whole=False)[1] if valid.endswith(".npz") else files(Path(valid))
        )
    classes, labels = numbered(valid or source, train, held_out)
    train_set, valid_set = (
        (part.images, numbers, size, channels)
        for part, numbers in zip((train, held_out), labels, strict=True)
    )
    return Images(
        source, Pictures(*train_set, augment, seed), {HELD_OUT: Pictures(*valid_set)}, classes,
        fingerprints(train, held_out),
    )  # fmt: skip


def numbered(source: str, train: Labelled, valid: Labelled) -> tuple[list[str], list[list[int]]]:
    """The classes' names, numbers in their order, and the number of each training and validation image's."""
    classes = sorted(
        set(train.classes),
        key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else name),
    )
    for name in valid.classes:
        if name not in classes:
            raise ValueError(
                f"{source}: validates class {name!r}{did_you_mean(name, classes)}, of which no training image is"
            )
    numbers = {name: i for i, name in enumerate(classes)}
    return classes, [[numbers[name] for name in part.classes] for part in (train, valid)]


def found(path: Path, whole: bool) -> tuple[Labelled, Labelled]:
    """The training and the validation images; of a folder that is taken whole, the latter are none."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        return arrays(path)
    beside = [path / name for name in VALID if (path / name).is_dir()]
    train = files(path / "train" if (path / "train").is_dir() else path)
    if whole:
        return train, Labelled([], [])
    return (train, files(beside[0])) if (path / "train").is_dir() and beside else split(path, train)


def files(path: Path) -> Labelled:
    """The images in class subfolders."""
    if not path.is_dir():
        raise ValueError(f"{path}: not a folder of class subfolders")
    inside = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    if not inside:
        raise ValueError(f"{path}: no image in it (looked for *{', *'.join(SUFFIXES)})")
    for file in inside:
        if file.parent == path:
            raise ValueError(f"{file}: not in a subfolder that names its class")
    return Labelled(inside, [file.relative_to(path).parts[0] for file in inside])


def split(path: Path, whole: Labelled) -> tuple[Labelled, Labelled]:
    """By a hash of each file's name, at least one; the first of each class trains."""
    shares = {file: hash_share(file.relative_to(path).as_posix()) for file in whole.images}
    pairs = list(zip(whole.images, whole.classes, strict=True))
    first: dict[str, Path] = {}
    for file, name in sorted(pairs, key=lambda pair: shares[pair[0]], reverse=True):
        first.setdefault(name, file)
    held = {file: shares[file] for file in shares.keys() - set(first.values())}
    if not held:
        raise ValueError(f"{path}: has {len(pairs)} images, too few to hold any out")
    limit = max(VALID_SHARE, min(held.values()))
    parts: tuple[list[tuple[Path, str]], list[tuple[Path, str]]] = ([], [])
    for file, name in pairs:
        parts[held.get(file, 1.0) <= limit].append((file, name))
    train, valid = (
        Labelled([file for file, _ in part], [name for _, name in part]) for part in parts
    )
    return train, valid


def arrays(path: Path) -> tuple[Labelled, Labelled]:
    parts = opened_npz(path)
    train, test = (
        labelled(path, part, parts[f"x_{part}"], parts[f"y_{part}"]) for part in ("train", "test")
    )
    return train, test


def opened_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("a file of another kind, or cut off")
        with np.load(path) as inside:
            if set(PARTS) - set(inside.files):
                raise ValueError(f"has {', '.join(inside.files)}; expected {', '.join(PARTS)}")
            return {name: inside[name] for name in PARTS}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not an .npz of images ({error})") from None


def labelled(path: Path, part: str, x: np.ndarray, y: np.ndarray) -> Labelled:
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3, 4)):
        raise ValueError(
            f"{path}: x_{part} is {x.dtype} {list(x.shape)}, expected uint8 [N H W] or [N H W C]"
        )
    if y.size != len(x) or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"{path}: y_{part} is {y.dtype} {list(y.shape)}, expected an integer for each of {len(x)} images"
        )
    if not len(x):
        raise ValueError(f"{path}: x_{part} has no images")
    return Labelled(
        x[..., 0] if x.shape[3:] == (1,) else x, [str(n) for n in y.reshape(-1).tolist()]
    )


def fingerprints(*parts: Labelled) -> str:
    return hashlib.sha256(" ".join(map(fingerprint, parts)).encode()).hexdigest()[:16]


def fingerprint(part: Labelled) -> str:
    digest = hashlib.sha256(" ".join(part.classes).encode())
    if isinstance(part.images, np.ndarray):
        digest.update(np.ascontiguousarray(part.images).data)
    else:
        digest.update(
            " ".join(f"{file.name} {file.stat().st_size}" for file in part.images).encode()
        )
    return digest.hexdigest()
