"""Images of a folder with a subfolder for each class, and their pixels as a model takes them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..files import list_files

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PILLOW_MODES = {1: "L", 3: "RGB"}  # by number of channels


def class_order(name: str) -> tuple[bool, int, str]:
    """A key for sorting the names of classes: numbers come first, in numerical order."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name


def open_image(source: Path | np.ndarray, channels: int) -> Image.Image:
    """An image with a number of channels (a key of `PILLOW_MODES`), whatever its own mode.

    Raises:
        ValueError: the file is no image.
    """
    mode = PILLOW_MODES[channels]
    if isinstance(source, np.ndarray):
        if source.shape[-1] == 1 and source.ndim == 3:
            source = source[:, :, 0]
        return Image.fromarray(source).convert(mode)
    try:
        with Image.open(source) as file:
            image: Image.Image = file
            if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8
                image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
            return image.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source}: cannot be read as an image ({error})") from None


def list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """The images below a folder's class subfolders, and the class of each.

    Raises:
        ValueError: there are none, in the folder or in a class.
    """
    images: list[Path] = []
    labels: list[str] = []
    class_folders = []
    if folder.is_dir():
        class_folders = [f for f in folder.iterdir() if f.is_dir() and f.name[0] != "."]
    for class_folder in sorted(class_folders):
        files = [f for f in list_files(class_folder) if f.suffix.lower() in _IMAGE_SUFFIXES]
        if not files:
            raise ValueError(
                f"{class_folder}: a class without images ({', '.join(_IMAGE_SUFFIXES)})"
            )
        for file in files:
            if not file.is_file():  # a FIFO would be waited for
                raise ValueError(f"{file}: not a regular file")
        images += files
        labels += [class_folder.name] * len(files)
    if not images:
        raise ValueError(f"{folder}: has no class subfolders with images")
    return images, labels


def scale_pixels(image: Image.Image) -> Tensor:
    """The pixels from -1 to 1, [C H W] float32. image: of one of `PILLOW_MODES`."""
    pixels = torch.from_numpy(np.array(image, np.float32))
    pixels = pixels.view(image.height, image.width, -1).permute(2, 0, 1)
    return pixels.contiguous() / 127.5 - 1
