"""examples/vision: its data, its two tasks, and a comparison at tiny size."""

import json
import math
import os
import random
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader

from crosslayer.testing.tiny_model import equal_tensors
from crosslayer.train.recipe import load_recipe
from crosslayer.train.settings import Settings
from crosslayer.train.task import build_model
from examples.vision.augment import AUGMENTATIONS, OPERATIONS, rand_augment
from examples.vision.data import EpochSampler, load_images, load_latents
from examples.vision.models import sincos_positions
from examples.vision.sample import load_dit, sample_latents
from examples.vision.sample import main as sample
from examples.vision.tasks import (
    CLASSIFICATION,
    DENOISING,
    TASKS,
    evaluate_denoiser,
    noise_errors,
)
from examples.vision.train import main
from tests.train.runs import run

RECIPES = Path(__file__).parents[2] / "examples" / "vision" / "recipes"
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3), np.uint8)
LABELS = np.arange(40) % 4
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
VIT = "family: vit\nmodel_config: {image_size: 16, patch_size: 8}\n"
DIT = "family: DiTTransformer2DModel\nmodel_config: {sample_size: 8, in_channels: 4}\n"
LATENTS = np.random.default_rng(1).standard_normal((40, 4, 8, 8)).astype(np.float16)
DIT_CLASS = "DiTTransformer2DModel"


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


