"""`crosslayer compare`: runs, is stopped, resumes, reports, and names what is wrong in one line."""

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import crosslayer
from crosslayer.cli import compare as compare_command
from crosslayer.cli.main import main
from crosslayer.cli.options import recipe_from_options
from crosslayer.connection import Connection
from crosslayer.cost.estimate import activation_bytes
from crosslayer.files import write_json
from crosslayer.intervals import mean_and_std, mean_interval
from crosslayer.train.compare import prepare_comparison, run_comparison, run_folder
from crosslayer.train.comparison_results import DivergedRun, describe_environment
from crosslayer.train.method_code import code_digest
from crosslayer.train.optimizers import build_optimizers, lr_schedule, warmup_steps
from crosslayer.train.parallel import launched_ranks
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.report import (
    comparison_table,
    plot_curves,
    plot_differences,
    plot_tradeoff,
)
from crosslayer.train.report_notes import report_notes, run_notes, scope_notes
from crosslayer.train.results_table import (
    differences_by_step,
    find_baseline_arms,
    result_table,
)
from crosslayer.train.run import train_arm
from crosslayer.train.settings import OptimizationSettings, Settings
from crosslayer.train.task import LANGUAGE_TASK, build_model
from tests.train.runs import run_with_loss

TINY = {
    "steps": 6,
    "eval_batches": 2,
    "batch": 2,
    "context": 32,
    "layers": 2,
    "dim": 16,
    "heads": 2,
}


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"{i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(400))
    )
    return str(path)


@pytest.fixture
def tiny(text_file):
    return {"data": text_file, **TINY}


def recipe(options, *arms):
    return Recipe([Arm.from_row(arm) for arm in arms], options)


def trained(options, arm, seed):
    settings = Settings.from_options(**options)
    arm = Arm.from_row(arm)
    examples = LANGUAGE_TASK.load_examples(settings.data, {})
    return train_arm(settings, arm, seed, examples).result()


def options(text_file) -> list[str]:
    return [
        "compare",
        "--data",
        text_file,
        *(f"--{k.replace('_', '-')}={v}" for k, v in TINY.items()),
    ]


