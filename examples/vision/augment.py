"""Augmentations of training images. Each draws from a generator of its own, so it can be repeated.

    rng = random.Random("number of the image")
    image = AUGMENTATIONS["random resized crop"](image, 224, rng)
    image = rand_augment(image, level=10, rng=rng)
    examples = mix_up(examples, alpha=0.2, rng=rng)

Images are Pillow's, of mode L or RGB and any size.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageEnhance, ImageOps

# Rand_augment's distances are stated in pixels of an image of this width.
REFERENCE_WIDTH = 224
MAX_LEVEL = 20


def center_crop(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    """The largest square in the middle, resized."""
    return ImageOps.fit(image, (size, size))


def random_flip(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    """`center_crop`, mirrored with probability 1/2."""
    image = center_crop(image, size, rng)
    return ImageOps.mirror(image) if rng.random() < 0.5 else image


def random_resized_crop(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    """A crop of 8 to 100 % of the area, aspect 3/4 to 4/3 (arXiv 1409.4842), and `random_flip`."""
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        aspect_ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w = round(math.sqrt(area * aspect_ratio))
        h = round(math.sqrt(area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            left = rng.randint(0, width - w)
            top = rng.randint(0, height - h)
            image = image.crop((left, top, left + w, top + h)).resize((size, size))
            break
    return random_flip(image, size, rng)


AUGMENTATIONS = {
    "none": center_crop,
    "flip": random_flip,
    "random resized crop": random_resized_crop,
}

# An operation of RandAugment: (image, strength, generator) -> image. Strength is level / 10.
Operation = Callable[[Image.Image, float, random.Random], Image.Image]


def rand_augment(
    image: Image.Image, level: float, rng: random.Random, layers: int = 2
) -> Image.Image:
    """RandAugment (arXiv 1909.13719): `layers` operations, each drawn from `OPERATIONS`.

    Operations and strengths are Big Vision's; the README lists the differences.

    Args:
        image: of mode L or RGB.
        level: strength of all operations, 0 to 20.
        rng: draws the operations, their signs and places.
        layers: number of operations.
    """
    for _ in range(layers):
        operation = rng.choice(OPERATIONS)
        image = operation(image, level / 10, rng)
    return image


def _autocontrast(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return ImageOps.equalize(image)


def _invert(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return ImageOps.invert(image)


def _rotate(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    degrees = _random_sign(rng) * 30 * strength
    return image.rotate(degrees, fillcolor=_mid_grey(image))


def _posterize(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    dropped_bits = 8 - int(4 * strength)
    return image.point(lambda value: value >> dropped_bits << dropped_bits)


def _solarize(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return ImageOps.solarize(image, int(256 * strength))


def _solarize_add(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    addition = int(110 * strength)
    return image.point(lambda value: min(255, value + addition) if value < 128 else value)


def _shear_x(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return _transform(image, (1, _random_sign(rng) * 0.3 * strength, 0, 0, 1, 0))


def _shear_y(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    return _transform(image, (1, 0, 0, _random_sign(rng) * 0.3 * strength, 1, 0))


def _translate_x(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    distance = _random_sign(rng) * _pixels(image, 100 * strength)
    return _transform(image, (1, 0, distance, 0, 1, 0))


def _translate_y(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    distance = _random_sign(rng) * _pixels(image, 100 * strength)
    return _transform(image, (1, 0, 0, 0, 1, distance))


def _cutout(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    """Grey in a square around a random pixel."""
    half = round(_pixels(image, 40 * strength))
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    box = (
        max(0, x - half),
        max(0, y - half),
        min(image.width, x + half),
        min(image.height, y + half),
    )
    image = image.copy()
    image.paste(_mid_grey(image), box)
    return image


def _enhancement(kind: Any) -> Operation:
    """Blend with an image without colour, contrast, brightness or sharpness."""

    def enhance(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
        return kind(image).enhance(1.8 * strength + 0.1)

    return enhance


OPERATIONS: tuple[Operation, ...] = (
    _autocontrast,
    _equalize,
    _invert,
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _enhancement(ImageEnhance.Color),
    _enhancement(ImageEnhance.Contrast),
    _enhancement(ImageEnhance.Brightness),
    _enhancement(ImageEnhance.Sharpness),
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _cutout,
)


def _random_sign(rng: random.Random) -> int:
    return rng.choice((-1, 1))


def _pixels(image: Image.Image, distance: float) -> float:
    """A distance that is stated for `REFERENCE_WIDTH`, in pixels of this image."""
    return distance * image.width / REFERENCE_WIDTH


def _mid_grey(image: Image.Image) -> Any:
    return 128 if image.mode == "L" else (128, 128, 128)


def _transform(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Pixel (x, y) becomes the input's pixel (a·x + b·y + c, d·x + e·y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=_mid_grey(image))


def mix_up(
    examples: list[dict[str, Any]], alpha: float, rng: random.Random
) -> list[dict[str, Any]]:
    """Mixup (arXiv 1710.09412): each example of a batch is mixed with the one before, cyclically.

    Args:
        examples: each with pixel_values [C H W] and labels, a class number.
        alpha: both parameters of the Beta distribution that λ is drawn from. All examples have the
            same λ, and the larger of λ and 1 - λ is their `share` (as in Big Vision).
        rng: draws λ.

    Returns:
        Examples with share · x + (1 - share) · x of the one before. Further keys are
        `other_labels`, the class of the one before, and `share`.
    """
    share = rng.betavariate(alpha, alpha)
    share = max(share, 1 - share)
    mixed = []
    for i, example in enumerate(examples):
        other = examples[i - 1]
        mixed.append(
            {
                "pixel_values": torch.lerp(other["pixel_values"], example["pixel_values"], share),
                "labels": example["labels"],
                "other_labels": other["labels"],
                "share": torch.tensor(share),
            }
        )
    return mixed