# What operations of RandAugment do at level 10; with both signs where the sign is random.
EXPECTED = {
    "invert": [lambda x: 255 - x],
    "posterize": [lambda x: x // 16 * 16],
    "solarize": [lambda x: x],  # above 256
    "solarize_add": [lambda x: np.where(x < 128, np.minimum(x.astype(int) + 110, 255), x)],
    "translate_x": [
        lambda x: np.concatenate([x[:, 5:], np.full_like(x[:, :5], 128)], 1),
        lambda x: np.concatenate([np.full_like(x[:, :5], 128), x[:, :-5]], 1),
    ],
    "translate_y": [
        lambda x: np.concatenate([x[5:], np.full_like(x[:5], 128)]),
        lambda x: np.concatenate([np.full_like(x[:5], 128), x[:-5]]),
    ],
}


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_of_randaugment(channels):
    x = np.random.default_rng(2).integers(0, 256, (9, 11, 3), np.uint8)[:, :, :channels].squeeze()
    image = Image.fromarray(x)
    checked = set()
    for operation in OPERATIONS:
        name = operation.__name__.removeprefix("_")
        found = np.array(operation(image, 1.0, random.Random(0)))
        assert found.shape == x.shape and found.dtype == np.uint8
        if name in EXPECTED:
            checked.add(name)
            assert any((found == expected(x)).all() for expected in EXPECTED[name]), name
    assert checked == set(EXPECTED) and len(OPERATIONS) == 16
    for level in (0, 2.5, 20):
        for seed in range(40):
            augmented = rand_augment(image, level, random.Random(seed))
            assert augmented.size == image.size and augmented.mode == image.mode
    assert np.array_equal(np.array(image), x), "no operation changes its input"


def test_signs_and_strengths_of_randaugment():
    x = np.random.default_rng(3).integers(0, 256, (9, 9), np.uint8)
    image = Image.fromarray(x)
    by_name = {operation.__name__: operation for operation in OPERATIONS}
    turned = {by_name["_rotate"](image, 3.0, random.Random(s)).tobytes() for s in range(20)}
    assert turned == {np.rot90(x).tobytes(), np.rot90(x, -1).tobytes()}
    enhancements = [operation for operation in OPERATIONS if operation.__name__ == "enhance"]
    brightness = enhancements[2]  # after colour and contrast
    brighter = np.array(brightness(image, 1.0, random.Random(0))).astype(int)
    assert abs(brighter - np.minimum(255, 1.9 * x)).max() <= 1
    solarized = np.array(by_name["_solarize"](image, 0.5, random.Random(0)))
    assert (solarized == np.where(x < 128, x, 255 - x)).all()
    dull = Image.fromarray(np.arange(100, 152, dtype=np.uint8).repeat(40).reshape(40, 52))
    for name in ("_autocontrast", "_equalize"):
        assert np.ptp(np.array(by_name[name](dull, 1.0, random.Random(0)))) == 255, name
    line = np.zeros((11, 11), np.uint8)
    line[:, 5] = 255
    for name, lines in (("_shear_x", line), ("_shear_y", line.T)):
        sheared = np.array(by_name[name](Image.fromarray(lines), 1.0, random.Random(0)))
        sheared = sheared if name == "_shear_x" else sheared.T
        (moved,) = np.flatnonzero(sheared[10] == 255) - 5
        assert abs(moved) == round(0.3 * 10.5) and sheared[0, 5] == 255, name
    black = Image.new("L", (224, 224))
    grey = [np.array(by_name["_cutout"](black, 1.0, random.Random(s))) == 128 for s in range(20)]
    assert max(cut.sum() for cut in grey) == 80 * 80


def test_flips_are_left_to_right(tmp_path):
    image = Image.fromarray(PIXELS[0][:10])
    latents = load_latents(write_npz(tmp_path, LATENTS), 8, 4, "flip").train
    both = {"image": (PIXELS[0][:10], PIXELS[0][:10, ::-1])}
    both["latent"] = (LATENTS[3], LATENTS[3][..., ::-1])
    seen = {"image": [], "latent": []}
    for draw in range(20):
        flipped = AUGMENTATIONS["flip"](image, 10, random.Random(draw))
        seen["image"].append(np.array(flipped))
        seen["latent"].append(latents[3 + 40 * draw]["pixel_values"].numpy())
    for kind, sides in both.items():
        of_sides = [[np.array_equal(x, side) for side in sides] for x in seen[kind]]
        assert all(map(any, of_sides)) and all(map(any, zip(*of_sides, strict=True))), kind


def test_options_of_a_recipe_reach_the_training_images(tmp_path):
    options = {"augmentation": "flip", "randaugment_level": 10, "mixup_alpha": 0.2}
    settings = Settings.from_options(data=write_npz(tmp_path), task_options=options)
    examples = CLASSIFICATION.load_examples(settings.data, {"image_size": 10})
    assert {name: getattr(examples.train, name) for name in options} == options
    level = {"randaugment_level": None}
    plain, augmented = (
        load_images(settings.data.data, 10, **change).train
        for change in (level, {"randaugment_level": 10})
    )
    differ = [
        not torch.equal(plain[i]["pixel_values"], augmented[i]["pixel_values"]) for i in range(40)
    ]
    assert sum(differ) > 20


def test_classes_named_by_numbers_are_in_their_order(tmp_path):
    """So class 2 is before class 10, as in the labels that the model is sampled by."""
    names = np.array([10, 2, 9, 2] * 10)
    examples = load_images(write_npz(tmp_path, y=names, y_test=names[:8]), 8)
    assert examples.train.labels[:4] == examples.valid["validation"].labels[:4] == [2, 0, 1, 0]


def test_accuracy_is_the_share_of_largest_logits():
    logits = torch.tensor([[3.0, 1, 2], [0, 1, 2], [1, 5, 2]])
    batch = {"pixel_values": torch.zeros(3), "labels": torch.tensor([0, 1, 1])}
    model = lambda pixel_values: SimpleNamespace(logits=logits)  # noqa: E731
    found = CLASSIFICATION.evaluate(model, batch, [0, 1, 2])
    assert found["accuracy"].tolist() == [1, 0, 1]
    assert torch.equal(found["loss"], F.cross_entropy(logits, batch["labels"], reduction="none"))


def test_mixup_is_the_loss_of_soft_labels(tmp_path):
    source = write_npz(tmp_path)
    plain, mixed = (load_images(source, 8, mixup_alpha=alpha) for alpha in (None, 0.2))
    loader = DataLoader(mixed.train, 6, sampler=range(84))
    batches = list(loader)
    shares = torch.stack([batch["share"] for batch in batches])
    assert (shares == shares[:, :1]).all() and len(shares[:, 0].unique()) > 10
    assert shares.min() >= 0.5 and shares.max() <= 1
    assert all(torch.equal(batches[3][key], list(loader)[3][key]) for key in batches[3])

    items = [6, 7, 8, 9, 10, 11]
    images = torch.stack([plain.train[item]["pixel_values"] for item in items]).double()
    one_hot = F.one_hot(torch.tensor([plain.train[item]["labels"] for item in items])).double()
    share = shares[1, 0].double()
    pixels = share * images + (1 - share) * images.roll(1, 0)
    labels = share * one_hot + (1 - share) * one_hot.roll(1, 0)
    torch.testing.assert_close(batches[1]["pixel_values"].double(), pixels, rtol=0, atol=1e-6)
    logits = torch.randn(6, 4, dtype=torch.float64)
    loss = CLASSIFICATION.loss(lambda pixel_values: SimpleNamespace(logits=logits), batches[1])
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert "share" not in mixed.valid["validation"].__getitems__([0, 1])[0]
    for alpha in (0, 1e308):
        with pytest.raises(ValueError, match="mixup_alpha must be greater than 0 and at most 1000"):
            load_images(source, 8, mixup_alpha=alpha)


def test_sincos_positions_equal_a_float64_loop():
    positions = sincos_positions(3, 5, 24)
    for row, column in np.ndindex(3, 5):
        for i in range(6):
            frequency = 1 / 10000 ** (i / 5)
            expected = [
                function(place * frequency)
                for place in (column, row)
                for function in (math.sin, math.cos)
            ]
            found = positions[row * 5 + column, i::6].tolist()
            assert found == pytest.approx(expected, rel=0, abs=6e-8)
    with pytest.raises(ValueError, match="sin-cos positions need a width of 8, 12, 16, …, got 30"):
        sincos_positions(3, 5, 30)


def build(family, config, connection="prenorm", **task_options):
    settings = Settings.from_options(
        family=family,
        layers=2,
        dim=16,
        heads=2,
        model_config=config,
        task_options=task_options,
    )
    return build_model(settings, connection, 4, 0, TASKS[family])


@pytest.mark.parametrize(("pooling", "tokens"), [("class token", 5), ("mean", 4)])
def test_vit_with_fixed_positions(pooling, tokens):
    config = {"image_size": 16, "patch_size": 8}
    model = build("vit", config, "mudd", pooling=pooling, positions="sincos")
    positions = model.vit.embeddings.position_embeddings
    assert positions.shape == (1, tokens, 16) and not positions.requires_grad
    assert torch.equal(positions[0, -4:], sincos_positions(2, 2, 16))
    assert (positions[0, :-4] == 0).all(), "of the class token"
    images = torch.randn(3, 3, 16, 16)
    states = model.vit(images).last_hidden_state
    pooled = states[:, 0] if pooling == "class token" else states.mean(1)
    assert torch.equal(model(pixel_values=images).logits, model.classifier(pooled))


def test_qk_norm_of_dit():
    """With it, the scale of q and k does not matter."""
    config = {"sample_size": 8, "in_channels": 4}
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 700]),
        "class_labels": torch.tensor([0, 3]),
    }
    changes = []
    for qk_norm in (True, False):
        model = build("DiTTransformer2DModel", config, qk_norm=qk_norm).eval()
        before = model(**inputs).sample
        for block in model.transformer_blocks:
            for projection in (block.attn1.to_q, block.attn1.to_k):
                for parameter in projection.parameters():
                    parameter.data *= 8
        changes.append((model(**inputs).sample - before).abs().max())
    assert changes[0] < 1e-2 * changes[1]


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


