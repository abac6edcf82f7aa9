"""examples/vision: its data, its two tasks, and a comparison at tiny size."""

import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from crosslayer.train.recipe import load_recipe
from crosslayer.train.task import build_model
from examples.vision.data import EpochSampler, load_images
from examples.vision.tasks import TASKS, evaluate_denoiser
from examples.vision.train import main

RECIPES = Path(__file__).parents[2] / "examples" / "vision" / "recipes"
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3), np.uint8)
LABELS = np.arange(40) % 4


def write_npz(folder: Path, x=PIXELS, y=LABELS, **arrays) -> str:
    arrays = {"x_train": x, "y_train": y, "x_test": x[:8], "y_test": y[:8]} | arrays
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def write_folder(folder: Path, count: int) -> None:
    """Images of two classes, in turn."""
    for i, pixels in enumerate(PIXELS[:count]):
        file = folder / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)


def test_npz_of_images(tmp_path):
    examples = load_images(write_npz(tmp_path), size=10)
    assert (examples.num_classes, len(examples.train)) == (4, 40)
    assert len(examples.valid["validation"]) == 8
    # 12 x 10 is cropped to its middle 10 x 10
    expected = torch.from_numpy(PIXELS[5, 1:11].astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    assert torch.equal(examples.train[5]["pixel_values"], expected)
    assert examples.train[5]["labels"] == 1


def test_image_folder(tmp_path):
    write_folder(tmp_path / "train", 9)
    write_folder(tmp_path / "val", 4)
    examples = load_images(str(tmp_path), size=8, channels=1)
    assert examples.num_classes == 2 and len(examples.valid["validation"]) == 4
    assert [examples.train[i]["labels"] for i in range(9)] == [0] * 5 + [1] * 4
    assert examples.train[0]["pixel_values"].shape == (1, 8, 8)
    examples.train.images[0].write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"0\.png: cannot be read as an image"):
        examples.train[0]


def test_augmentation_differs_between_epochs_and_can_be_repeated(tmp_path):
    source = write_npz(tmp_path)
    first = load_images(source, 8, augmentation="random resized crop").train
    again = load_images(source, 8, augmentation="random resized crop").train
    draws = torch.stack([first[3 + epoch * 40]["pixel_values"] for epoch in range(20)])
    assert len(torch.unique(draws.flatten(1), dim=0)) > 15 and draws.abs().max() <= 1
    assert torch.equal(draws[7], again[3 + 7 * 40]["pixel_values"])
    valid = load_images(source, 8, augmentation="random resized crop").valid["validation"]
    assert torch.equal(valid[2]["pixel_values"], valid[2 + 8]["pixel_values"])


def test_resumed_sampler_yields_the_same_items():
    complete = list(islice(EpochSampler(40, seed=0, batch=16), 7 * 16))
    resumed = list(islice(EpochSampler(40, seed=0, batch=16, start=4), 3 * 16))
    assert complete[4 * 16 :] == resumed
    assert sorted(complete[:40]) == list(range(40))
    assert sorted(complete[40:80]) == list(range(40, 80))
    ranks = [list(islice(EpochSampler(40, 0, 16, rank, 2), 16)) for rank in range(2)]
    assert ranks[0][:8] + ranks[1][:8] + ranks[0][8:] + ranks[1][8:] == complete[:32]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": PIXELS.astype(np.float32)}, r"images are float32 \[40, 12, 10, 3\], expected uint8"),
        ({"y": LABELS[:39]}, r"has 40 images and int64 labels \[39\]"),
        ({"y_test": np.full(8, 9)}, "no training image of the validation class '9'"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message):
        load_images(write_npz(tmp_path, **arrays), 8)


def test_missing_data_is_one_clear_line(tmp_path, capsys):
    recipe = str(RECIPES / "mudd_table9.yaml")
    assert main([recipe, "--scale", "tiny", "--data", str(tmp_path / "no.npz")]) == 1
    error = capsys.readouterr().err
    assert "expected a folder with train/ and val/, or an .npz" in error and error.count("\n") == 1
    with pytest.raises(ValueError, match="train: has no class subfolders with images"):
        load_images(str(tmp_path), 8)


def test_validation_noise_depends_on_the_index_alone():
    """The validation loss of DiT must not depend on the batches or on the number of ranks."""
    x = torch.randn(6, 4, 8, 8)
    steps = []

    def model(noisy, timestep, class_labels):
        steps.extend(timestep.tolist())
        return SimpleNamespace(sample=torch.zeros_like(noisy))

    def errors(indices):
        batch = {"pixel_values": x[indices], "labels": torch.zeros(len(indices))}
        return evaluate_denoiser(model, batch, indices)["loss"]

    together = errors(list(range(6)))
    assert len(set(steps)) == 6
    assert torch.equal(
        together[[0, 2, 4, 1, 3, 5]], torch.cat([errors([0, 2, 4]), errors([1, 3, 5])])
    )


TINY = """
layers: 1
dim: 16
heads: 2
batch: 4
steps: 1
evals: 1
eval_batches: 1
arms: [prenorm, hyper]
"""
VIT = "family: vit\nmodel_config: {image_size: 16, patch_size: 8}"
DIT = "family: DiTTransformer2DModel\nmodel_config: {sample_size: 8, in_channels: 4}"
LATENTS = np.random.default_rng(1).standard_normal((40, 4, 8, 8)).astype(np.float16)


@pytest.mark.parametrize(("family", "x"), [(VIT, PIXELS), (DIT, LATENTS)], ids=["vit", "dit"])
@pytest.mark.filterwarnings("ignore")  # of Lightning and diffusers
def test_comparison_of_one_step(family, x, tmp_path, capsys):
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(family + TINY + "task_options: {augmentation: flip}")
    assert main([str(recipe), "--data", write_npz(tmp_path, x), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "prenorm" in printed and "hyper" in printed
    assert (out / "report.html").exists()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of diffusers
def test_parameters_of_the_recipes(recipe):
    """At most 1 % from the paper's count, or the recipe gives the reason."""
    task = TASKS["DiTTransformer2DModel" if "table10" in recipe.stem else "vit"]
    loaded = load_recipe(recipe, task=task)
    for arm in loaded.arms:
        settings = loaded.settings(arm)
        with torch.device("meta"):
            model = build_model(settings, arm.connection, 1000, 0, task)
        count = sum(p.numel() for p in model.parameters())
        assert count == pytest.approx(arm.parameters, rel=0.01) or arm.reason, (arm.name, count)


@pytest.mark.skipif("CROSSLAYER_DATA" not in os.environ, reason="CROSSLAYER_DATA is not set")
def test_mnist():
    """Labels belong to their images: the nearest class mean classifies 83 % of the digits."""
    source = str(Path(os.environ["CROSSLAYER_DATA"]) / "images" / "mnist_15k.npz")
    examples = load_images(source, size=28, channels=1)
    assert (len(examples.train), examples.num_classes) == (12000, 10)
    sets = []
    for dataset in (examples.train, examples.valid["validation"]):
        batch = next(iter(DataLoader(dataset, len(dataset))))
        sets.append((batch["pixel_values"].flatten(1), batch["labels"]))
    (x, y), (x_test, y_test) = sets
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    accuracy = (torch.cdist(x_test, means).argmin(1) == y_test).float().mean()
    assert accuracy == pytest.approx(0.83, abs=0.03)
