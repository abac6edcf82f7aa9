"""Images from folders and .npz files: the same pixels every time, and a bad file named."""

import os
import pickle
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from crosslayer.train.images import Draws, images
from crosslayer.train.task import judged_noise

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3), np.uint8)


def folder(path: Path, pixels=PIXELS, ending="png") -> Path:
    """Two classes, in turn."""
    for i, image in enumerate(pixels):
        file = path / ("cat", "dog")[i % 2] / f"{i}.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return path


def npz(path: Path, **arrays) -> str:
    labels = np.arange(40) % 4
    known = {
        "x_train": PIXELS,
        "y_train": labels,
        "x_test": PIXELS[:8],
        "y_test": labels[:8],
    } | arrays
    np.savez(path, **{name: array for name, array in known.items() if array is not None})
    return str(path)


def test_an_npz(tmp_path):
    data = images(npz(tmp_path / "a.npz", y_test=np.arange(8)[:, None] % 4), size=10)
    assert (
        data.classes == ["0", "1", "2", "3"]
        and len(data.train) == 40
        and len(data.valid["held-out"]) == 8
    )
    item = data.train[5]
    assert item["labels"] == 1 and item["pixel_values"].shape == (3, 10, 10)
    assert item["pixel_values"].dtype == torch.float32
    # 12 x 10 is cut to its middle 10 x 10
    expected = torch.from_numpy(PIXELS[5, 1:11].astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    assert (
        torch.equal(item["pixel_values"], expected)
        and -1 <= expected.min() < -0.9 < 0.9 < expected.max() <= 1
    )
    assert len(list(data.train)) == 40


@pytest.mark.parametrize("shape", [(40, 10, 10), (40, 10, 10, 1), (40, 10, 10, 3), (40, 10, 10, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_channels_become_those_asked_for(tmp_path, shape, channels):
    pixels = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    item = images(npz(tmp_path / "a.npz", x_train=pixels, x_test=pixels[:8]), 7, channels).train[0]
    assert item["pixel_values"].shape == (channels, 7, 7)


def test_a_folder_of_classes(tmp_path):
    whole = images(str(folder(tmp_path / "all")), size=8)
    held = whole.valid["held-out"]
    assert (
        whole.classes == ["cat", "dog"]
        and len(whole.train) + len(held) == 40
        and 1 <= len(held) < 10
    )
    assert not {*whole.train.images} & {*held.images}
    again = images(str(tmp_path / "all"), size=8)
    assert again.digest == whole.digest and again.train.images == whole.train.images
    Image.fromarray(PIXELS[0]).save(tmp_path / "all" / "cat" / "new.png")
    assert images(str(tmp_path / "all"), size=8).digest != whole.digest

    folder(tmp_path / "parts" / "train")
    folder(tmp_path / "parts" / "val", PIXELS[:6])
    parts = images(str(tmp_path / "parts"), size=8)
    assert (len(parts.train), len(parts.valid["held-out"])) == (40, 6)
    given = images(str(tmp_path / "parts"), size=8, valid=str(tmp_path / "all"))
    assert (len(given.train), len(given.valid["held-out"])) == (40, 41)
    assert {parts.train[0]["labels"], parts.train[39]["labels"]} == {0, 1}


def test_few_images_are_held_out_one_at_least_and_no_class_whole(tmp_path):
    for count in (3, 4, 9):
        data = images(str(folder(tmp_path / str(count), PIXELS[:count])), size=8)
        assert (
            len(data.train) >= 2
            and len(data.valid["held-out"]) >= 1
            and set(data.train.labels) == {0, 1}
        )
    with pytest.raises(ValueError, match="has 2 images, too few to hold any out"):
        images(str(folder(tmp_path / "2", PIXELS[:2])), size=8)


@pytest.mark.parametrize(
    ("mode", "ending"), [("L", "png"), ("RGBA", "png"), ("P", "gif"), ("CMYK", "jpg"), ("1", "png")]
)
def test_files_of_any_mode(tmp_path, mode, ending):
    (tmp_path / "class").mkdir()
    for i in range(3):
        image = Image.fromarray(PIXELS[i]).convert(mode)
        extra = {"transparency": 3} if mode == "P" else {}
        image.save(tmp_path / "class" / f"{i}.{ending}", **extra)
    for item in images(str(tmp_path), size=8).train:
        assert item["pixel_values"].shape == (3, 8, 8)


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path):
    (tmp_path / "class").mkdir()
    for i in range(3):
        Image.fromarray(np.full((4, 4), 0x4000, np.uint16)).save(tmp_path / "class" / f"{i}.png")
    pixels = images(str(tmp_path), size=4, channels=1).train[0]["pixel_values"]
    assert torch.equal(pixels, torch.full((1, 4, 4), 64.0) / 127.5 - 1)


@pytest.mark.parametrize("augment", ["flip", "inception crop"])
def test_augmentation_is_drawn_anew_each_epoch_and_can_be_drawn_again(tmp_path, augment):
    data = images(npz(tmp_path / "a.npz"), 8, augment=augment, seed=1)
    n = len(data.train)
    draws = torch.stack([data.train[3 + e * n]["pixel_values"] for e in range(20)])
    kinds = len(torch.unique(draws.flatten(1), dim=0))
    assert (kinds == 2 if augment == "flip" else kinds > 15) and draws.abs().max() <= 1
    again = images(npz(tmp_path / "a.npz"), 8, augment=augment, seed=1)
    other = images(npz(tmp_path / "a.npz"), 8, augment=augment, seed=2)
    assert all(
        torch.equal(again.train[i]["pixel_values"], data.train[i]["pixel_values"])
        for i in range(3 * n)
    )
    assert any(
        not torch.equal(other.train[i]["pixel_values"], data.train[i]["pixel_values"])
        for i in range(n)
    )
    held, plain = data.valid["held-out"], images(npz(tmp_path / "a.npz"), 8).valid["held-out"]
    assert all(
        torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(held, plain, strict=True)
    )


def test_workers_and_resuming_give_the_same_batches(tmp_path):
    data = pickle.loads(pickle.dumps(images(npz(tmp_path / "a.npz"), 8, augment="inception crop")))

    def batches(start: int, workers: int, count: int):
        order = Draws(len(data.train), 0, 16, start=start)
        return list(islice(DataLoader(data.train, 16, sampler=order, num_workers=workers), count))

    alone, two, resumed = batches(0, 0, 7), batches(0, 2, 7), batches(4, 0, 3)
    for one, other in (*zip(alone, two, strict=True), *zip(alone[4:], resumed, strict=True)):
        assert torch.equal(one["pixel_values"], other["pixel_values"]) and torch.equal(
            one["labels"], other["labels"]
        )
    epochs = torch.cat([b["labels"] for b in batches(0, 0, 5)]).view(2, 40)
    assert (epochs.sort().values == torch.arange(40).div(10, rounding_mode="floor")).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_test": None},
            r"a\.npz: not an \.npz of images \(has x_train, y_train, y_test; expected x_train",
        ),
        (
            {"x_train": PIXELS.astype(np.float32)},
            r"x_train is float32 \[40, 12, 10, 3\], expected uint8",
        ),
        ({"x_train": PIXELS[:, :, :, :2]}, r"x_train is uint8 \[40, 12, 10, 2\], expected"),
        ({"x_test": PIXELS[0, 0]}, r"x_test is uint8 \[10, 3\], expected"),
        (
            {"y_train": np.arange(39)},
            r"y_train is int64 \[39\], expected an integer for each of 40 images",
        ),
        ({"y_test": np.zeros(8)}, r"y_test is float64 \[8\], expected an integer"),
        ({"y_test": np.full(8, 9)}, "validates class '9', of which no training image is"),
        ({"x_train": PIXELS[:0], "y_train": np.arange(0)}, "x_train has no images"),
        ({"y_train": np.array([None] * 40)}, "not an .npz of images"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message) as error:
        images(npz(tmp_path / "a.npz", **arrays), 8)
    assert "\n" not in str(error.value)


def test_what_is_wrong_is_one_clear_line(tmp_path):
    for arguments, message in (
        ({"source": str(tmp_path / "no.npz")}, r"no\.npz: no such file or folder"),
        ({"source": str(tmp_path)}, r"no image in it \(looked for \*\.jpg"),
        ({"source": npz(tmp_path / "a.npz"), "size": 0}, "size must be at least 1, got 0"),
        ({"source": npz(tmp_path / "a.npz"), "channels": 2}, "channels must be 1 or 3, got 2"),
        (
            {"source": npz(tmp_path / "a.npz"), "augment": "flop"},
            "augment must be one of none, flip, inception crop",
        ),
        (
            {"source": npz(tmp_path / "a.npz"), "valid": str(tmp_path / "no")},
            "no: not a folder of class subfolders",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            images(**{"size": 8} | arguments)
    (tmp_path / "broken.npz").write_bytes(Path(npz(tmp_path / "a.npz")).read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"broken\.npz: not an \.npz of images"):
        images(str(tmp_path / "broken.npz"), 8)
    np.save(tmp_path / "bare.npy", PIXELS)
    with pytest.raises(ValueError, match=r"bare\.npy: not an \.npz of images"):
        images(str(tmp_path / "bare.npy"), 8)
    folder(tmp_path / "one", PIXELS[:1])
    with pytest.raises(ValueError, match="one: has 1 images, too few to hold any out"):
        images(str(tmp_path / "one"), 8)
    Image.fromarray(PIXELS[0]).save(tmp_path / "one" / "loose.png")
    with pytest.raises(ValueError, match=r"loose\.png: not in a subfolder that names its class"):
        images(str(tmp_path / "one"), 8)


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_broken_image_is_named(tmp_path, ending):
    data = images(str(folder(tmp_path, ending=ending)), size=8)
    file = data.train.images[0]
    for content in (b"", b"not an image", file.read_bytes()[:-60]):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{file.stem}\.{ending}: cannot be read as an image"
        ) as error:
            data.train[0]
        assert "\n" not in str(error.value)


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
def test_mnist():
    data = images(
        str(Path(os.environ["CROSSLAYER_DATA"]) / "images" / "mnist_15k.npz"), size=28, channels=1
    )
    assert (len(data.train), len(data.valid["held-out"]), data.classes) == (
        12000,
        3000,
        [str(i) for i in range(10)],
    )
    sets = []
    for part in (data.train, data.valid["held-out"]):
        batch = next(iter(DataLoader(part, 3000)))
        sets.append((batch["pixel_values"].flatten(1), batch["labels"]))
    (x, y), (x_test, y_test) = sets
    centres = torch.stack([x[y == i].mean(0) for i in range(10)])
    assert (torch.cdist(x_test, centres).argmin(1) == y_test).float().mean() == pytest.approx(
        0.83, abs=0.03
    )


def test_an_image_is_judged_with_the_same_noise_in_any_company():
    """So that a validation loss does not depend on the batch or the number of ranks; and each image has its own."""
    seen = []

    def model(noisy, timestep, class_labels):
        seen.extend(timestep.tolist())
        return SimpleNamespace(sample=torch.zeros_like(noisy))

    x, labels = (
        torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.zeros(6, dtype=torch.long),
    )

    def judged(numbers):
        return judged_noise(
            model, {"pixel_values": x[numbers], "labels": labels[numbers]}, numbers
        )["loss"]

    whole = judged(list(range(6)))
    assert len(set(seen)) == 6
    parts = torch.cat([judged([0, 2, 4]), judged([1, 3, 5])])
    assert torch.equal(whole[[0, 2, 4, 1, 3, 5]], parts)