def fifo(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: (root / "train" / "fish").mkdir(), "fish: a class without images"),
        (lambda root: fifo(root / "train" / "cat" / "0.png"), "0.png: not a regular file"),
        (
            lambda root: [
                (root / split / "dog").rename(root / split[0]) for split in ("train", "val")
            ],
            "one class, 'cat'",
        ),
        (lambda root: (root / "val").rename(root / "valid"), "val: has no class subfolders"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "cow"), "class 'cow'"),
    ],
    ids=["empty class", "fifo", "one class", "no val", "unknown class"],
)
def test_folder_with_a_fault_is_one_clear_line(tmp_path, harm, message):
    write_folder(tmp_path / "train", 4)
    write_folder(tmp_path / "val", 4)
    harm(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_images(str(tmp_path), 8)


def test_mixed_sizes_and_modes(tmp_path):
    write_folder(tmp_path / "val", 4)
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    (tmp_path / "train" / "dog").mkdir()
    for i, mode in enumerate(("1", "L", "LA", "P", "RGB", "RGBA", "I;16")):
        x = np.full((7 + i, 30 - i), 32768, np.uint16)
        image = Image.fromarray(x) if mode == "I;16" else Image.fromarray(x // 256).convert(mode)
        image.save(folder / f"{i}.png")
    write_folder(tmp_path / "train", 2)
    for channels in (1, 3):
        images = load_images(str(tmp_path), 9, channels, "random resized crop", 10).train
        for item in range(len(images)):
            assert images[item]["pixel_values"].shape == (channels, 9, 9)
    grey = load_images(str(tmp_path), 9).train
    sixteen_bits = grey[[file.name for file in grey.images].index("6.png")]["pixel_values"]
    assert torch.equal(sixteen_bits, torch.full((3, 9, 9), 128.0) / 127.5 - 1), "no clipping"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"PK" + bytes(60), "expected a folder with train/ and val/, or an .npz"),
    ],
)
def test_data_that_cannot_be_read_is_one_clear_line(tmp_path, capsys, content, message):
    recipe, source = str(RECIPES / "mudd_table9.yaml"), tmp_path / "data.npz"
    if content is not None:
        source.write_bytes(content)
    assert main([recipe, "--scale", "tiny", "--data", str(source)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_corrupt_image_in_a_worker_is_one_clear_line(tmp_path, capsys):
    for split in ("train", "val"):
        write_folder(tmp_path / split, 4)
    for file in (tmp_path / "train").rglob("*.png"):
        file.write_bytes(b"not an image")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(VIT + TINY + "workers: 1")
    assert main([str(recipe), "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vision: ") and error.count("\n") == 1
    assert ".png: cannot be read as an image" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("family", "config", "options", "message"),
    [
        ("vit", {"image_size": 16, "patch_size": 7}, {}, "image_size must be a multiple of patch"),
        ("vit", {"hidden_act": "foo"}, {}, "no vit can be built of this config: KeyError: 'foo'"),
        ("vit", {}, {"mixup": 0.2}, r"unknown task option 'mixup' \(did you mean 'mixup_alpha'"),
        ("vit", {}, {"pooling": "max"}, "pooling must be one of 'class token', 'mean', got 'max'"),
        (
            DIT_CLASS,
            {"sample_sizee": 8},
            {},
            r"no key 'sample_sizee' \(did you mean 'sample_size'",
        ),
        (DIT_CLASS, {"out_channels": 2}, {}, "out_channels must be at least in_channels, 4, got 2"),
        (DIT_CLASS, {}, {"qk_norm": 1}, "qk_norm must be True or False, got 1"),
    ],
)
def test_option_that_cannot_be_used_is_one_clear_line(family, config, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build(family, config, **options)


def test_fewer_classes_than_the_data_has_is_one_clear_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(VIT + TINY + "vocab: 3")
    arguments = [str(recipe), "--data", write_npz(tmp_path), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "vocab must be at least 4, the number of tokens or classes of the data, got 3" in error
    assert error.count("\n") == 1


def test_wrong_argument_is_one_clear_line(capsys):
    assert main(["recipe.yaml", "--steps", "many"]) == 1
    assert capsys.readouterr().err == "vision: argument --steps: invalid int value: 'many'\n"


def test_dit_without_diffusers_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main([str(RECIPES / "hyper_table10.yaml"), "--data", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("vision: diffusers is not installed; ") and error.count("\n") == 1


def test_noise_is_added_and_measured_as_in_ddpm():
    """A float64 loop over the linear schedule; of the outputs, the first channels are the noise."""
    x, noise = torch.randn(2, 3, 2, 4, 4).unbind()
    t = torch.tensor([0, 400, 999])
    given = {}

    def model(noisy, timestep, class_labels):
        given.update(noisy=noisy, timestep=timestep)
        return SimpleNamespace(sample=torch.cat([noise + 0.5, 9 * noise], 1))

    errors = noise_errors(model, {"pixel_values": x, "labels": t}, t, noise)
    torch.testing.assert_close(errors, torch.full((3,), 0.25))
    assert torch.equal(given["timestep"], t)
    for i, step in enumerate(t.tolist()):
        signal = math.prod(1 - (1e-4 + (0.02 - 1e-4) * k / 999) for k in range(step + 1))
        expected = math.sqrt(signal) * x[i] + math.sqrt(1 - signal) * noise[i]
        torch.testing.assert_close(given["noisy"][i], expected, rtol=1e-4, atol=1e-5)

    def zero(noisy, timestep, class_labels):
        return SimpleNamespace(sample=torch.zeros_like(noisy))

    many = {"pixel_values": torch.zeros(64, 4, 8, 8), "labels": torch.zeros(64)}
    assert DENOISING.loss(zero, many).item() == pytest.approx(1, abs=0.05)


def test_guidance_goes_from_no_class_towards_the_class():
    """As if the model had returned the guided noise: 0.3 without a class, 0.1 and 0.2 with one."""
    config = SimpleNamespace(num_embeds_ada_norm=2, in_channels=1, sample_size=2)

    def samples(of_class, guidance):
        def model(x, timestep, class_labels):
            noise = torch.tensor(of_class)[class_labels].view(-1, 1, 1, 1).expand_as(x)
            return SimpleNamespace(sample=torch.cat([noise, x], 1))

        model.config = config
        return sample_latents(model, [0, 1], steps=3, guidance=guidance)

    guided = [0.3 + 2 * (0.1 - 0.3), 0.3 + 2 * (0.2 - 0.3), 0.0]
    torch.testing.assert_close(samples([0.1, 0.2, 0.3], 2), samples(guided, 1))


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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "x"), [(VIT, PIXELS), (DIT, LATENTS)], ids=["vit", "dit"])
@pytest.mark.filterwarnings("ignore")  # of Lightning and diffusers
def test_comparison_of_one_step(family, x, tmp_path, capsys):
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(family + TINY + "task_options: {augmentation: flip}")
    assert main([str(recipe), "--data", write_npz(tmp_path, x), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "prenorm" in printed and "hyper" in printed
    assert (out / "report.html").exists()


@pytest.mark.filterwarnings("ignore")  # of Lightning and diffusers
def test_saved_dit_is_the_averaged_one_and_is_sampled(tmp_path):
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(DIT + TINY.replace("steps: 1", "steps: 3\nema: 0.7\nlr: 1.0e-2"))
    source = write_npz(tmp_path, LATENTS)
    arguments = [str(recipe), "--arm", "hyper", "--data", source, "--out", str(out)]
    assert main(arguments) == 0
    model = load_dit(out / "model")
    indices = [0, 2, 4, 6]  # which are evaluated
    x = torch.from_numpy(LATENTS[indices].astype(np.float32))
    batch = {"pixel_values": x, "labels": torch.from_numpy(LABELS[indices])}
    with torch.no_grad():
        loss = evaluate_denoiser(model, batch, indices)["loss"].mean().item()
    result = json.loads((out / "result.json").read_text())
    assert loss == pytest.approx(result["valid_loss"], rel=1e-6)
    recipe.write_text(DIT + TINY.replace("steps: 1", "steps: 3\nlr: 1.0e-2"))
    raw = tmp_path / "raw"
    assert main([str(recipe), "--arm", "hyper", "--data", source, "--out", str(raw)]) == 0
    assert not equal_tensors(load_dit(raw / "model").state_dict(), model.state_dict())

    samples = tmp_path / "samples.npz"
    words = [str(out / "model"), "--steps", "2", "--out", str(samples), "--classes"]
    assert sample([*words, "0", "3"]) == 0
    assert np.isfinite(np.load(samples)["x"]).all()
    assert np.load(samples)["x"].shape == (2, 4, 8, 8)
    assert sample([*words, "4"]) == 1 == sample([str(tmp_path)])


@pytest.mark.parametrize(
    ("task", "x", "options"),
    [
        pytest.param(
            CLASSIFICATION,
            PIXELS,
            {
                "family": "vit",
                "model_config": {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1},
                "task_options": {
                    "augmentation": "random resized crop",
                    "randaugment_level": 10,
                    "mixup_alpha": 0.2,
                    "positions": "sincos",
                    "pooling": "mean",
                },
            },
            id="vit",
        ),
        pytest.param(
            DENOISING,
            LATENTS,
            {
                "family": "DiTTransformer2DModel",
                "model_config": {"sample_size": 8, "in_channels": 4},
                "task_options": {"augmentation": "flip", "qk_norm": True},
                "ema": 0.7,
            },
            id="dit",
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning and diffusers
def test_a_resumed_run_is_bitwise_identical(task, x, options, tmp_path):
    settings = {**options, "data": write_npz(tmp_path, x), "steps": 4, "save_every": 2}
    settings |= {"layers": 1, "dim": 16}
    whole = run(settings, "hyper", task=task)
    workers = 1 if task is CLASSIFICATION else 0
    run({**settings, "workers": workers}, "hyper", tmp_path / "parts", stop=3, task=task)
    rest = run(settings, "hyper", tmp_path / "parts", task=task)
    assert rest["losses"] == whole["losses"][2:] and rest["weights"] == whole["weights"]
    assert rest["result"]["curve"] == whole["result"]["curve"]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of diffusers
def test_parameters_of_the_recipes(recipe):
    """At most 1 % from the paper's count, or else the recipe gives the reason."""
    task = TASKS["DiTTransformer2DModel" if "table10" in recipe.stem else "vit"]
    loaded = load_recipe(recipe, task=task)
    for arm in loaded.arms:
        settings = loaded.settings(arm)
        with torch.device("meta"):
            model = build_model(settings, arm.connection, 1000, 0, task)
        count = sum(p.numel() for p in model.parameters())
        is_near = count == pytest.approx(arm.parameters, rel=0.01)
        assert is_near != bool(arm.reason), (arm.name, count)


def test_mnist(extra_data):
    """Labels belong to their images: the nearest class mean classifies 83 % of the digits."""
    source = str(extra_data / "images" / "mnist_15k.npz")
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
