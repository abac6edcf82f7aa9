"""Several models as seeds of one arm or steps of one run; samples in groups; and images."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from crosslayer.cli.main import main
from crosslayer.connection import find_connections
from crosslayer.convert.pretrained import open_image_model, takes_images
from crosslayer.data.prepared import prepare_corpus
from crosslayer.data.readers import Document
from crosslayer.data.tokenizing import byte_tokenizer_json
from crosslayer.hf import connect
from crosslayer.inspect import compare_depths, measure_scales, unfold_connections
from crosslayer.inspect.ablation import ablate_sublayers, mean_token_loss
from crosslayer.inspect.alarms import Alarm
from crosslayer.inspect.figures import draw_lines, join_labels
from crosslayer.inspect.gates import GateRecorder, _GateRecord
from crosslayer.inspect.group_weights import GroupWeights, compare_groups
from crosslayer.inspect.image_batches import join_batches, make_image_batches
from crosslayer.inspect.inspection import (
    ANALYSES,
    InspectionSubject,
    ModelInspection,
    inspect_model,
)
from crosslayer.inspect.lens import measure_block_gradients, measure_site_losses
from crosslayer.inspect.moments import TokenSample
from crosslayer.inspect.over_steps import collect_scalars, distance_to_last, split_runs
from crosslayer.inspect.scoring import NO_TARGET, score_targets
from crosslayer.inspect.sections import SECTIONS
from crosslayer.inspect.seed_averages import (
    average_groups,
    average_seeds,
    combine_values,
    describe_configuration,
    seed_deviation,
    seed_mean,
)
from crosslayer.inspect.similarity import DepthDistances
from crosslayer.inspect.subjects import find_step, image_subject, text_subject
from crosslayer.inspect.text_batches import make_text_batches
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.small_models import LANGUAGE, VISION, build_small
from tests.inspect.test_report import BATCHES, IDS, language_model

pytestmark = pytest.mark.filterwarnings("ignore:connecting")
ANALYSES_SEEN = ["mixing", "scales", "gradients"]
SECTION = {section.name: section for section in SECTIONS}


def inspect_denseformer(name: str, shift: float, step: int | None = None) -> ModelInspection:
    """α of every site is 0.5 + shift."""
    model = language_model("denseformer", layers=3)
    with torch.no_grad():
        for connection in find_connections(model):
            if connection.alpha is not None:
                connection.alpha.fill_(0.5 + shift)
    inspection = inspect_model(name, InspectionSubject(model, BATCHES), ANALYSES_SEEN)
    inspection.step = step
    return inspection


@pytest.fixture(scope="module")
def seeds():
    return [inspect_denseformer(f"M{n}", shift) for n, shift in enumerate((-0.3, 0, 0.3))]


def test_seeds_of_known_mean_and_deviation(seeds):
    mean = average_seeds(seeds, "mean")
    readout = mean["mixing"][-1]
    torch.testing.assert_close(readout.read_mean, torch.full((1, 4), 0.5).double())
    deviation = mean.deviation["mixing"][-1]
    torch.testing.assert_close(deviation.read_mean, torch.full((1, 4), 0.3).double())
    assert readout.label == deviation.label == "readout"
    assert [seed.name for seed in mean.seeds] == ["M0", "M1", "M2"]
    rms = [seed["scales"][-1].output_rms for seed in seeds]
    assert mean["scales"][-1].output_rms == pytest.approx(sum(rms) / 3)
    with pytest.raises(ValueError, match="at least two seeds of one connection"):
        average_seeds([seeds[0], ModelInspection("x", "prenorm", {}, [])], "mean")


def test_the_spread_in_pictures(seeds):
    mean = average_seeds(seeds, "mean")
    other = inspect_denseformer("other", 0.1)
    panels = dict(SECTION["mixing"].panels([mean, other]))
    assert list(panels) == [
        "mean: inputs",
        "mean: inputs, deviation over 3 seeds",
        "mean: inputs, × mean norm",
        "mean: inputs, × mean norm, deviation over 3 seeds",
        "other: inputs",
        "other: inputs, × mean norm",
    ]
    values = panels["mean: inputs, deviation over 3 seeds"].keywords["values"]
    assert values[-1].tolist() == pytest.approx([0.3] * 4)
    # What a picture computes of several numbers is averaged after it is computed.
    products = torch.stack(
        [s["mixing"][-1].read_mean[0] * s["mixing"][-1].part_norms for s in seeds]
    )
    shown = panels["mean: inputs, × mean norm"].keywords["values"][-1]
    torch.testing.assert_close(shown, products.mean(0))
    assert (
        shown - mean["mixing"][-1].read_mean[0] * mean["mixing"][-1].part_norms
    ).abs().max() > 1e-3
    spread = panels["mean: inputs, × mean norm, deviation over 3 seeds"].keywords["values"][-1]
    torch.testing.assert_close(spread, products.std(0))

    lines = dict(SECTION["scales"].panels([mean, other]))["raw outputs of sub-layers"].keywords
    assert [name for name, _ in lines["lines"]] == ["mean", "other"]
    rms = torch.tensor([[site.output_rms for site in seed["scales"]] for seed in seeds]).double()
    assert list(lines["deviations"]) == ["mean"]
    assert lines["deviations"]["mean"] == pytest.approx(rms.std(0).tolist(), rel=1e-4)


@pytest.mark.slow
def test_every_section_is_drawn_of_a_mean():
    models = [language_model("mgr", layers=3) for _ in range(2)]
    perturb_weights(models[1], 0.1)
    analyses = {analysis for section in SECTIONS for analysis in section.analyses}
    names = ("first", "second")
    inspections = [
        inspect_model(name, InspectionSubject(model, BATCHES), analyses)
        for name, model in zip(names, models, strict=True)
    ]
    mean = average_seeds(inspections, "mean")
    drawn = set()
    for section in SECTIONS:
        for _, draw in section.panels([mean]):
            draw(Figure().subplots())
            drawn.add(section.name)
    assert {"distances", "unfolded", "mixing", "streams", "scales"} <= drawn


def test_classes_of_fractions_have_names():
    model = language_model("frac(fractions=2)")
    found = compare_groups(model, {"a": BATCHES, "b": BATCHES})
    assert "α1,mlp [0]" in found.names and len(found.names) == found.mean.shape[1]


def test_a_sample_counts_once_whatever_its_length():
    """Two texts, of which one is padded where they are together."""
    apart = [{"input_ids": IDS[:1]}, {"input_ids": IDS[1:, :8]}]
    found = compare_groups(language_model("hyper"), {"together": BATCHES, "apart": apart})
    torch.testing.assert_close(found.mean[0], found.mean[1], atol=1e-6, rtol=0)
    # half the distance of the two, the deviation of a population
    half = (found.quartiles[..., 4] - found.quartiles[..., 0]) / 2
    torch.testing.assert_close(found.std, half)


def test_means_of_other_weights_are_refused():
    values = [
        GroupWeights(["a"], [1], [name], *[torch.ones(1, 1)] * 3) for name in ("α1,0", "α2,0")
    ]
    with pytest.raises(ValueError, match="other weights that differ"):
        combine_values(values, seed_mean)


def test_negative_values_are_in_the_picture():
    axes = Figure().subplots()
    draw_lines(axes, [list("0123")], [("m", [1.0, 0.4, 0.01, -0.3])], y_title="cosine")
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] < -0.3


def test_models_of_different_sites_share_an_axis_by_label():
    axes = Figure().subplots()
    sites = [
        ["0.attn+mlp", "1.attn+mlp", "readout"],
        [*(f"{layer}.{port}" for layer in range(3) for port in ("attn", "mlp")), "readout"],
    ]
    lines = [(name, [1.0] * len(own)) for name, own in zip("ab", sites, strict=True)]
    draw_lines(axes, sites, lines, y_title="RMS")
    labels = [label.get_text() for label in axes.get_xticklabels()]
    ticks = dict(zip(axes.get_xticks(), labels, strict=True))
    assert len(ticks) == 9 and ticks[8] == "readout"
    for line, own in zip(axes.get_lines(), sites, strict=True):
        assert [ticks[place] for place in line.get_xdata()] == own
        assert sorted(line.get_xdata()) == list(line.get_xdata())


def test_a_band_is_a_deviation_wide_on_both_sides():
    axes = Figure().subplots()
    lines = [("a", [1.0, 2.0]), ("b", [3.0, 4.0])]
    draw_lines(axes, [["0", "1"]] * 2, lines, y_title="RMS", deviations={"b": [0.1, 0.2]})
    (band,) = axes.collections
    for place, ends in ((0, [2.9, 3.1]), (1, [3.8, 4.2])):
        heights = [y for x, y in band.get_paths()[0].vertices if x == place]
        assert [min(heights), max(heights)] == pytest.approx(ends)
    assert to_rgb(band.get_facecolor()[0][:3]) == to_rgb(axes.lines[1].get_color())


def test_runs_that_kept_different_steps_share_an_axis():
    assert join_labels([["20", "100"], ["0", "60", "100"]]) == ["0", "20", "60", "100"]


def test_labels_on_padding_are_not_scored():
    ids = torch.ones(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    targets = score_targets({"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert targets.ne(NO_TARGET).sum(1).tolist() == [4, 2]


def test_a_sample_of_tokens_keeps_no_more_than_itself():
    sample = TokenSample(limit=64)
    for _ in range(20):
        sample.add(torch.randn(100, 3))
    assert sum(kept.untyped_storage().nbytes() for kept in sample._kept) <= 4 * 64 * 3


def test_a_mixed_bag_is_averaged_by_configuration(seeds):
    steady, unused = Alarm("constant stream: 1", "change", 0.2), Alarm("unused stream: 0", "w", 0.5)
    similar = Alarm(steady.label, steady.measure, 0.4)
    models = [
        ModelInspection("a", "hyper", {"alarms": [similar]}, []),
        ModelInspection("wide", "hyper", {"alarms": []}, []),
        ModelInspection("b", "hyper", {"alarms": [steady, unused], "ablation": None}, []),
        ModelInspection("later", "hyper", {"alarms": []}, [], step=8),
        ModelInspection("plain", "prenorm", {"alarms": []}, []),
    ]
    averaged = average_groups(models, ["24", "32", "24", "24", "24"])
    assert [model.name for model in averaged] == [
        "hyper (a, …), mean of 2",
        "later",
        "wide",
        "plain",
    ]
    assert average_groups(models[:3:2], ["24", "24"])[0].name == "hyper, mean of 2"
    assert list(map(str, averaged[0]["alarms"])) == [
        "constant stream: 1, change 0.3000",
        "unused stream: 0 (1 of 2 seeds), w 0.5000",
    ]
    deviations = [alarm.value for alarm in averaged[0].deviation["alarms"]]
    assert deviations == pytest.approx([math.sqrt(0.02), math.nan], nan_ok=True)
    same, other, connected = (language_model(spec) for spec in (None, None, "hyper"))
    assert describe_configuration(same) == describe_configuration(other)
    assert describe_configuration(same) != describe_configuration(connected)
    assert describe_configuration(same) != describe_configuration(language_model(None, layers=3))


def test_every_step_is_a_mean_over_the_same_runs():
    """Run A lacks step 2. The others are given in another order at each step."""

    def model(run: str, step: int, value: float) -> ModelInspection:
        return ModelInspection(f"{run}{step}", "hyper", {"value": value}, {}, run=run, step=step)

    models = [model("A", 1, 9.0), model("C", 1, 3.0), model("B", 1, 1.0)]
    models += [model("B", 2, 2.0), model("C", 2, 4.0)]
    averaged = average_groups(models, ["24"] * len(models))
    assert [(found.name, found["value"]) for found in averaged] == [
        ("A1", 9.0),
        ("hyper, mean of 2, step 1", 2.0),
        ("hyper, mean of 2, step 2", 3.0),
    ]
    for mean in averaged[1:]:
        assert [seed.run for seed in mean.seeds] == ["B", "C"]


def test_a_stream_that_is_static_in_some_seeds():
    """Two seeds of three: the picture of the mean has all three, and their deviation."""
    seeds = []
    for distance in (0.01, 0.01, 0.4):
        between = distance * (1 - torch.eye(3))
        distances = DepthDistances(
            ["0.attn", "1.attn", "readout"], between, between[None], between, [True] * 3
        )
        seeds.append(ModelInspection(f"M{distance}", "mgr", {"distances": distances}, {}))
    panels = dict(SECTION["distances"].panels([average_seeds(seeds, "mean")]))
    drawn = panels["mean: stream 0"].keywords
    assert drawn["values"].nan_to_num().max() == pytest.approx(0.14)
    assert "static" not in drawn["column_title"]
    deviation = panels["mean: stream 0, deviation over 3 seeds"].keywords["values"]
    assert deviation.nan_to_num().max() == pytest.approx(
        torch.tensor([0.01, 0.01, 0.4]).std().item()
    )
    (_, of_seed) = SECTION["distances"].panels(seeds[:1])[1]
    assert "static" in of_seed.keywords["column_title"]


def test_whole_numbers_that_seeds_share_stay_whole():
    for combine, expected in ((seed_mean, 3), (seed_deviation, 0)):
        combined = combine_values([3, 3], combine)
        assert combined == expected and isinstance(combined, int)
    assert combine_values([3, 4], seed_mean) == 3.5


def test_values_of_other_shapes_are_not_averaged(seeds):
    apart = inspect_denseformer("apart", 0.0)
    apart["mixing"][-1].read_mean = torch.zeros(1, 9)
    mean = average_seeds([seeds[0], apart], "mean")
    assert set(mean.results) == {"scales", "gradients", "alarms"}
    assert "not averaged, the seeds have values of different shapes" in mean.not_done["mixing"]
    assert SECTION["mixing"].panels([mean]) == []


def test_the_steps_of_two_runs():
    models = [inspect_denseformer("x", shift, step) for step, shift in ((20, 0.5), (10, 0.0))]
    for model in models:
        model.run = "a"
    models.append(inspect_denseformer("y", 0.0))
    runs = split_runs(models)
    assert [model.step for model in runs["a"]] == [10, 20]
    # all reads weigh 1 at the end; 0.5 at step 10 but for the first site's, which is no weight of α
    weights, half = [], []
    for model, found in ((models[0], weights), (models[1], half)):
        for site in model["mixing"]:
            for mean in (site.read_mean, site.carry_mean, site.keep_mean, site.write_mean):
                found += mean.flatten().tolist()
    gap = math.sqrt(sum((a - b) ** 2 for a, b in zip(half, weights, strict=True)))
    expected = gap / math.sqrt(
        sum(b * b for a, b in zip(half, weights, strict=True) if a != b)  # of weights that change
    )
    assert distance_to_last(runs["a"]) == pytest.approx([expected, 0])
    panels = dict(SECTION["steps"].panels(models))
    assert panels["a: into readout"].keywords["values"].tolist() == [[0.5, 1.0]] * 4
    assert panels["a: into readout"].keywords["columns"] == ["10", "20"]
    assert SECTION["steps"].panels(models[1:]) == []
    scalars = collect_scalars(models[0].results)
    assert scalars["scales.readout.output_rms"] == models[0]["scales"][-1].output_rms
    unchanged = [models[0], dataclasses.replace(models[0], step=10)]
    assert SECTION["steps"].panels(unchanged) == []


def test_the_run_of_a_step(tmp_path, monkeypatch):
    models = tmp_path / "a" / "models"
    models.mkdir(parents=True)
    monkeypatch.chdir(models)
    assert (
        find_step("step-000400") == find_step("../models/step-000400") == (str(models.parent), 400)
    )
    assert find_step("runs/a/model") == ("", None)


# Images of 3 × 2 patches of 7 × 5 pixels: odd, not square, of one channel.
SIZES = {"image_size": [21, 10], "patch_size": [7, 5], "num_channels": 1, "num_labels": 2}


def vision_config() -> ViTConfig:
    widths = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3}
    return ViTConfig(**SIZES, **widths, num_hidden_layers=2)


def vision_model(spec: str | None) -> ViTForImageClassification:
    torch.manual_seed(0)
    model = ViTForImageClassification(vision_config()).eval()
    if spec is not None:
        connect(model, spec)
    for connection in find_connections(model):
        perturb_weights(connection, 0.1)
    return model


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Black images of class 2 and white ones of class 10, which comes after 2."""
    folder = tmp_path_factory.mktemp("images")
    for name, grey, count in (("2", 0, 4), ("10", 255, 5)):
        (folder / name).mkdir()
        for number in range(count):
            pixels = np.full((21 + number, 10, 3), grey, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def test_batches_of_images(images, tmp_path):
    groups = make_image_batches(images, vision_config(), tmp_path, 9, batch_size=3)
    assert {name: len(group.files) for name, group in groups.items()} == {"2": 4, "10": 4}
    batches = join_batches(groups)
    assert len(batches) == 3
    labels = [label for batch in batches for label in batch["labels"].tolist()]
    assert labels == [0] * 4 + [1] * 4
    assert batches[0]["pixel_values"].shape == (3, 1, 21, 10)
    assert batches[2]["pixel_values"].unique().tolist() == [1]
    assert [len(batch["labels"]) for batch in batches[1:]] == [3, 2]
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.2], "image_std": [0.4]}')
    batch = make_image_batches(images, vision_config(), tmp_path, 1, 3)["2"][0]
    assert batch["pixel_values"].unique().tolist() == pytest.approx([-0.5])
    settings = '{"image_mean": [0.2], "image_std": [0.4], "do_normalize": false}'
    (tmp_path / "preprocessor_config.json").write_text(settings)
    batch = make_image_batches(images, vision_config(), tmp_path, 1, 3)["2"][0]
    assert batch["pixel_values"].unique().tolist() == [0]
    for name in ("3", "10000"):
        (tmp_path / "more" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "more" / name / "0.png")
    config = vision_config()
    config.label2id = {"3": 1, "10000": 0}
    groups = make_image_batches(tmp_path / "more", config, images, 2, 3)
    assert [group.labels for group in groups.values()] == [[1], [0]]
    config.num_labels = 7
    config.label2id = {"cat": 0}
    groups = make_image_batches(tmp_path / "more", config, images, 2, 3)
    assert [group.labels for group in groups.values()] == [None, None]
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.2, 0.3]}')
    with pytest.raises(ValueError, match=r"image_mean is \[0\.2, 0\.3\], expected 1 numbers"):
        make_image_batches(images, vision_config(), tmp_path, 1, 3)


