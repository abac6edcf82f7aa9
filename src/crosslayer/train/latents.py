"""Images as an autoencoder has encoded them: an .npz of [N C H W] arrays with labels."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..data.sources import HELD_OUT
from ..validation import check_choice
from .images import Images, Labelled, fingerprints, numbered, opened_npz


@dataclass(frozen=True, eq=False)
class Latents(Dataset[dict[str, Any]]):
    """Items as `Pictures` has them, whose values are as they were saved; item i is latent i mod length."""

    latents: np.ndarray  # [N C H W], of a float
    labels: list[int]
    augment: str = "none"
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item < 0:
            raise IndexError(f"latent {item} of {len(self)}")
        x = torch.from_numpy(self.latents[item % len(self)].astype(np.float32))
        mirrored = self.augment == "flip" and random.Random(f"{self.seed} {item}").random() < 0.5
        return {
            "pixel_values": x.flip(-1) if mirrored else x,
            "labels": self.labels[item % len(self)],
        }


def latents(source: str, size: int, channels: int, augment: str = "none", seed: int = 0) -> Images:
    """The training and validation latents of an .npz.

    Args:
        source: an .npz with x_train and x_test, [N channels size size] of a float, and y_train and y_test.
        size: of a latent.
        channels: of a latent.
        augment: of the training latents: "none" or "flip", which is nearly the latent of the mirrored image.
        seed: of the augmentation.

    Raises:
        ValueError: no such file, or not as described.
    """
    check_choice("augment", augment, dict.fromkeys(("none", "flip")))
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; latents of {channels} channels are read from an .npz"
        )
    parts = opened_npz(path)
    shape = (channels, size, size)
    for name in ("train", "test"):
        x, y = parts[f"x_{name}"], parts[f"y_{name}"]
        if x.shape[1:] != shape or not np.issubdtype(x.dtype, np.floating) or not len(x):
            raise ValueError(
                f"{path}: x_{name} is {x.dtype} {list(x.shape)}, expected a float [N {channels} {size} {size}]"
            )
        if y.size != len(x) or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(
                f"{path}: y_{name} is {y.dtype} {list(y.shape)}, expected an integer for each of {len(x)}"
            )
    train, valid = (
        Labelled(parts[f"x_{n}"], [str(i) for i in parts[f"y_{n}"].reshape(-1).tolist()])
        for n in ("train", "test")
    )
    classes, (mine, its) = numbered(source, train, valid)
    return Images(
        source, Latents(parts["x_train"], mine, augment, seed), {HELD_OUT: Latents(parts["x_test"], its)},
        classes, fingerprints(train, valid),
    )  # fmt: skip
