"""Every recipe loads, has the paper's parameters, keeps its structure when small, and runs."""

import json
import math
import re
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

import crosslayer
from crosslayer.cost.estimate import count_parameters
from crosslayer.hf.attach import find_backbone
from crosslayer.spec import make
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.settings import Settings
from crosslayer.train.task import LANGUAGE_TASK, build_model, scale_embeddings
from tests.hf.backbones import build, ids

FOLDER = Path(__file__).parent.parent.parent / "recipes"
# recipes of examples/vision have options of its tasks
FILES = [file for file in sorted(FOLDER.glob("*.yaml")) if "task_options" not in file.read_text()]
# one of each paper, with experts and without
FAST = {"denseformer_table3", "hyper_table5", "mgr_table1_s", "mudd_moe", "mudd_table3_1.4b"}


def marks(file: Path) -> list[pytest.MarkDecorator]:
    group = pytest.mark.xdist_group(file.stem)
    return [group] if file.stem in FAST else [group, pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[pytest.param(file, marks=marks(file)) for file in FILES],
    ids=lambda file: file.stem,
)
def file(request):
    """A recipe's file. All its tests run one after another, so that they share its models."""
    return request.param


@cache
def opened(file: Path, scale: str = "full") -> Recipe:
    return load_recipe(file, scale)


@lru_cache(maxsize=32)
def on_meta(file: Path, scale: str, number: int) -> nn.Module:
    """The model of a recipe's arm, by the arm's number."""
    recipe = opened(file, scale)
    arm = recipe.arms[number]
    with torch.device("meta"):
        return build_model(recipe.settings(arm), arm.connection, 256, 0)


def test_the_header_says_what_it_is(file):
    text = file.read_text("utf8")
    header = "\n".join(line[2:] for line in text.splitlines() if line.startswith("#"))
    assert re.match(r"Paper: .+ \(.+, 20\d\d\), arXiv \d{4}\.\d{5}, .+", header)
    for part in ("Compared", "Hardware", "Time", "Expected", "Not stated", "Data", "Command"):
        assert re.search(rf"^{part}: \S", header, re.MULTILINE), part
    assert f"crosslayer compare recipes/{file.name}" in (one_line := " ".join(header.split()))
    assert one_line.rstrip().endswith("--scale tiny to try it on a CPU")
    assert all(len(line) <= 120 for line in text.splitlines())
    if any(arm.parameters is None for arm in opened(file).arms):
        assert re.search(r"The parameters of [^.]+ are not stated", " ".join(header.split()))


def test_the_command_uses_the_hardware(file):
    """The GPUs that the header names share the batch in micro-batches of its size."""
    header = " ".join(re.sub(r"^# ", "", file.read_text("utf8"), flags=re.MULTILINE).split())
    gpus, sequences = re.search(
        r"[hH]ere (one|\d+)(?: GPUs?)? of 80 GB, (\d+) sequences per", header
    ).groups()  # fmt: skip
    ranks = 1 if gpus == "one" else int(gpus)
    assert opened(file).settings().micro_batch(ranks) == int(sequences)
    nodes = f"--nnodes {ranks // 8} " if ranks > 8 else ""
    launcher = "" if ranks == 1 else f"torchrun {nodes}--nproc-per-node 8 -m "
    assert f"Command: {launcher}crosslayer compare" in header


def test_every_arm_has_the_papers_parameters(file):
    recipe = opened(file)
    for number, arm in enumerate(recipe.arms):
        assert recipe.settings(arm).model.vocab, (
            "a model's size must not be that of the data at hand"
        )
        ours, _ = count_parameters(on_meta(file, "full", number))
        if arm.parameters is not None:
            near = abs(ours / arm.parameters - 1) <= 0.01
            assert near != bool(arm.reason), (
                f"{arm.name}: ours {ours:,}, the paper's {arm.parameters:,.0f}, {arm.reason!r}"
            )


@pytest.mark.slow
def test_the_larger_models_have_the_published_parameters():
    """Pythia's counts (Biderman et al., 2023), and MUDD's, whose shares in Table 1 are η/6."""
    pythia = FOLDER / "mudd_table3_larger.yaml"
    counts = [count_parameters(on_meta(pythia, "full", number))[0] for number in range(2)]
    assert counts == [6857302016, 11846072320]
    mudd = FOLDER / "mudd_table4.yaml"
    for number, width, share in ((1, 2048, 0.22), (3, 2560, 0.23), (5, 4096, 0.14)):
        layers = opened(mudd).settings(opened(mudd).arms[number]).model.layers
        assert 100 * (layers + 3) / width / 6 == pytest.approx(share, abs=0.005)
        # Appendix B, but for the ways that nothing reads after the last block
        columns = [4 * (l + 1) for l in range(1, layers)] + [layers + 1]
        widths = [4 * (l + 1) for l in range(1, layers + 1)]
        generators = sum(width * K + K * c + c for K, c in zip(widths, columns, strict=True))
        norms_of_k_and_v = 2 * width * (layers - 1)
        _, own = count_parameters(on_meta(mudd, "full", number))
        assert own == generators + norms_of_k_and_v