def planted_gates() -> ViTForImageClassification:
    """β of the last write depends on a patch's brightness alone: 1 ± 0.1·tanh(1).

    The patches' embeddings are ±u, that of the class token is 0, and sub-layers write nothing.
    """
    model = vision_model("hyper(streams=2)")
    u = torch.tensor([1.0, -1.0]).repeat(6)  # LayerNorm leaves it as it is
    with torch.no_grad():
        for parameter in model.vit.parameters():
            parameter.zero_()
        projection = model.vit.embeddings.patch_embeddings.projection
        projection.weight.copy_((u / 35)[:, None, None, None].expand_as(projection.weight))
        connection = find_connections(model)[-2]
        connection.norm_weight.fill_(1)
        connection.static_beta.copy_(torch.tensor([1.0, 2.0]))
        connection.dynamic_beta_scale.fill_(0.1)
        connection.dynamic_beta_fn.copy_(u / 12)
        for site in find_connections(model)[:-1]:
            site.static_alpha.copy_(torch.tensor([[1.0, 1, 0], [0, 0, 1]]))
    return model


def test_gates_that_differ_between_classes_by_a_known_amount(images, tmp_path):
    model = planted_gates()
    groups = make_image_batches(images, model.config, tmp_path, 8, batch_size=3)
    weights = compare_groups(model, groups)
    assert weights.groups == ["2", "10"]
    assert weights.samples == [4, 4]
    assert weights.names == ["β1", "β2"]
    shift = 0.1 * math.tanh(1) * 6 / 7  # six of seven tokens are patches
    expected = torch.tensor([[1 - shift, 2 - shift], [1 + shift, 2 + shift]]).double()
    torch.testing.assert_close(weights.mean, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.quartiles[:, :, 2], expected, atol=1e-5, rtol=0)
    assert weights.std.max() < 1e-6
    mixed = {"a": join_batches(groups), "b": join_batches(groups)}
    alike = compare_groups(model, mixed)
    torch.testing.assert_close(alike.mean[0], alike.mean[1], atol=1e-6, rtol=0)
    assert compare_groups(model, {"2": groups["2"]}) is None
    assert compare_groups(vision_model("denseformer"), groups) is None  # static