def test_the_whole_command(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arms = ["--arms", "prenorm", "mudd(dilation=2, ways='k v r')", "hyper,attnres"]
    assert main([*options(text_file), *arms, "--seeds", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        "mudd(ways='k v r', dilation=2)" in printed or "mudd(dilation=2, ways='k v r')" in printed
    )
    results = json.loads((out / "results.json").read_text())
    assert len(results["runs"]) == 8 and results["settings"]["steps"] == 6
    for row in results["runs"]:
        assert row["curve"][-1] == [6, row["valid_loss"]]
        assert row["metrics"]["bits/byte"] == pytest.approx(row["valid_loss"] / math.log(2))
        assert row["tokens_per_second"] > 0 and row["activation_bytes"] > 0
    markdown, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    for arm in ("prenorm", "mudd", "hyper", "attnres"):
        assert arm in printed and arm in markdown and arm in page
    assert "±" in markdown and page.count("<svg") == 3
    assert not re.search(r"""(src|href)=["'](?!#)""", page), "the page stands alone"
    assert "vs prenorm" in printed and "1.00×" in printed
    for text in (" ".join(printed.split()), markdown, page):
        assert "Not tested: whether a difference lasts beyond" in text
        assert "rate instead of 0.006" in text and "Against prenorm, by 95 % intervals" in text
        assert "By chance, about 0.15 of 3 arms without any effect would be called better" in text
        assert "embeddings learn" not in text, "Granite's factor lets them learn fast"

    before = (out / "results.json").read_text()
    assert main([*options(text_file), *arms, "--seeds", "2", "--out", str(out)]) == 0
    assert (out / "results.json").read_text() == before, "nothing is run again"
    assert main([*options(text_file), "--arms", "skip_gain", "--out", str(out)]) == 0
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 9, "an arm can be added"


def test_the_rate_of_connections_that_belongs_to_the_default_rate(text_file, tmp_path):
    """docs/training.md"""
    (tmp_path / "recipe.yaml").write_text(f"{{data: {text_file}, steps: 2}}")
    command = compare_command.parser()
    for given, scale in (
        ([], 0.1),
        (["--arms", "mudd"], 0.1),
        (["--steps=9"], 0.1),
        (["--lr=3e-4"], 1),
        (["--pretrained=model", "--lr=1e-4"], 1),
        ([str(tmp_path / "recipe.yaml")], 1),
        (["--connection-lr-scale=0.5"], 0.5),
    ):
        parsed = recipe_from_options(command.parse_args(given, defaults=False), ["prenorm"])
        assert parsed.settings(parsed.arms[0]).optimization.connection_lr_scale == scale


def test_every_arm_starts_from_one_body():
    settings = Settings.from_options(**TINY)
    plain = build_model(settings, "prenorm", 256, 3).state_dict()
    for arm in crosslayer.available():
        state = build_model(settings, arm, 256, 3).state_dict()
        assert all(torch.equal(state[k], v) for k, v in plain.items())
    assert not torch.equal(
        build_model(settings, "prenorm", 256, 4).state_dict()["lm_head.weight"],
        plain["lm_head.weight"],
    )


def test_a_run_repeats_bitwise(tiny):
    first, again = (trained(tiny, "mudd", 1).curve for _ in range(2))
    assert first == again


def test_parameters_are_counted_against_the_body(tiny):
    plain, mudd = (trained(tiny, arm, 0) for arm in ("prenorm", "mudd"))
    assert (
        mudd.parameters - mudd.extra_parameters == plain.parameters and plain.extra_parameters == 0
    )
    assert mudd.extra_parameters == sum(
        p.numel()
        for m in build_model(Settings.from_options(**tiny), "mudd", 256, 0).modules()
        if isinstance(m, Connection)
        for p in m.parameters()
    )


def test_activation_bytes_are_those_saved_for_backward():
    lone = torch.nn.Linear(8, 8, bias=False)

    class Body(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lone = lone

        def forward(self, input_ids, use_cache):
            x = torch.nn.functional.one_hot(input_ids, 8).float()
            return type("Out", (), {"logits": self.lone(x)})

    # one_hot's float input [2 4 8] for the Linear; log-softmax's output; the targets and a scalar
    # of the loss
    found = activation_bytes(Body(), torch.randint(8, (2, 5)))
    assert 2 * 4 * 8 * 4 * 2 <= found <= 2 * 4 * 8 * 4 * 2 + 2 * 5 * 8 + 64


def test_nothing_is_left_of_a_run(tiny):
    def tensors():
        gc.collect()
        # by type: lazy objects warn when they are asked for their class
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    trained(tiny, "mudd", 0)
    before = tensors()
    trained(tiny, "mudd", 0)
    assert tensors() <= before


def test_a_comparison_keeps_numbers_alone(tiny, tmp_path, monkeypatch):
    models = []

    def remember(*arguments):
        model = build_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("crosslayer.train.run.build_model", remember)
    tiny |= {"steps": 1, "evals": 1, "layers": 1}
    comparison = prepare_comparison(recipe(tiny, "prenorm", "mgr", "mudd"), 1, tmp_path / "out")
    alive = []
    run_comparison(
        comparison, lambda *_: alive.append(sum(model() is not None for model in models))
    )
    assert alive == [1, 1, 1] and len(models) == 3


@pytest.mark.slow
def test_runs_of_other_code_are_named(tiny, tmp_path, monkeypatch, capsys):
    """A method is changed while it is developed: old runs must not pass for those of today."""
    command = ["compare", *(f"--{name}={value}" for name, value in tiny.items()), "--seeds=1"]
    command = [word.replace("_", "-", 1) if "eval_" in word else word for word in command]
    command += ["--arms", "prenorm", "hyper", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "other code" not in capsys.readouterr().out

    def changed(method):
        return "changed" if method.name == "hyper" else code_digest(method)

    monkeypatch.setattr("crosslayer.train.report_notes.code_digest", changed)
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "All runs had ended already; nothing is trained." in printed
    assert "hyper: 1 of 1 runs were made with other code of hyper; another --out" in printed
    assert "prenorm: 1 of 1" not in printed


def test_two_comparisons_in_one_folder_lose_no_result(tiny, tmp_path):
    """Both read the empty folder before either holds it."""
    tiny |= {"steps": 1, "evals": 1, "layers": 1}
    out = tmp_path / "out"
    first, second = (
        prepare_comparison(recipe(tiny, arm), 1, out) for arm in ("prenorm", "skip_gain")
    )
    run_comparison(first, lambda *_: None)
    left = run_folder(first, "prenorm", 0) / "step-00000001"  # its removal was killed
    left.mkdir()
    run_comparison(second, lambda *_: None)
    rows = json.loads((out / "results.json").read_text())["runs"]
    assert [row["arm"] for row in rows] == ["prenorm", "skip_gain"] and not left.exists()


def test_a_comparison_goes_on_where_its_data_have_been_moved(tiny, tmp_path):
    tiny |= {"steps": 1, "evals": 1, "layers": 1}
    out, moved = tmp_path / "out", tmp_path / "moved.txt"
    run_comparison(prepare_comparison(recipe(tiny, "prenorm"), 1, out), lambda *_: None)
    moved.write_bytes(Path(tiny["data"]).read_bytes())
    tiny["data"] = str(moved)
    assert not prepare_comparison(recipe(tiny, "prenorm"), 1, out).missing_runs()
    moved.write_text(moved.read_text() + "one line more\n")
    with pytest.raises(ValueError, match="another comparison, with bytes to train on"):
        prepare_comparison(recipe(tiny, "prenorm"), 1, out)


def test_kernels_without_a_gpu_are_not_named(monkeypatch):
    monkeypatch.setattr("crosslayer.ops.dispatch.kernel_devices", ("cuda",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert describe_environment()["operations"] == "PyTorch operations"


def test_the_report_names_the_machines_of_its_runs(tiny, tmp_path):
    tiny |= {"steps": 1, "evals": 1, "layers": 1}
    out, path = tmp_path / "out", tmp_path / "out" / "results.json"
    run_comparison(prepare_comparison(recipe(tiny, "prenorm"), 1, out), lambda *_: None)
    content = json.loads(path.read_text())
    here = content["environment"]["device"]
    content["environment"] |= {"device": "a GPU", "operations": "fused kernels"}
    path.write_text(json.dumps(content))

    def setup_notes(*arms):
        comparison = prepare_comparison(recipe(tiny, *arms), 1, out)
        run_comparison(comparison, lambda *_: None)
        return " ".join(report_notes(comparison))

    finished = setup_notes("prenorm")
    assert "Measured on a GPU;" in finished and "prenorm's, with fused kernels." in finished
    for _ in range(2):
        more = setup_notes("prenorm", "skip_gain")
        assert f"Measured on a GPU and {here};" in more
        assert "with fused kernels and PyTorch operations." in more


def test_a_comparison_killed_before_its_first_result(tiny, tmp_path):
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    for name in (".lock", "results.json.part"):
        (out / name).touch()
    assert prepare_comparison(recipe(tiny, "prenorm"), 1, out).missing_runs()


def test_weight_decay_and_rate_of_connections():
    settings = Settings.from_options(**TINY, connection_lr_scale=0.5)
    model = build_model(settings, "hyper", 256, 0)
    (adamw,) = build_optimizers(model, settings.optimization)
    decay = {p: g["weight_decay"] for g in adamw.param_groups for p in g["params"]}
    share = {p: g["lr"] / settings.optimization.lr for g in adamw.param_groups for p in g["params"]}
    for module in model.modules():
        if isinstance(module, Connection):
            for name, p in module.named_parameters(recurse=False):
                assert decay[p] == (0.1 if name in ("dynamic_alpha_fn", "dynamic_beta_fn") else 0.0)
                assert share[p] == 0.5
    assert share[model.lm_head.weight] == 1
    assert decay[model.lm_head.weight] == 0.1 and decay[model.model.norm.weight] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 2.5}, "a whole number of steps, got 2.5"),
        ({"warmup": 2000}, "warmup has 2000 steps, more than the run's 160"),
        ({"floor": 3.0}, "floor must be at most 1"),
        ({"momentum": 2.0}, "momentum must be at most 1"),
    ],
)
def test_optimization_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizationSettings(**options)


def test_a_mistyped_arm_with_a_space_is_found(tmp_path):
    """The word is split at the space, and compared as a whole."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text("arms:\n- prenorm\n- {name: slow MUDD, connection: mudd}\n")
    given = compare_command.parser().parse_args([str(recipe), "--arms", "slw MUDD"], defaults=False)
    with pytest.raises(ValueError, match=r"unknown connection 'slw'.* \(did you mean 'slow MUDD'"):
        recipe_from_options(given, [])


def test_schedule():
    tenth = OptimizationSettings(steps=100, warmup=0.1)
    rates = [lr_schedule(step, tenth) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert warmup_steps(OptimizationSettings(steps=100, warmup=0.29)) == 29
    assert warmup_steps(OptimizationSettings(steps=100, warmup=1)) == 1, "a step, not all"
    linear = OptimizationSettings(steps=100, warmup=20, decay="linear")
    assert [lr_schedule(step, linear) for step in (20, 60)] == pytest.approx([1, 0.55])
    constant = OptimizationSettings(steps=100, warmup=20, floor=1.0)
    assert [lr_schedule(step, constant) for step in (0, 9, 19, 20, 99)] == pytest.approx(
        [0.05, 0.5, 1, 1, 1]
    )
    stable = OptimizationSettings(steps=100, warmup=20, decay="linear", decay_ratio=0.2, floor=0.0)
    assert [lr_schedule(step, stable) for step in (19, 20, 80, 90)] == pytest.approx([1, 1, 1, 0.5])
    assert lr_schedule(99, OptimizationSettings(steps=100, decay_ratio=0.0)) == 1
    # a decay that would begin before the warm-up has ended begins after it
    late = OptimizationSettings(steps=100, warmup=50, decay="linear", decay_ratio=0.8, floor=0.0)
    assert [lr_schedule(step, late) for step in (49, 50, 75)] == pytest.approx([1, 1, 0.5])


def test_muon_takes_the_layers_matrices_alone():
    settings = Settings.from_options(**TINY, optimizer="muon", muon_lr=0.5, family="gpt2")
    model = build_model(settings, "mudd", 256, 0)
    muon, adamw = build_optimizers(model, settings.optimization)
    names = {p: name for name, p in model.named_parameters()}
    taken = {names[p] for group in muon.param_groups for p in group["params"]}
    assert taken == {n for n in names.values() if "c_" in n and n.endswith("weight")}
    assert {names[p] for group in adamw.param_groups for p in group["params"]} == set(
        names.values()
    ) - taken
    (group,) = muon.param_groups
    optimization = settings.optimization
    assert (group["lr"], group["weight_decay"]) == (0.5, optimization.weight_decay)
    assert group["momentum"] == optimization.momentum


def test_stopped_and_started_again(tiny, tmp_path):
    comparison = prepare_comparison(recipe(tiny, "prenorm", "skip_gain"), 1, tmp_path / "out")

    def stop(arm, seed, progress):
        if arm.name == "skip_gain" and progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_comparison(comparison, stop)
    assert [row.arm for row in result_table(comparison)] == ["prenorm"]
    again, seen = (
        prepare_comparison(recipe(tiny, "prenorm", "skip_gain"), 1, tmp_path / "out"),
        set(),
    )
    run_comparison(again, lambda arm, seed, progress: seen.add(arm.name))
    assert seen == {"skip_gain"} and [row.arm for row in result_table(again)] == [
        "prenorm",
        "skip_gain",
    ]


@pytest.mark.slow
def test_control_c(text_file, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "crosslayer",
        *options(text_file),
        "--steps=150",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [*command, "--arms", "prenorm", "mudd"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.time() + 120
    while not (out / "results.json").exists() and time.time() < until:
        time.sleep(0.01)
    assert (out / "results.json").exists()
    process.send_signal(signal.SIGINT)
    printed, errors = (stream.decode() for stream in process.communicate(timeout=60))
    assert process.returncode == 130 and "Traceback" not in errors
    assert (
        "Stopped with 1 finished run." in printed and "prenorm" in (out / "report.md").read_text()
    )
    assert "Not finished: mudd" in (out / "report.md").read_text()
    done = subprocess.run([*command, "--arms", "prenorm", "mudd"], capture_output=True, text=True)
    assert done.returncode == 0 and "mudd" in (out / "report.md").read_text()
    assert "Not finished" not in (out / "report.md").read_text()


def test_a_diverged_arm_is_a_result(tiny, tmp_path):
    tiny |= {"lr": 1e30, "steps": 40}
    comparison = prepare_comparison(recipe(tiny, "prenorm"), 1, tmp_path / "out")
    run_comparison(comparison, lambda arm, seed, progress: None)
    assert comparison.results.diverged[0].arm == "prenorm"
    assert not comparison.missing_runs()


def test_notes_name_diverged_runs_of_the_seeds_that_are_compared(tiny, tmp_path):
    """The folder may have those of more seeds and of other arms, from another command."""
    compared = prepare_comparison(recipe(tiny, "prenorm", "mudd"), 2, tmp_path / "out")
    for name, seed in (("prenorm", 1), ("prenorm", 2), ("hyper", 0)):
        compared.results.diverged.append(DivergedRun(name, seed, 7, "9.5"))
    compared.results.diverged.append(DivergedRun("mudd", 0, 8, "9.5", "a gradient is NaN"))
    found = [note for note in run_notes(compared) if "diverged" in note]
    assert found == [
        "prenorm, seed 1: diverged at step 7: the loss is 9.5.",
        "mudd, seed 0: diverged at step 8: a gradient is NaN.",
    ]


def test_the_verdict_says_which_arms_have_seeds_that_diverged(tiny, tmp_path):
    """Its interval is of the other seeds, so the arm may be called better for those alone."""
    compared = prepare_comparison(recipe(tiny, "prenorm", "mudd", "hyper"), 3, tmp_path / "out")
    for arm, gain in zip(compared.arms, (0.0, 0.1, 0.1), strict=True):
        for seed in (0, 1, 2):
            if (arm.name, seed) != ("mudd", 1):
                loss = 2.0 + seed - gain - 0.001 * gain * seed
                compared.results.runs.append(run_with_loss(arm, seed, loss))
    for name, seed in (("mudd", 1), ("hyper", 3)):
        compared.results.diverged.append(DivergedRun(name, seed, 7, "9.5"))
    (verdict,) = [note for note in report_notes(compared) if note.startswith("Against prenorm")]
    assert "better: mudd (1 of 3 seeds diverged), hyper." in verdict


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--arms", "mud"], "unknown connection 'mud' (did you mean 'mudd'?)"),
        (
            ["--arms", "mudd(dilatation=2)"],
            "unknown option 'dilatation' of 'mudd' (did you mean 'dilation'?)",
        ),
        (
            ["--arms", "mgr(streams=9)", "mgr(streams=4, gate='x')"],
            "gate must be one of 'competitive', 'independent', got 'x'",
        ),
        (["--arms", "mgr(streams=3)", "mudd("], "cannot read the connection 'mudd('"),
        (["--step=3"], "unknown option --step (did you mean '--steps'?)"),
        (["--save_every=3"], "unknown option --save_every (did you mean '--save-every'?)"),
        (["--floor=0.3"], "floor has no option on the command line; set it in a recipe file"),
        (["--steps=many"], "--steps must be a whole number, got 'many'"),
        (["--steps=0"], "steps must be a whole number of at least 1, got 0"),
        (["--seeds=0"], "seeds must be a whole number of at least 1, got 0"),
        (["--dim=17"], "dim must be a multiple of twice the heads, got dim 17 and 2 heads"),
        (["--family=albert"], "unknown family 'albert'"),
        (["--family=roberta"], "roberta counts positions from a padding token"),
        (["--data=/nowhere/at/all"], "/nowhere/at/all: no such file or folder"),
        (["--context=100000"], "fewer than the 100000 + 1 of one window"),
    ],
)
def test_bad_input_is_one_line(text_file, tmp_path, extra, message, capsys):
    out = tmp_path / "out"
    assert main([*options(text_file), "--out", str(out), *extra]) == 1
    printed = capsys.readouterr()
    assert (
        message in printed.err
        and printed.err.count("\n") == 1
        and "Traceback" not in printed.err
        and not printed.out
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("betas: [0.9, 1.5]", "the arm 'b': Invalid beta parameter at index 1: 1.5"),
        ("accumulate: 3", "'b': batch must be a multiple of ranks × accumulate, got 2 for 1 × 3"),
        ("ema: 0.9, precision: bf16-true", "the arm 'b': ema needs float32 weights"),
    ],
)
def test_an_arm_that_cannot_be_trained_says_so_first(text_file, tmp_path, capsys, option, message):
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(f"arms: [prenorm, {{name: b, connection: mudd, {option}}}]")
    assert main(["compare", str(recipe), *options(text_file)[1:], "--out", str(out)]) == 1
    assert message in capsys.readouterr().err and not out.exists()


def test_an_arm_whose_batch_the_ranks_cannot_share_says_so_first(text_file, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    arms = ["prenorm", {"name": "b", "connection": "mudd", "accumulate": 2}]
    with pytest.raises(ValueError, match=r"'b': batch must be .* × accumulate, got 2 for 2 × 2"):
        prepare_comparison(recipe({**TINY, "data": text_file}, *arms), 1, tmp_path / "out")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but the environment lacks RANK, "),
        ({"LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE is 1, expected a multiple of LOCAL_WORLD_SIZE, 2;"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number of processes, got 'two'"),
    ],
)
def test_a_part_of_what_torchrun_sets_is_an_error(sizes, message, monkeypatch):
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        launched_ranks()


def test_what_an_arm_may_change_later(text_file, tmp_path):
    """How it is executed, and everything while it has no run."""

    def prepare(**arm):
        arms = [Arm.from_row("prenorm"), Arm.from_row({"connection": "mudd", "name": "b", **arm})]
        return prepare_comparison(Recipe(arms, TINY | {"data": text_file}), 1, tmp_path / "out")

    first = prepare(lr=1e-3, accumulate=2)
    (tmp_path / "out").mkdir()
    write_json(tmp_path / "out" / "results.json", asdict(first.results))
    prepare(lr=2e-3)
    run_comparison(first, lambda *_: None)
    prepare(lr=1e-3, accumulate=1)
    with pytest.raises(ValueError, match=r"the arm b with lr = 0.001; here it is 0.002"):
        prepare(lr=2e-3, accumulate=2)


def test_an_option_that_an_arm_lacks_is_the_recipes(tiny, tmp_path):
    """And not the library's default, here 0.006."""
    tiny |= {"lr": 1e-3, "steps": 1, "evals": 1}
    arm = {"connection": "skip_gain", "name": "m"}
    out = tmp_path / "out"
    run_comparison(prepare_comparison(recipe(tiny, "prenorm", arm), 1, out), lambda *_: None)
    assert not prepare_comparison(recipe(tiny, arm | {"lr": 1e-3}), 1, out).missing_runs()
    default = OptimizationSettings.lr
    with pytest.raises(ValueError, match=f"arm m with lr = 0.001; here it is {default:g}"):
        prepare_comparison(recipe(tiny, arm | {"lr": default}), 1, out)


def test_a_set_called_val_has_a_column_of_its_own(tiny, tmp_path):
    texts = {"first": "the quick brown fox.\n", "val": "another text, 0123456789.\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text * 400)
    valid = {name: str(tmp_path / f"{name}.txt") for name in texts}
    tiny |= {"steps": 1, "evals": 1, "valid": valid}
    comparison = prepare_comparison(recipe(tiny, "prenorm"), 1, tmp_path / "out")
    run_comparison(comparison, lambda *_: None)
    columns, (row,) = comparison_table(comparison)
    (result,) = comparison.results.runs
    shown = dict(zip(columns, row, strict=True))
    assert len(columns) == len(set(columns))
    assert shown["val loss"] == f"{result.valid['first']['loss']:.4f}"
    assert shown["val loss (set val)"] == f"{result.valid['val']['loss']:.4f}"


@pytest.mark.slow
def test_the_folder_of_another_run(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    command = [*options(text_file), "--arms", "prenorm", "--out", str(out)]
    assert main(command) == 0
    held = (out / "results.json").read_text()
    for extra, message in (
        ("--steps=7", "with steps = 6; here it is 7"),
        ("--clip=0.5", "with clip = 1.0"),
    ):
        assert main([*command, extra]) == 1
        assert message in capsys.readouterr().err
    assert (out / "results.json").read_text() == held
    (out / "results.json").write_text(held[:50])
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "results.json: not JSON" in error and "choose another --out" in error
    assert (out / "results.json").read_text() == held[:50], "nothing is lost"
    for key, value in (("arm", []), ("valid_loss", "x"), ("curve", [[]])):
        spoilt = json.loads(held)
        spoilt["runs"][0][key] = value
        (out / "results.json").write_text(json.dumps(spoilt))
        assert main(command) == 1
        assert "not a comparison's results (damaged?)" in capsys.readouterr().err
    (out / "results.json").write_text(json.dumps({**json.loads(held), "settings": []}))
    assert main(command) == 1 and "(damaged?)" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    assert main([*options(text_file), "--out", str(other)]) == 1
    assert "not empty and without results.json" in capsys.readouterr().err
    assert main([*options(text_file), "--out", text_file]) == 1
    assert "a file is in the way" in capsys.readouterr().err
    data = Path(text_file).parent
    assert main([*options(str(data)), "--out", str(data / "runs" / "first")]) == 1
    assert f"lies in the data {data}, where its files would be" in capsys.readouterr().err


def test_a_recipe(text_file, tmp_path, capsys):
    """Options of the command line come before the file's and an arm's; --arms takes names."""
    file, out = tmp_path / "small.yaml", tmp_path / "out"
    file.write_text(
        "steps: 9\nlr: 1e-3\narms:\n- prenorm\n"
        "- {name: MUDD ×2, connection: mudd(dilation=2), paper: {loss: 1.5}, lr: 2e-3}\n"
        "- {name: other body, connection: prenorm, family: gpt2, steps: 7}\n"
        "- {name: gpt2 HC, connection: hyper, family: gpt2}\n"
    )
    command = ["compare", str(file), *options(text_file)[1:], "--out", str(out)]
    assert main([*command, "--steps=2"]) == 0
    printed, results = capsys.readouterr().out, json.loads((out / "results.json").read_text())
    assert results["settings"]["steps"] == 2 and results["settings"]["lr"] == 1e-3
    assert [row["arm"] for row in results["runs"]] == [
        "prenorm",
        "MUDD ×2",
        "other body",
        "gpt2 HC",
    ]
    assert all(row["curve"][-1][0] == 2 for row in results["runs"])
    assert results["arms"]["MUDD ×2"]["options"] == {"lr": 2e-3} and "loss 1.5" in printed
    rows = {
        row.arm: row
        for row in result_table(
            prepare_comparison(load_recipe(file, data=text_file, **TINY | {"steps": 2}), 1, out)
        )
    }
    losses = {row["arm"]: row["valid_loss"] for row in results["runs"]}
    assert rows["gpt2 HC"].difference.mean == losses["gpt2 HC"] - losses["other body"], (
        "against PreNorm in the same body"
    )
    assert rows["other body"].difference is None and rows["prenorm"].difference is None
    file.write_text(file.read_text().replace("loss: 1.5", "loss: 1.6"))  # the paper's number
    assert main([*command, "--steps=2", "--arms", "MUDD ×2", "skip_gain"]) == 0
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 5
    file.write_text(file.read_text().replace("2e-3", "5e-3"))
    assert main([*command, "--steps=2"]) == 1
    error = capsys.readouterr().err
    assert "comparison, the arm MUDD ×2 with lr = 0.002; here it is 0.005" in error


def test_an_arm_with_data_of_its_own(text_file, tmp_path):
    """Its data may be moved, but not be changed."""
    own, out = tmp_path / "own.txt", tmp_path / "out"
    own.write_text("the five boxing wizards jump quickly. " * 400)

    def prepare(data):
        arms = [Arm.from_row("prenorm"), Arm("other", "prenorm", options={"data": str(data)})]
        return prepare_comparison(Recipe(arms, TINY | {"data": text_file}), 1, out)

    out.mkdir()
    first = prepare(own).results
    first.diverged.append(DivergedRun("other", 0, 7, "9.5"))
    (out / "results.json").write_text(json.dumps(asdict(first)))
    moved = own.rename(tmp_path / "moved.txt")
    prepare(moved)
    moved.write_text("the quick wizards. " * 800)
    with pytest.raises(ValueError, match="comparison, the arm other with data sha256 = "):
        prepare(moved)


def baseline_of(arms, arm, shared, overrides=None):
    return find_baseline_arms(Recipe(arms, shared, overrides=overrides or {}), arms)[arm.name]


def test_the_baseline_of_an_arm_has_its_data():
    plain, deep = Arm("prenorm", "prenorm"), Arm("deep", "mudd", options={"layers": 24})
    other = Arm("other text", "mudd", options={"tokenizer": "bpe:4096"})
    its_own = Arm("plain other text", "prenorm", options={"tokenizer": "bpe:4096", "layers": 24})
    assert baseline_of([plain, deep, other], deep, {}) is plain
    assert baseline_of([plain, deep, other], other, {}) is None
    assert baseline_of([plain, deep, other, its_own], other, {}) is its_own
    # an arm may give the value that all have, or one that the command line overrides
    same = Arm("same text", "mudd", options={"tokenizer": "bytes"})
    assert baseline_of([plain, same], same, {}) is plain
    assert baseline_of([plain, other], other, {}, {"tokenizer": "bytes"}) is plain
    longer = Arm("longer", "prenorm", options={"steps": 2000})
    mudd = Arm("mudd", "mudd", options={"steps": 2000, "reallocate": True})
    assert baseline_of([plain, longer, mudd], mudd, {}) is longer
    widths = Arm("widths", "prenorm", options={"reallocate": True, "lr": 2e-3})
    faster = Arm("faster", "mudd", options={"lr": 2e-3})
    for arms in ([widths, plain, faster], [plain, widths, faster]):
        assert baseline_of(arms, faster, {}) is plain
    same_size = Arm("as deep", "prenorm", options={"layers": 24, "steps": 2000})
    assert baseline_of([plain, longer, same_size, deep], deep, {}) is same_size
    # a pre-norm model with which no connection is compared is one of the compared
    assert baseline_of([plain, longer, same_size, deep], longer, {}) is plain
    assert baseline_of([plain, longer, same_size, deep], same_size, {}) is same_size
    assert baseline_of([plain, its_own], its_own, {}) is its_own
    # an option that an arm gives may be that of all
    as_long = Arm("as long", "prenorm", options={"steps": 100})
    mudd = Arm("mudd", "mudd")
    assert baseline_of([longer, as_long, mudd], mudd, {"steps": 100}) is as_long


def test_arms_that_differ_in_options(text_file, tmp_path):
    """The report says in which options, and claims for all arms only what holds for all."""
    shared = {**TINY, "data": text_file, "lr": 6e-3}
    slow = {"name": "slow", "connection": "mudd", "lr": 1e-4}
    deep = {"name": "deep long", "connection": "hyper", "layers": 4, "steps": 8}
    arms = ["prenorm", slow, deep, {"name": "as deep", "connection": "prenorm", "layers": 4}]
    comparison = prepare_comparison(recipe(shared, *arms), 2, tmp_path / "out")
    for arm in comparison.arms:
        for seed in (0, 1)[: 1 if arm.name == "slow" else 2]:
            run = run_with_loss(arm, seed, 2.0 + seed)
            comparison.results.runs.append(run)
    notes = " ".join(report_notes(comparison))
    for text in (
        "2 to 4 layers, width 16, 2 heads; 6 to 8 steps of 2 × 32 bytes, AdamW at 0.0001 to 0.006,",
        "Mean ± standard deviation over 2 seeds, 1 for slow.",
        "Arms with the same steps see the same batches in the same order.",
        "Arms with the same layers start from the same backbone weights.",
        "beyond 384 to 512 bytes and 9 parameters; each arm at its best learning rate instead of",
        "options too: layers 2 (prenorm, slow), 4 (deep long, as deep); steps 6 (",
        "lr 0.006 (prenorm, deep long, as deep), 0.0001 (slow).",
        "Compared with as deep in place of prenorm: deep long.",
        "Against prenorm, by 95 % intervals over seeds, each arm at its given rate: ",
    ):
        assert text in notes, text


def test_the_setup_names_the_rate_of_each_optimizer_and_the_tokens_of_the_entropy(
    text_file, tmp_path
):
    shared = {**TINY, "data": text_file, "optimizer": "muon", "lr": 6e-3, "muon_lr": 0.02}
    shared["tokenizer"] = "bpe:300"
    comparison = prepare_comparison(recipe(shared, "prenorm"), 1, tmp_path / "out")
    setup, data, *_ = report_notes(comparison)
    assert "Muon at 0.02 and AdamW at 0.006, precision" in setup
    assert "the frequencies of single tokens of the first validation set give" in data
    entropy = comparison.results.entropy
    (windows,) = comparison.examples["prenorm"].valid.values()
    ids = windows.tokens.all_ids().tolist()
    nats = -sum(count * math.log(count / len(ids)) for count in Counter(ids).values())
    assert entropy == pytest.approx(nats / math.log(2) / windows.tokens.text_bytes)
    for bits, is_said in ((entropy - 0.1, False), (entropy + 0.1, True)):
        run = replace(run_with_loss(comparison.arms[0], 0, 1.0), metrics={"bits/byte": bits})
        comparison.results.runs = [run]
        _, data, *_ = report_notes(comparison)
        assert ("less than every run: train longer before you compare" in data) == is_said


def test_the_report_names_other_rates_of_connections_and_embeddings(text_file, tmp_path):
    shared = {**TINY, "data": text_file, "lr": 6e-3}
    slow = {"name": "slow", "connection": "mudd", "connection_lr_scale": 0.1}
    question = "the connections' own parameters at a lower learning rate than the others"
    for arms, options, rates, is_open in (
        (["prenorm"], {}, "AdamW at 0.006, precision", False),
        (["prenorm", "mudd"], {}, "AdamW at 0.006, precision", True),
        (["mudd", slow], {}, ", the connections' parameters at 0.1 to 1 times this rate,", False),
        (["mudd"], {"embedding_lr_scale": 50.0}, ", embeddings at 50 times this rate,", True),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        comparison = prepare_comparison(recipe({**shared, **options}, *arms), 1, folder)
        for arm in comparison.arms:
            run = run_with_loss(arm, 0, 2.0)
            run = replace(run, extra_parameters=int(arm.connection != "prenorm"))
            comparison.results.runs.append(run)
        notes = report_notes(comparison)
        assert rates in notes[0]
        assert (question in " ".join(notes)) == is_open


def test_the_table_compares_an_arm_with_the_baseline(tiny, tmp_path):
    comparison = prepare_comparison(recipe(tiny, "prenorm", "mudd"), 1, tmp_path / "out")
    plain, mudd = (run_with_loss(arm, 0, 2.0) for arm in comparison.arms)
    plain = replace(plain, tokens_per_second=2.0, activation_bytes=3)
    mudd = replace(mudd, tokens_per_second=1.0, activation_bytes=6)
    comparison.results.runs += [plain, replace(mudd, parameters=10, extra_parameters=2)]
    row = result_table(comparison)[1]
    assert (row.speed, row.relative_speed, row.relative_activations) == (1, 0.5, 2)
    assert row.extra == 2 / 8


def test_the_table_has_means_over_seeds(tiny, tmp_path):
    """Ratios and differences are those of each seed, in whatever order the runs have ended."""
    comparison = prepare_comparison(recipe(tiny, "prenorm", "mudd"), 2, tmp_path / "out")
    plain, mudd = comparison.arms
    for arm, seed, loss, speed in (
        (plain, 1, 3.0, 4.0),
        (plain, 0, 2.0, 1.0),
        (mudd, 0, 1.0, 0.5),
        (mudd, 1, 2.5, 1.0),
    ):
        run = replace(run_with_loss(arm, seed, loss), tokens_per_second=speed)
        metrics = {"accuracy": loss} | ({"of one seed": 1.0} if seed == 0 else {})
        run = replace(run, activation_bytes=int(8 / speed), metrics=metrics)
        comparison.results.runs.append(run)
    row = result_table(comparison)[1]
    assert row.loss == row.metrics["accuracy"] == mean_and_std([1.0, 2.5])
    assert list(row.metrics) == ["accuracy"]
    assert row.difference == mean_interval([-1.0, -0.5])
    assert (row.speed, row.relative_speed) == (0.75, (0.5 + 0.25) / 2)
    assert row.relative_activations == (2 + 4) / 2


def test_the_report_says_which_arms_are_better(tiny, tmp_path):
    """And how large what was compared is: backbones of 9 parameters, without the connections'."""
    losses = {
        "prenorm": (2.0, 3.0),
        "mudd": (1.0, 2.01),
        "hyper": (3.0, 4.01),
        "mgr": (1.0, 4.0),
    }
    comparison = prepare_comparison(recipe(tiny, *losses), 2, tmp_path / "out")
    for arm in comparison.arms:
        for seed, loss in enumerate(losses[arm.name]):
            comparison.results.runs.append(run_with_loss(arm, seed, loss))
    first, *_, last = scope_notes(comparison)
    verdicts = (
        "better: mudd; worse: hyper; no significant difference: mgr. By chance, about 0.15 of"
    )
    assert verdicts in last and " and 9 parameters" in first
    few = {name: replace(of_arm, train=range(3)) for name, of_arm in comparison.examples.items()}
    notes = report_notes(replace(comparison, examples=few))
    # 6 steps of 2 examples
    assert any("; each run saw them 4.0 times." in note for note in notes)


def test_activations_of_other_batches_have_no_ratio(tiny, tmp_path):
    longer = {"name": "longer", "connection": "mudd", "context": 64}
    comparison = prepare_comparison(recipe(tiny, "prenorm", longer), 1, tmp_path / "out")
    for arm in comparison.arms:
        comparison.results.runs.append(run_with_loss(arm, 0, 2.0))
    row = result_table(comparison)[1]
    assert row.relative_activations is None and row.relative_speed == 1


def test_the_options_of_an_arm_are_those_that_it_is_trained_with(tiny, tmp_path):
    """A small scale has fewer layers than the recipe, and an override holds for every arm."""
    deeper = {"name": "deeper", "connection": "prenorm", "layers": 24, "dim": 64}
    rows = [Arm.from_row("prenorm"), Arm.from_row(deeper)]
    full = Recipe(rows, {**tiny, "layers": 12})
    small = Recipe(rows, {**tiny, "layers": 12}, "tiny")
    wider = Recipe(rows, {**tiny, "layers": 12}, overrides={"dim": 32})
    for number, each in enumerate((full, small, wider)):
        results = prepare_comparison(each, 1, tmp_path / str(number)).results
        used = each.settings(each.arms[1]).model
        options = results.arms["deeper"]["options"]
        assert (options["layers"], options["dim"]) == (used.layers, used.dim)
    assert small.settings(rows[1]).model.layers < 24


def test_speeds_of_runs_executed_otherwise_have_no_ratio(tiny, tmp_path):
    """The options may change where a comparison is continued, but for those of an arm itself."""
    folder = tmp_path / "out"
    run_comparison(prepare_comparison(recipe(tiny, "prenorm"), 1, folder), lambda *_: None)
    saving = {"name": "saving", "connection": "hyper", "accumulate": 2}
    layers = {**tiny, "recompute": "layers"}
    comparison = prepare_comparison(recipe(layers, "prenorm", saving), 1, folder)
    run_comparison(comparison, lambda *_: None)
    plain, hyper = result_table(comparison)
    assert plain.relative_speed == 1 and hyper.relative_speed is hyper.relative_activations is None
    assert hyper.difference is not None
    (note,) = [note for note in report_notes(comparison) if "Without a ratio" in note]
    assert ": saving. Their" in note and note.endswith("made with different recompute.")
    (run,) = [run for run in comparison.results.runs if run.arm == "prenorm"]
    run.execution["recompute"] = "layers"
    assert result_table(comparison)[1].relative_activations > 0
    for name in ("processes", "device", "operations"):
        held = run.execution[name]
        run.execution[name] = "other"
        assert result_table(comparison)[1].relative_activations is None
        run.execution[name] = held


def test_an_arm_that_cannot_be_trained_is_named_before_any_is_trained(tiny, tmp_path):
    small = {"name": "small", "connection": "mudd", "vocab": 100}
    with pytest.raises(ValueError, match="the arm 'small': vocab must be at least 256"):
        prepare_comparison(recipe(tiny, "prenorm", small), 1, tmp_path / "out")
    inverted = {**tiny, "recompute": "inversion"}
    with pytest.raises(ValueError, match=r"the arm 'mudd': .*is not supported by mudd"):
        prepare_comparison(recipe(inverted, "mgr", "mudd"), 1, tmp_path / "out")
    long = {"name": "long", "connection": "mudd", "context": 10**6}
    with pytest.raises(ValueError, match=r"the arm 'long': .*fewer than the 1000000 \+ 1"):
        prepare_comparison(recipe(tiny, "prenorm", long), 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_differences_during_training_are_paired(tiny, tmp_path):
    """By seed and by step, where all runs of both arms have been evaluated."""
    comparison = prepare_comparison(recipe(tiny, "prenorm", "mudd"), 3, tmp_path / "out")
    plain, mudd = comparison.arms
    curves = [
        (plain, 0, [[4, 30.0], [8, 3.0], [16, 2.0], [24, 1.9]]),
        (plain, 1, [[4, 30.0], [8, 5.0], [16, 4.0], [20, 3.5], [24, 3.0]]),
        (mudd, 0, [[4, 50.0], [8, 2.0], [16, 1.9], [20, 1.7], [24, 1.6]]),
        (mudd, 1, [[4, 50.0], [8, 5.0], [16, 3.7], [20, 3.3], [24, 2.9]]),
        (mudd, 2, [[4, 9.0]]),  # pre-norm has no such seed
    ]
    comparison.results.runs = [
        replace(run_with_loss(arm, seed, curve[-1][1]), curve=curve) for arm, seed, curve in curves
    ]
    found = differences_by_step(comparison)
    assert list(found) == ["mudd"], "and not pre-norm itself"
    means = {step: round(of_step.mean, 6) for step, of_step in found["mudd"].items()}
    assert means == {4: 20.0, 8: -0.5, 16: -0.2, 24: -0.2}
    assert found["mudd"][24] == result_table(comparison)[1].difference

    axes = Figure().subplots()
    plot_differences(axes, comparison)
    zero, line = axes.lines
    assert list(zero.get_ydata()) == [0.0, 0.0]
    assert list(line.get_ydata()) == pytest.approx([20.0, -0.5, -0.2, -0.2])
    # an interval of two seeds is far wider than the differences, and step 4 is in the first quarter
    assert axes.get_ylim() == pytest.approx((-1.03, 0.53))
    comparison.results.runs = comparison.results.runs[:1]
    assert differences_by_step(comparison) == {}


def test_means_and_ranges_of_seeds_as_pictures(tiny, tmp_path):
    """An arm has one colour in all pictures, whatever their order of the arms is."""
    comparison = prepare_comparison(recipe(tiny, "prenorm", "mudd", "hyper"), 2, tmp_path / "out")
    losses = [(3.0, 2.0), (1.0, 0.0), (2.5, 1.5)]
    for arm, of_seeds, speed in zip(comparison.arms, losses, (3.0, 1.0, 2.0), strict=True):
        for seed, loss in enumerate(of_seeds):
            run = run_with_loss(arm, seed, loss)
            curve = [[2, 4.0], [8, loss]]
            comparison.results.runs.append(replace(run, curve=curve, tokens_per_second=speed))

    curves = Figure().subplots()
    plot_curves(curves, comparison)
    colours = {line.get_label(): to_hex(line.get_color()) for line in curves.lines}
    assert len(set(colours.values())) == 3
    bands = zip(curves.lines, curves.collections, losses, strict=True)
    for line, band, (high, low) in bands:
        assert line.get_xydata().tolist() == [[2, 4], [8, (low + high) / 2]]
        heights = [y for x, y in band.get_paths()[0].vertices if x == 8]
        assert (min(heights), max(heights)) == (low, high)
        assert to_hex(band.get_facecolor()[0]) == to_hex(line.get_color())

    tradeoff = Figure().subplots()
    plot_tradeoff(tradeoff, comparison)
    drawn = {}
    for container in tradeoff.containers:
        point, _, (deviation,) = container.lines
        name = container.get_label()
        assert {to_hex(point.get_color()), to_hex(deviation.get_color()[0])} == {colours[name]}
        drawn[name] = [*point.get_xydata()[0], *deviation.get_segments()[0][:, 1]]
    spread = 0.5**0.5
    assert drawn["mudd"] == pytest.approx([1, 0.5, 0.5 - spread, 0.5 + spread])
    assert drawn["prenorm"] == pytest.approx([3, 2.5, 2.5 - spread, 2.5 + spread])

    differences = Figure().subplots()
    plot_differences(differences, comparison)
    shown = {line.get_label(): line for line in differences.lines[1:]}
    assert {name: to_hex(line.get_color()) for name, line in shown.items()} == {
        name: colours[name] for name in ("mudd", "hyper")
    }
    bottom, _ = differences.get_ylim()
    assert bottom < shown["mudd"].get_ydata()[-1] == -2, "and not the last arm's alone"


def test_many_arms_can_be_told_apart_in_the_figures(tiny, tmp_path):
    arms = [{"name": f"arm {number}", "connection": "prenorm"} for number in range(14)]
    comparison = prepare_comparison(recipe(tiny, *arms), 1, tmp_path / "out")
    comparison.results.runs = [run_with_loss(arm, 0, 2.0) for arm in comparison.arms]
    for draw in (plot_curves, plot_tradeoff):
        axes = Figure().subplots()
        draw(axes, comparison)
        styles = {(line.get_color(), line.get_marker()) for line in axes.lines}
        assert len(styles) == len(arms)
        assert not axes.texts, "no labels on top of each other"
        legend = axes.get_legend().get_window_extent()
        assert legend.x0 > axes.get_window_extent().x1


def test_names_are_shown_as_they_are(text_file, tmp_path, capsys):
    """No markup of the terminal's, no formula of the picture's."""
    names = ["a [/b] c", "[bold]x", "$\\no$"]
    file, out = tmp_path / "odd.yaml", tmp_path / "[i]out"
    file.write_text(
        json.dumps({"arms": [{"name": name, "connection": "prenorm"} for name in names]})
    )
    assert (
        main(["compare", str(file), *options(text_file)[1:], "--steps=1", "--out", str(out)]) == 0
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and f"Report: {out}" in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("extra", "slow"),
    [(["--steps=1"], True), (["--steps=48", "--warmup=48", "--embedding-lr-scale=50"], False)],
)
def test_slow_embeddings_and_a_short_warmup_are_said(text_file, tmp_path, capsys, extra, slow):
    command = [*options(text_file), "--family=llama", "--arms", "prenorm", *extra]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    gain = "whether a gain lasts where the embeddings learn faster than other weights"
    assert (gain in printed) is slow
    assert ("whether a gain lasts with a longer warm-up than 1 step (" in printed) is slow


@pytest.mark.slow
def test_seeds_judged_at_different_steps(text_file, tmp_path):
    command = [*options(text_file), "--arms", "prenorm", "--out", str(tmp_path / "out")]
    assert main([*command, "--evals=2"]) == 0
    assert main([*command, "--evals=3", "--seeds=2"]) == 0


def test_one_rank_reports(text_file, tmp_path, capsys, monkeypatch):
    command = [
        *options(text_file),
        "--arms",
        "prenorm",
        "--steps=1",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setenv("RANK", "1")
    assert main(command) == 0
    assert not capsys.readouterr().out and not (tmp_path / "out" / "report.md").exists()
    monkeypatch.setenv("RANK", "0")
    assert main(command) == 0 and (tmp_path / "out" / "report.md").exists()


@pytest.mark.slow
def test_an_arm_without_memory_does_not_stop_the_others(text_file, tmp_path, capsys, monkeypatch):
    """Its model is freed, it is tried once, and the same command tries it again."""
    out, models, tried = tmp_path / "out", [], []

    def remember(settings, arm, *others):
        assert all(model() is None for model in models), "a model is left"
        model = build_model(settings, arm, *others)
        models.append(weakref.ref(model))
        return model

    def train(settings, arm, seed, examples, task, folder, on_step):
        def report(result):
            tried.append((arm.name, seed))
            if arm.name == "hyper" and result.step == 2 and settings.engine.accumulate == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            on_step(result)

        return train_arm(settings, arm, seed, examples, task, folder, report)

    monkeypatch.setattr("crosslayer.train.run.build_model", remember)
    monkeypatch.setattr("crosslayer.train.compare.train_arm", train)
    command = [*options(text_file), "--steps=3", "--evals=1", "--layers=1", "--seeds=2"]
    command += ["--arms", "hyper", "prenorm", "--out", str(out)]
    assert main(command) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Out of memory: hyper, seed 0. No more runs of such an arm were tried." in printed
    assert tried.count(("hyper", 0)) == 2 and ("hyper", 1) not in tried
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [("prenorm", 0), ("prenorm", 1)]
    assert "Out of memory: hyper, seed 0." in (out / "report.md").read_text()
    assert main([*command, "--accumulate=2"]) == 0
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 4
    assert "Out of memory" not in (out / "report.md").read_text()


def test_every_run_diverged(text_file, tmp_path, capsys):
    command = [
        *options(text_file),
        "--arms",
        "prenorm",
        "--steps=40",
        "--lr=1e30",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "Every run diverged; nothing to report." in printed
    assert "prenorm, seed 0: diverged at step" in printed


def test_the_terminal_names_diverged_arms(text_file, tmp_path, capsys):
    file = tmp_path / "wild.yaml"
    wild = {"name": "wild", "connection": "prenorm", "lr": 1e30}
    file.write_text(json.dumps({"arms": ["prenorm", wild]}))
    command = ["compare", str(file), *options(text_file)[1:], "--out", str(tmp_path / "out")]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"wild, seed 0: diverged at step \d+: the loss is \S+", printed)


@pytest.mark.slow
@pytest.mark.alone
def test_the_default_comparison(tmp_path):
    """The command of the README, with two of its arms and half of its steps.

    All of them run at a tiny size in tests/test_readme.py.
    """
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "crosslayer", "compare", "--steps=80", "--arms", "prenorm", "mudd"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    results = json.loads((folder / "results.json").read_text())
    prenorm, mudd = results["runs"]
    assert mudd["seconds"] < 3 * prenorm["seconds"]
    bits = {row["arm"]: row["metrics"]["bits/byte"] for row in results["runs"]}
    assert list(bits) == ["prenorm", "mudd"]
    assert all(value < results["entropy"] - 0.5 for value in bits.values())
    assert abs(bits["mudd"] - bits["prenorm"]) < 0.1  # they differ by 0.03


def test_ctrl_c_has_no_traceback(monkeypatch, capsys):
    """A second one, or one before the first step."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("crosslayer.cli.main._run_command", interrupted)
    assert main(["train"]) == 130 and capsys.readouterr().err == "crosslayer: stopped\n"