def structure(model: nn.Module) -> dict[str, Any]:
    """What a small model must have of the large one."""
    body, family = find_backbone(model)
    layers = getattr(body, family.layers)
    kinds = {type(module).__name__ for module in model.modules()}
    config = getattr(model, "config", {})
    keys = (
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "tie_word_embeddings",
        "use_parallel_residual",
    )
    return {
        "kinds": kinds,
        "config": {key: getattr(config, key, None) for key in keys},
        "reallocated": getattr(config, "crosslayer_widths", None) is not None,
        "parts": [
            {name for name, _ in layer.named_parameters()} for layer in (layers[0], layers[-1])
        ],
    }


def test_tiny_keeps_the_structure(file):
    full, small = opened(file), opened(file, "tiny")
    for number, (arm, same) in enumerate(zip(full.arms, small.arms, strict=True)):
        assert (arm.name, make(arm.connection).options.keys()) == (
            same.name,
            make(same.connection).options.keys(),
        )
        large, tiny = on_meta(file, "full", number), on_meta(file, "tiny", number)
        assert structure(large) == structure(tiny), arm.name
        assert count_parameters(tiny)[0] < 3e6
        assert (count_parameters(tiny)[1] > 0) == (count_parameters(large)[1] > 0)


def test_lengths_along_depth_are_shortened():
    blocks = {arm.name: arm.connection for arm in opened(FOLDER / "mgr_table1_l.yaml", "tiny").arms}
    assert (
        blocks["Block AttnRes (n = 4)"] == "attnres(block_size=3)"
    )  # 4 blocks of the 12 sub-layers
    assert blocks["Block AttnRes (n = 8)"] == "attnres(block_size=2)"
    sparse = {
        arm.name: arm.connection for arm in opened(FOLDER / "denseformer_table4.yaml", "tiny").arms
    }
    assert sparse["DenseFormer 12×1"] == "denseformer(dilation=4)"  # of 8 layers
    assert sparse["Connect to Last"] == "denseformer(period='last')"


def test_tiny_models_of_odd_recipes_are_built(tmp_path):
    """A window stays longer than the dilation, and two heads divide the width as three do not."""
    (tmp_path / "recipe.yaml").write_text(
        "layers: 24\ndim: 192\nheads: 3\narms:\n"
        "  - connection: denseformer(dilation=4, last_k=8)\n"
        "  - connection: mudd(dilation=4, window=12)\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml", "tiny")
    assert [arm.connection for arm in recipe.arms] == [
        "denseformer(dilation=3, last_k=4)",
        "mudd(dilation=3, window=4)",
    ]
    for arm in recipe.arms:
        build_model(recipe.settings(arm), arm.connection, 256, 0)


def steps(recipe: Recipe, arm: Arm, count: int) -> None:
    model = build_model(recipe.settings(arm), arm.connection, 256, 0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(count):
        loss = LANGUAGE_TASK.loss(model, torch.randint(256, (2, 17)))
        assert loss.isfinite(), arm.name
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters()), arm.name


@pytest.mark.slow
def test_every_arm_trains_small(file):
    recipe = opened(file, "tiny")
    for arm in recipe.arms:
        steps(recipe, arm, 3)


def test_a_mixture_of_experts_trains_small():
    recipe = opened(FOLDER / "mudd_moe.yaml", "tiny")
    steps(recipe, recipe.arms[-1], 1)


@pytest.mark.parametrize("name", ["hyper_table6", "mudd_moe"])
def test_the_router_z_loss_is_that_of_a_loop(name):
    recipe = opened(FOLDER / f"{name}.yaml", "tiny")
    arm = recipe.arms[-1]
    model = build_model(recipe.settings(arm), arm.connection, 256, 0)
    routers = {}
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            torch.nn.init.normal_(module.weight)
            module.register_forward_hook(
                lambda router, inputs, _: routers.update({router: inputs[0].flatten(0, -2)})
            )
    tokens = torch.randint(256, (2, 6))
    with torch.no_grad():
        loss = LANGUAGE_TASK.loss(model, tokens)
        weight, model.config.router_z_loss_coef = model.config.router_z_loss_coef, 0.0
        without = LANGUAGE_TASK.loss(model, tokens)
    assert weight == 0.001 and len(routers) == model.config.num_hidden_layers
    squares = []
    for router, inputs in routers.items():
        for token in inputs.tolist():
            logits = [
                sum(x * w for x, w in zip(token, row, strict=True))
                for row in router.weight.tolist()
            ]
            squares.append(math.log(sum(math.exp(logit) for logit in logits)) ** 2)
    expected = 0.001 * sum(squares) / len(squares)
    assert loss.item() - without.item() == pytest.approx(expected, abs=3e-6)
    assert expected > 1e-3