def test_classes_of_a_classifier(images, tmp_path):
    """Loss, lens, gradients and ablation are those of the class; distances the class token's."""
    model = vision_model("hyper")
    batches = join_batches(make_image_batches(images, model.config, tmp_path, 8, batch_size=3))
    whole = [batch["pixel_values"] for batch in batches], [batch["labels"] for batch in batches]
    pixels, labels = (torch.cat(values) for values in whole)
    loss = model(pixel_values=pixels, labels=labels).loss
    assert mean_token_loss(model, batches) == pytest.approx(loss.item(), rel=1e-5)
    assert measure_site_losses(model, batches).losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    rms = measure_block_gradients(model, batches).rms
    loss.backward()
    for layer, found in zip(model.vit.layers, rms, strict=True):
        values = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
        assert found == pytest.approx(values.square().mean().sqrt().item(), rel=1e-4)
    ablation = ablate_sublayers(model, batches)
    with torch.no_grad():
        for parameter in model.vit.layers[1].mlp.fc2.parameters():
            parameter.zero_()
        without = mean_token_loss(model, batches)
    assert ablation.increase[3] == pytest.approx(without - loss.item(), abs=1e-6)
    assert unfold_connections(model, batches).error < 2e-5
    assert len(measure_scales(model, batches)) == 5

    plain = vision_model(None)
    inputs = []
    handle = plain.vit.layers[1].register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    plain(pixel_values=pixels)
    handle.remove()
    first = plain.vit.embeddings(pixels)[:, 0]
    cosines = torch.cosine_similarity(first, inputs[0][:, 0], dim=-1)
    expected = (cosines.arccos() / math.pi).mean().item()
    assert compare_depths(plain, batches).angular[0, 2] == pytest.approx(expected, abs=1e-4)


HOSTS = [
    # a mixer and an attention in parallel; its scan is a loop over tokens
    pytest.param(LANGUAGE, "falcon_h1", id="falcon_h1", marks=pytest.mark.slow),
    # a stream with a factor, two MLPs
    pytest.param(LANGUAGE, "gemma4_text", id="gemma4_text", marks=pytest.mark.slow),
    pytest.param(VISION, "beit", id="beit"),  # scales that are parameters
    pytest.param(VISION, "vit", id="vit"),
    pytest.param(VISION, "dinov2", id="dinov2"),  # its backbone takes embeddings
]


@pytest.mark.parametrize(("kind", "family"), HOSTS)
@pytest.mark.parametrize("spec", ["mudd", "denseformer", "hyper"])
def test_every_analysis_of_a_host_of_another_kind(kind, family, spec):
    model, inputs, _, _ = build_small(kind, family)
    connect(model, spec)
    batch = {key: value for key, value in inputs.items() if key != "use_cache"}
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    else:
        batch["labels"] = torch.zeros(len(batch["pixel_values"]), dtype=torch.long)
    steps = []
    subject = InspectionSubject(model, [batch], groups={"one": [batch], "other": [batch]})
    inspection = inspect_model(family, subject, ANALYSES, lambda *step: steps.append(step))
    # Active heads are defined for texts, and where each layer has one attention and nothing else.
    not_done = list(inspection.not_done)
    # DINOv2's head reads the class token beside the mean over patches, BEiT's that mean.
    expected = {
        "dinov2": ["lens", "attention"],
        "beit": ["lens", "attention"],
        "gemma4_text": [],
    }
    assert not_done == expected.get(family, ["attention"])
    assert {"findings", "ablation", "sources"} <= set(inspection.results)
    sites = [label for label in inspection["unfolded"].sources[1:] if "+" not in label]
    assert set(sites) <= set(inspection["ablation"].labels)
    if family in ("gemma4_text", "falcon_h1"):  # three sub-layers in a block
        assert inspection["blocks"].labels == ["0", "1", "2", "3"]
    assert all(done <= total for _, done, total in steps)