def test_the_loss_has_the_routers_auxiliary_loss():
    recipe = opened(FOLDER / "mudd_moe.yaml", "tiny")
    arm = recipe.arms[-1]
    model = build_model(recipe.settings(arm), arm.connection, 256, 0)
    tokens = torch.randint(256, (2, 6))
    losses = []
    with torch.no_grad():
        auxiliary = model(input_ids=tokens[:, :-1], use_cache=False).aux_loss.item()
        for weight in (0.5, 0.0):
            model.config.router_aux_loss_coef = weight
            losses.append(LANGUAGE_TASK.loss(model, tokens).item())
    assert auxiliary > 0
    assert losses[0] - losses[1] == pytest.approx(0.5 * auxiliary, rel=1e-5)


def test_a_router_z_loss_needs_a_router():
    for options in ({}, {"family": "olmoe"}):
        settings = Settings.from_options(router_z_loss=0.001, **options)
        with pytest.raises(ValueError, match="router_z_loss needs a mixture of experts with"):
            build_model(settings, "prenorm", 256, 0)


@pytest.mark.parametrize("family", ["llama", "granite", "gpt2"])
def test_the_deviation_of_the_embeddings(family):
    """Of all weights it changes the embeddings alone, and no more than their scale."""
    settings = Settings.from_options(family=family, layers=1, dim=32, heads=2)
    plain = build_model(settings, "mudd", 97, 0)
    changed = build_model(
        settings._replace(model=replace(settings.model, embedding_std=1.0)), "mudd", 97, 0
    )
    name = next(n for n, p in plain.named_parameters() if p is plain.get_input_embeddings().weight)
    wide, narrow = changed.state_dict(), plain.state_dict()
    assert wide[name].std() == pytest.approx(1, abs=1e-5)
    different = {n for n in narrow if not torch.equal(wide[n], narrow[n])}
    assert different == {name}
    torch.testing.assert_close(wide[name], narrow[name] / narrow[name].std())


def test_a_deviation_of_embeddings_needs_embeddings():
    with pytest.raises(
        ValueError, match=r"embedding_std must be a number of at least 0, got -1\.0"
    ):
        Settings.from_options(embedding_std=-1)
    images = ViTModel(ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    with pytest.raises(ValueError, match="needs a backbone with token embeddings, got ViTModel"):
        scale_embeddings(images, 1.0)


def test_the_validation_sets_of_hyper_connections():
    """Table 13: the means are over 13 and 11 sets."""
    for number in range(1, 7):
        data = opened(FOLDER / f"hyper_table{number}.yaml").settings().data
        sizes = {"V2": 13, "V3": 11}
        if number == 6:
            del sizes["V2"]
        assert {group: len(names) for group, names in data.valid_groups.items()} == sizes
        named = [name for names in data.valid_groups.values() for name in names]
        assert named == list(data.valid)


def test_parallel_blocks_are_a_frozen_matrix():
    arms = {arm.name: arm for arm in opened(FOLDER / "hyper_parallel.yaml").arms}
    side_by_side = build("neox-parallel")
    matrix = crosslayer.connect(build("neox-sequential"), arms["PTB"].connection)
    torch.testing.assert_close(
        matrix(ids()).logits, side_by_side(ids()).logits, rtol=1e-5, atol=1e-6
    )
    frozen = [
        p.requires_grad
        for m in matrix.modules()
        if isinstance(m, crosslayer.Connection)
        for p in m.parameters(False)
    ]
    assert frozen and not any(frozen)


def test_retrofit(tmp_path):
    from examples import retrofit

    text = tmp_path / "text.txt"
    text.write_text(
        "All happy families are alike; every unhappy family is unhappy in its own way. " * 60
    )
    small = {
        "data": str(text),
        "steps": 4,
        "batch": 2,
        "context": 16,
        "layers": 2,
        "dim": 32,
        "heads": 2,
    }
    retrofit.run(str(tmp_path / "out"), ["prenorm", "mudd"], (0.0, 0.5), settings=small)
    rows = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert sorted(rows) == ["mudd 0.0 0.json", "mudd 0.5 0.json", "prenorm 0.0 0.json"]
    late = rows["mudd 0.5 0.json"]
    assert late["switch"] == 2 and abs(late["loss_change"]) < 1e-6 and len(late["curve"]) == 4
    # the same run until the switch
    assert late["curve"][:2] == rows["prenorm 0.0 0.json"]["curve"][:2]
    other = small | {"lr": 0.5}
    with pytest.raises(ValueError, match=r"0 0\.json: belongs to another run, with lr = "):
        retrofit.run(str(tmp_path / "out"), ["prenorm"], settings=other)
    with open(small["data"], "a") as file:
        file.write("More of it. " * 30)
    with pytest.raises(ValueError, match=r"0 0\.json: belongs to another run, with data sha256 = "):
        retrofit.run(str(tmp_path / "out"), ["prenorm"], settings=small)
    retrofit.report([str(tmp_path / "out")], str(tmp_path / "page.md"))
    assert (
        "| `mudd` | 2 | " in (tmp_path / "page.md").read_text()
        and (tmp_path / "page1.svg").exists()
    )