def test_what_needs_a_classifier_is_not_done_without_one(images, tmp_path):
    model = ViTModel(vision_config(), add_pooling_layer=False).eval()
    subject = image_subject(model, tmp_path, str(images), 4, 2)
    names = ["unfolded", "lens", "gradients", "ablation", "attention", "classes"]
    inspection = inspect_model("vit", subject, names)
    assert set(inspection.results) == {"unfolded", "findings"}
    assert len(inspection.not_done) == 4
    assert "ViTModel has no head" in inspection.failures()[0]


def test_groups_of_texts(tmp_path):
    model = language_model("hyper", vocab=256)
    tokenizer_file = tmp_path / "tokenizer.json"
    tokenizer_file.write_text(byte_tokenizer_json())
    from crosslayer.convert.pretrained import open_tokenizer

    subject_of = partial(
        text_subject, model, open_tokenizer(tokenizer_file), sequences=4, batch_size=4, context=8
    )
    for name in ("code", "prose"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.txt").write_text(f"the text of {name} is long enough")
    subject = subject_of(str(tmp_path / "data"))
    assert list(subject.groups) == ["code", "prose"]
    assert [len(group[0]["input_ids"]) for group in subject.groups.values()] == [2, 2]
    first_two = subject.groups["code"][0]["input_ids"]
    assert bytes(first_two.flatten().tolist()) == b"the text of code"
    rows = [{"text": f"{label} {n}", "label": label} for n in range(4) for label in ("b", "a")]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    subject = subject_of(str(lines))
    assert list(subject.groups) == ["a", "b"]
    assert bytes(subject.groups["a"][0]["input_ids"][0, :1].tolist()) == b"a"
    assert compare_groups(model, subject.groups).samples == [2, 2]
    rows.sort(key=lambda row: row["label"])  # more rows of the first label than sequences
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(subject_of(str(lines)).groups) == ["a", "b"]
    lines.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    assert subject_of(str(lines)).groups == {}
    (tmp_path / "data" / "top.txt").write_text("a text that is in no group")
    assert subject_of(str(tmp_path / "data")).groups == {}


def test_texts_are_cut_and_padded():
    """Token 0 is no padding, and a token alone is no sequence."""
    documents = [Document("", "", np.array(ids)) for ids in ([5, 0, 7, 8, 9], [1, 2, 3])]
    (batch,) = make_text_batches(None, documents, sequences=3, context=4, batch_size=2)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 8], [1, 2, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_token_ids_are_shown_to_a_model(tmp_path, capsys):
    model = tmp_path / "model"
    language_model("hyper", vocab=256).save_pretrained(model)
    (model / "tokenizer.json").write_text(byte_tokenizer_json())
    np.array([*b"a first text", 0, *b"the second"], "<u2").tofile(tmp_path / "val.bin")
    valid = {"valid": str(tmp_path / "val.bin")}
    prepare_corpus(str(tmp_path / "val.bin"), "bytes", tmp_path / "prepared", valid)
    np.array([0, 0], "<u2").tofile(tmp_path / "separators.bin")
    empty = ["--data", str(tmp_path / "separators.bin"), "--out", str(tmp_path / "no")]
    assert main(["inspect", str(model), *empty]) == 1
    assert "separators.bin: empty" in capsys.readouterr().err
    for number, data in enumerate(("val.bin", "prepared")):
        out = tmp_path / f"out{number}"
        arguments = ["--data", str(tmp_path / data), "--sections", "unfolded", "--out", str(out)]
        assert main(["inspect", str(model), *arguments]) == 0
        report = (out / "report.html").read_text()
        assert "2 sequences of up to 12 tokens, 22 in all" in report


@pytest.mark.slow
def test_a_folder_of_a_vision_model(images, tmp_path, capsys):
    for name, spec in (("hyper", "hyper"), ("plain", None)):
        vision_model(spec).save_pretrained(tmp_path / name)
        assert takes_images(tmp_path / name)
        assert open_image_model(tmp_path / name).classifier.out_features == 2
    out = tmp_path / "out"
    arguments = ["inspect", str(tmp_path / "hyper"), str(tmp_path / "plain"), "--out", str(out)]
    sections = ["--sections", "classes,cosines", "--sequences", "6"]
    assert main([*arguments, *sections, "--data", str(images)]) == 0
    content = json.loads((out / "inspection.json").read_text())
    assert content["setup"] == f"{images}. hyper, plain: 6 images, 2 classes."
    assert (out / "figures" / "classes.png").stat().st_size > 5_000
    assert main([*arguments[:-1], str(out / "2"), "--data", str(tmp_path / "plain")]) == 1
    assert "has no class subfolders with images" in capsys.readouterr().err
    assert main([*arguments[:-1], str(out / "3")]) == 1
    assert "takes images: name --data, a folder with" in capsys.readouterr().err


@pytest.mark.slow
def test_two_seeds_of_two_steps_from_folders(tmp_path, capsys):
    folders = []
    for seed in range(2):
        for step in (10, 20):
            model = language_model("denseformer", vocab=256)
            with torch.no_grad():
                find_connections(model)[-1].alpha.fill_(0.1 * step + seed)
            folders.append(tmp_path / f"run{seed}" / "models" / f"step-{step:06}")
            model.save_pretrained(folders[-1])
            (folders[-1] / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "text.txt").write_text("A stream of text.\n" * 9)
    data = ["--data", str(tmp_path / "text.txt"), "--sequences", "2", "--context", "24"]
    sections = ["--sections", "steps,step_numbers", "--average", "true"]
    out = tmp_path / "out"
    assert main(["inspect", *map(str, folders), *data, *sections, "--out", str(out)]) == 0
    models = json.loads((out / "inspection.json").read_text())["models"]
    assert [model["name"] for model in models] == [
        "denseformer, mean of 2, step 10",
        "denseformer, mean of 2, step 20",
    ]
    readout = models[1]["results"]["mixing"][-1]["read_mean"][0]
    assert readout == pytest.approx([2.5] * 3)
    deviation = models[1]["deviation"]["results"]["mixing"][-1]["read_mean"][0]
    assert deviation == pytest.approx([math.sqrt(0.5)] * 3)
    assert [seed["step"] for model in models for seed in model["seeds"]] == [10, 10, 20, 20]
    for name in ("steps", "step_numbers"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 5_000
    assert "no mean over seeds" not in capsys.readouterr().out


@pytest.mark.slow
def test_two_sizes_of_one_connection_are_named_apart(tmp_path, monkeypatch):
    folders = []
    for size, layers in {"small": 2, "large": 3}.items():
        for seed in range(2):
            folders.append(tmp_path / f"{size}-{seed}")
            language_model("skip_gain", layers, vocab=256).save_pretrained(folders[-1])
            (folders[-1] / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "text.txt").write_text("A stream of text.\n" * 9)
    monkeypatch.chdir(tmp_path)  # whose name is no model's
    arguments = ["--data", "text.txt", "--sequences", "2", "--context", "24", "--average", "true"]
    arguments += ["--sections", "mixing", "--out", "out"]
    assert main(["inspect", *map(str, folders), *arguments]) == 0
    models = json.loads((tmp_path / "out" / "inspection.json").read_text())["models"]
    assert [model["name"] for model in models] == [
        "skip_gain (small-0, …), mean of 2",
        "skip_gain (large-0, …), mean of 2",
    ]


def test_gates_of_seeds_are_averaged_over_the_same_bins():
    """Seed 1 has gates from 0 to 2, seed 2 from 1 to 4, evenly spread; beyond a limit too."""
    gates = []
    for low, high in ((0.0, 2.0), (1.0, 4.0)):
        recorder = GateRecorder()
        record = recorder._records.setdefault("1.attn", _GateRecord("beta", "0.mlp", (0.0, 1.0), 1))
        record.add(torch.linspace(low, high, 6001)[:, None])
        gates.append(recorder.result()["1.attn"])
    mean = combine_values(gates, seed_mean)
    assert (mean.edges[0].item(), mean.edges[-1].item()) == (0.0, 4.0)
    assert mean.limits == (0, 1)
    below = mean.counts[mean.edges[1:] <= 1.001].sum() / mean.counts.sum()
    assert below.item() == pytest.approx(0.25, abs=0.005)
    assert mean.counts.sum().item() == pytest.approx(6001)


def test_gates_of_channels_are_sampled():
    """A gate per channel has more values than torch's quantile takes."""
    record = _GateRecord("gate", "0.mlp", (0, 1), 2048)
    for _ in range(64):
        record.add(torch.rand(256, 2048))
    edges = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert record.statistics(edges).quartiles[2].item() == pytest.approx(0.5, abs=0.01)


def test_the_box_of_known_gates():
    """40 is beyond 1.5 interquartile ranges of the box, which the whisker of 10 is not."""
    record = _GateRecord("beta", "0.mlp", None, 1)
    record.add(torch.tensor([*range(11), 40.0])[:, None])
    gate = record.statistics(torch.linspace(0, 40, 101, dtype=torch.float64))
    assert gate.quartiles.tolist() == [0, 2.75, 5.5, 8.25, 40]
    assert gate.whiskers == (0, 10)
    assert gate.below_tenth == pytest.approx(1 / 12)
