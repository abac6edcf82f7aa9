"""Run folders and the views of training: planted answers, damaged files, and one real run."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from crosslayer.cli.main import main
from crosslayer.inspect.figures_training import (
    LineSeries,
    ValueBar,
    draw_bars,
    draw_line_series,
    focus_on_end,
)
from crosslayer.inspect.report import draw_views
from crosslayer.inspect.run_groups import (
    RunGroup,
    find_baseline_group,
    group_runs,
    has_experts,
    split_by_backbone,
    split_by_data,
    split_by_series,
)
from crosslayer.inspect.runs import TrainingRun, find_compared_models, read_runs
from crosslayer.inspect.sections import SECTIONS, TRAINING_VIEWS
from crosslayer.inspect.training import TrainingCurve, loss_at_cost
from crosslayer.inspect.training_summary import (
    GroupedRuns,
    _run_compute,
    compared_set,
    mean_accuracy,
    measure_scaling,
    measure_speedups,
    smooth_runs,
    summarise_training,
)
from crosslayer.plotting import line_look, render_figure
from crosslayer.run_folders import (
    COMPARISON_RESULTS_FILE,
    METRICS_FILE,
    RUN_FILE,
    RUN_RESULT_FILE,
    RUNS_FOLDER,
    is_comparison_folder,
    is_run_folder,
    last_saved_model,
    run_folder_name,
)
from tests.inspect.planted_runs import (
    SETTINGS,
    falling_loss,
    run_result,
    write_comparison,
    write_metrics,
)

PLAIN = {"prenorm": {"connection": "prenorm"}}
FAST = {"hyper": {"connection": "hyper", "loss_of": lambda step: falling_loss(step, speed=1.8)}}
MOE = {"family": "mixtral", "model_config": {"num_local_experts": 16}}


def read_groups(*folders):
    return group_runs([run for folder in folders for run in read_runs(folder)])


def draw(groups):
    """The titles of the panels of every view that the groups can feed."""
    runs = GroupedRuns(groups)
    drawn = {view.name: view.draw_panels(runs) for view in TRAINING_VIEWS}
    return {name: [title for title, _ in panels] for name, panels in drawn.items() if panels}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Three seeds of pre-norm and of an arm that is 1.8 times as fast."""
    arms = {
        "Transformer": {"connection": "prenorm", "inference_speed": 100.0},
        "DHC×4": {
            "connection": "hyper",
            "loss_of": lambda step: falling_loss(step, speed=1.8),
            "inference_speed": 80.0,
        },
    }
    return write_comparison(tmp_path_factory.mktemp("planted") / "comparison", arms, seeds=3)


def test_a_comparison_s_runs_are_means_over_seeds(comparison):
    groups = read_groups(comparison)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("Transformer", 3),
        ("DHC×4", 3),
    ]
    plain, fast = summarise_training(GroupedRuns(groups))
    assert plain.loss == pytest.approx(falling_loss(1000) + 0.01)
    assert plain.loss_range == pytest.approx((falling_loss(1000), falling_loss(1000) + 0.02))
    assert fast.speedup == pytest.approx(1.8, abs=0.01)
    assert (plain.speedup, plain.spikes, plain.seconds) == (None, 0, 100)
    assert draw(groups).keys() == {"losses", "valid_losses", "speedups", "times", "speeds"}


def test_a_run_that_is_given_twice_is_one_seed(comparison, tmp_path):
    shutil.copytree(comparison, tmp_path / "copy")
    plain, fast = groups = read_groups(comparison, tmp_path / "copy")
    assert [run.seed for run in plain.runs] == [0, 1, 2]
    assert [run.folder.parts[-3] for run in fast.duplicates] == ["copy"] * 3
    notes = draw_views(GroupedRuns(groups), []).notes
    assert len(notes) == 6
    assert "is left out: Transformer has a run with the same seed" in notes[0]


def test_a_relative_folder_has_no_stray_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_metrics(Path(name))
        result = run_result("mudd", "mudd", 0, 2.0, settings={"data": name})
        (Path(name) / RUN_RESULT_FILE).write_text(json.dumps(result))
    assert [group.label for group in read_groups(Path("a"), Path("b"))] == [
        "mudd in a",
        "mudd in b",
    ]


def test_a_planted_spike_is_counted_in_its_run(comparison, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    metrics = next((copy / RUNS_FOLDER).glob("Transformer-1-*")) / METRICS_FILE
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        if row["step"] == 800 and "loss" in row:
            row["loss"] += 3
        if row["step"] == 30 and "loss" in row:
            row["loss"] = math.nan  # a skipped batch, before a mean is known
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = read_groups(copy)
    assert [summary.spikes for summary in summarise_training(GroupedRuns(groups))] == [2, 0]
    ((_, view),) = TRAINING_VIEWS[0].draw_panels(GroupedRuns(groups))
    assert [line.label for line in view.keywords["lines"]] == ["Transformer (2 spikes)", "DHC×4"]
    assert [round(step, 3) for step, _ in view.keywords["lines"][0].marks] == [0.03, 0.8]


def test_runs_with_different_logging_intervals_are_smoothed_alike(tmp_path):
    for every in (5, 20):
        write_metrics(tmp_path / f"every-{every}", lambda step: 5 - step / 500, every=every)
    fine, coarse = smooth_runs(read_groups(tmp_path / "every-5", tmp_path / "every-20"), 0.9)
    at = dict(fine[0])
    for step, loss in coarse[0]:
        # the mean over an interval starts earlier by at most half of it
        assert loss == pytest.approx(at[step], abs=0.04)
    naive = 10 * 5 / 500  # what 0.9 from line to line would be off by, towards the end
    assert abs(coarse[0][-1][1] - at[1000]) < 0.3 * naive


def group_of(*curves: TrainingCurve, **fields) -> RunGroup:
    return RunGroup("a", "a", [TrainingRun("a", Path("a"), curve, **fields) for curve in curves])


def test_the_weight_of_a_loss_falls_over_the_longest_interval():
    coarse = group_of(TrainingCurve([20, 40], [1.0, 3.0]))
    fine = group_of(TrainingCurve([10, 20], [1.0, 3.0]))
    means = [curves[0][-1][1] for curves in smooth_runs([coarse, fine], 0.25)]
    assert means == pytest.approx([(0.25 + 3) / 1.25, (0.5 + 3) / 1.5])


def test_a_set_is_compared_that_every_run_is_often_evaluated_on():
    often, twice = (
        TrainingCurve(valid={"held-out": [(step, 3.0) for step in range(count)]})
        for count in (5, 2)
    )
    assert compared_set([group_of(often), group_of(often)]) == "held-out"
    assert compared_set([group_of(often), group_of(twice)]) is None


def test_the_accuracy_is_that_of_the_last_evaluation():
    group = group_of(TrainingCurve(), tasks={"sciq": [(500, 0.6), (1000, 0.5)]})
    assert mean_accuracy(group, {"sciq"}) == 0.5


def test_compute_is_that_of_all_steps():
    settings = {"batch": 10, "context": 100, "steps": 2000}
    (run,) = group_of(TrainingCurve(), settings=settings, result={"parameters": 5}).runs
    assert _run_compute(run) == 6 * 5 * 10 * 100 * 2000


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    """Losses of pre-norm are 30 · C^(−0.05); MUDD's are those of 1.89 times the compute."""
    root = tmp_path_factory.mktemp("scaling")
    folders = []
    for size, layers in (
        (400_000_000, 24),
        (800_000_000, 24),
        (1_400_000_000, 24),
        (1_350_000_000, 42),
    ):

        def loss_at(factor, size=size):
            target = 30 * (factor * 6 * size * 1e6) ** -0.05
            return lambda step: target + falling_loss(step) - falling_loss(1000)

        arms = {
            "Transformer++": {"connection": "prenorm", "loss_of": loss_at(1), "parameters": size},
            "MUDDFormer": {
                "connection": "mudd" if layers == 24 else "mudd(normed=True)",
                "loss_of": loss_at(1.89),
                "parameters": size,
            },
        }
        folder = root / f"{size:g}"
        folders.append(write_comparison(folder, arms, layers=layers, dim=int(size / 1e5)))
    return folders


def test_the_planted_multiplier_is_found(scaling):
    groups = read_groups(*scaling)
    plain, mudd = measure_scaling(groups)
    assert (plain.label, mudd.label) == ("Transformer++", "MUDDFormer")
    assert plain.power_law.b == pytest.approx(0.05)
    assert plain.multiplier is None
    assert mudd.multiplier.value == pytest.approx(1.89)
    assert mudd.multiplier.high - mudd.multiplier.low < 1e-6
    drawn = draw(groups)
    assert drawn["sizes"] == ["loss and power laws", "gaps", "compute multiplier"]
    assert len(drawn["losses"]) == 1
    lines = dict(TRAINING_VIEWS[7].draw_panels(GroupedRuns(groups)))["gaps"].keywords["lines"]
    assert lines[0].y[0] == pytest.approx(
        mudd.power_law.predict(4e8) - plain.power_law.predict(4e8)
    )
    assert [one.is_main for one in (plain, mudd)] == [True, False]


def speedups_of(groups):
    return {label: one.times for label, one in measure_speedups(groups, 0.99).items()}


def test_speedups_are_of_shared_seeds_and_equal_schedules(tmp_path):
    """Pre-norm's second seed ends 0.01 above the first, with which alone MUDD is compared."""
    plain = {"prenorm": {"connection": "prenorm"}}
    slower = {"mudd": {"connection": "mudd", "loss_of": lambda step: falling_loss(step) + 0.002}}
    longer = {"hyper": {"connection": "hyper", "loss_of": lambda step: falling_loss(step) - 0.1}}
    folders = [
        write_comparison(tmp_path / "plain", plain, seeds=2),
        write_comparison(tmp_path / "slower", slower),
        write_comparison(tmp_path / "longer", longer, steps=2000),
    ]
    assert speedups_of(read_groups(*folders)) == {}


def test_the_picture_of_a_speedup_is_of_the_curves_that_give_it(tmp_path):
    """Of the seeds that both have, on the validation set, whatever a diverged run lacks."""
    plain = {"prenorm": {"connection": "prenorm"}}
    folder = write_comparison(
        tmp_path / "plain", {"lost": {"connection": "mudd"}, **plain}, seeds=3
    )
    content = json.loads((folder / "results.json").read_text())
    content["runs"] = [run for run in content["runs"] if run["arm"] != "lost"]
    content["diverged"] = [
        {"arm": "lost", "seed": seed, "step": 100, "loss": "nan"} for seed in range(3)
    ]
    (folder / "results.json").write_text(json.dumps(content))
    for file in (folder / RUNS_FOLDER).glob("lost-*/metrics.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if "held-out" not in line))
    groups = read_groups(folder, write_comparison(tmp_path / "faster", FAST))
    (speedup,) = measure_speedups(groups, 0.99).values()
    view = next(view for view in TRAINING_VIEWS if view.name == "speedups")
    (_, panel), *_ = view.draw_panels(GroupedRuns(groups))
    names = panel.keywords["axis_titles"]
    line = next(line for line in panel.keywords["lines"] if line.marks)
    assert names[1] == "loss on held-out" and f"{speedup.times:.2f}" in line.label
    ((place, level),) = line.marks
    assert panel.keywords["losses"] == [level] == [falling_loss(1000)]
    assert loss_at_cost(line.x, line.y, place) == pytest.approx(level)
    assert line.x[-1] / place == pytest.approx(speedup.times) == pytest.approx(1.8, abs=0.01)


def test_gaps_are_those_to_pre_norm_where_its_loss_does_not_fall(tmp_path):
    folders = []
    for size in (400_000_000, 800_000_000):

        def flat(step, size=size):
            return falling_loss(step) + size / 1e9

        arms = {
            "mudd": {"connection": "mudd", "parameters": size},
            "prenorm": {"connection": "prenorm", "loss_of": flat, "parameters": size},
        }
        folders.append(write_comparison(tmp_path / f"{size:g}", arms, dim=int(size / 1e5)))
    panels = dict(TRAINING_VIEWS[7].draw_panels(GroupedRuns(read_groups(*folders))))
    assert panels["gaps"].keywords["axis_titles"][1].endswith("minus that of prenorm (nats)")


def test_the_baseline_is_pre_norm_at_its_best_rate(tmp_path):
    arms = {
        "prenorm": {"connection": "prenorm"},
        "prenorm at 2 × the rate": {
            "connection": "prenorm",
            "options": {"lr": 2e-3},
            "loss_of": lambda step: falling_loss(step, speed=1.2),
        },
        "hyper": {"connection": "hyper", "loss_of": lambda step: falling_loss(step, speed=1.8)},
    }
    groups = read_groups(write_comparison(tmp_path / "search", arms))
    assert speedups_of(groups) == {"hyper": pytest.approx(1.8 / 1.2, abs=0.01)}
    # runs of equal size are points: no line says how the loss changes with size
    (_, speeds), *_ = TRAINING_VIEWS[5].draw_panels(GroupedRuns(groups))
    assert [(line.label, line.is_joined) for line in speeds.keywords["lines"]] == [
        ("prenorm", False),
        ("hyper", True),
    ]


def test_the_baseline_is_as_long_where_data_have_moved(tmp_path):
    moved = {"data": "moved.txt", "tokenizer": "moved.json", "valid": {"held-out": "moved"}}
    place = {"data": "a.txt", "tokenizer": "a.json", "valid": {"held-out": "a"}}
    folders = [
        write_comparison(
            tmp_path / "a", {"prenorm": {"connection": "prenorm"}}, digest="1a", **moved
        ),
        write_comparison(
            tmp_path / "b",
            {
                "longer": {"connection": "prenorm", "options": {"steps": 2000}},
                "mudd": {"connection": "mudd", "loss_of": lambda step: falling_loss(step, 2)},
            },
            digest="1a",
            **place,
        ),
    ]
    groups = read_groups(*folders)
    assert find_baseline_group(groups, groups[-1]).label == "prenorm"
    # as in results of a version that had fewer options
    groups[-1].first.settings["ema"] = None
    assert find_baseline_group(groups, groups[-1]).label == "prenorm"


def test_a_baseline_older_than_an_option_has_its_default(tmp_path):
    arms = {"prenorm": {"connection": "prenorm"}, "mudd": {"connection": "mudd"}}
    groups = read_groups(write_comparison(tmp_path / "a", arms, router_z_loss=0.0))
    del groups[0].first.settings["router_z_loss"]
    assert find_baseline_group(groups, groups[1]) is groups[0]
    assert [title for title, _ in split_by_backbone(groups)] == [""]


def test_the_baseline_is_no_other_kind_of_pre_norm(tmp_path):
    widths = {"connection": "prenorm", "options": {"reallocate": True, "lr": 2e-3}}
    arms = {
        "widths": {**widths, "loss_of": lambda step: falling_loss(step, speed=2)},
        "prenorm": {"connection": "prenorm"},
        "mudd": {"connection": "mudd", "options": {"reallocate": True}},
    }
    folder = write_comparison(tmp_path / "widths", arms)
    groups = read_groups(folder)
    assert [find_baseline_group(groups, group).label for group in groups] == ["prenorm"] * 3
    # a run that diverged on its way has no final loss
    content = json.loads((folder / "results.json").read_text())
    plain = next(run for run in content["runs"] if run["arm"] == "prenorm")
    content["runs"].remove(plain)
    content["diverged"] = [{"arm": "prenorm", "seed": 0, "step": 1000, "loss": "nan"}]
    (folder / "results.json").write_text(json.dumps(content))
    assert speedups_of(read_groups(folder)) == {}


def test_losses_on_different_data_are_apart(tmp_path):
    def groups_of(*options):
        folders = []
        for arm, own in zip((PLAIN, FAST), options, strict=True):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folders.append(write_comparison(folder, arm, **own))
        return read_groups(*folders)

    def parts_of(*options):
        return [title for title, _ in split_by_data(groups_of(*options))]

    groups = groups_of({"tokenizer": "bytes"}, {"tokenizer": "bpe:300"})
    report = draw_views(GroupedRuns(groups), TRAINING_VIEWS)
    titles = ["tokenizer bytes", "tokenizer bpe:300"]
    assert [summary.data for summary in report.groups] == titles
    assert [summary.speedup for summary in report.groups] == [None, None]
    assert "2 such sets of runs: tokenizer bytes; tokenizer bpe:300." in report.notes[0]
    drawn = draw(groups)
    assert drawn["losses"] == [f"training loss; {title}" for title in titles]
    assert not {"speedups", "speeds"} & drawn.keys()

    # a digest says more than a name: of one file with other content, and of two names of one file
    assert parts_of({"digest": "1a"}, {"digest": "2b"}) == ["digest 1a", "digest 2b"]
    moved = ({"data": "a.txt"}, {"data": "b/a.txt"})
    assert parts_of(*moved) == ["data a.txt", "data b/a.txt"]
    assert parts_of(*({**own, "digest": "1a"} for own in moved)) == [""]
    # the loss is that of the first validation set
    sets = ({"valid": {"a": "a", "b": "b"}}, {"valid": {"b": "b", "a": "a"}})
    assert len(parts_of(*({**own, "digest": "1a"} for own in sets))) == 2

    # an arm of a comparison may have data of its own
    own = {"options": {"tokenizer": "bpe:300"}, "own_digest": "2b"}
    arms = {"plain": {"connection": "prenorm"}, "other text": {"connection": "prenorm", **own}}
    groups = read_groups(write_comparison(tmp_path / "arms", arms, digest="1a", tokenizer="bytes"))
    assert [title for title, _ in split_by_data(groups)] == titles

    other_heads = groups_of({}, {"heads": 8})
    assert summarise_training(GroupedRuns(other_heads))[1].speedup is None


def test_experts_options_and_tasks_have_views(tmp_path):
    arms = {
        "dense": {"connection": "prenorm"},
        "dense MUDD": {"connection": "mudd", "loss_of": lambda step: falling_loss(step) - 0.0596},
        "MoE": {"connection": "prenorm", "options": MOE},
        "4×1": {"connection": "denseformer(dilation=4)"},
        "4×5": {"connection": "denseformer(dilation=4, period=5)"},
        "1×1": {"connection": "denseformer"},
        "last": {"connection": "denseformer(period='last')"},  # no number
    }
    folder = write_comparison(tmp_path / "many", arms)
    for run in (folder / RUNS_FOLDER).iterdir():
        for step in (500, 1000):
            results = run / "eval" / f"step-{step}" / "evaluation.json"
            results.parent.mkdir(parents=True)
            accuracy = {"sciq": {"acc,none": step / 2000, "acc_stderr,none": 0.1}}
            content = {"model": "a/model", "tasks": {"results": accuracy}}
            results.write_text(json.dumps(content))
    groups = read_groups(folder)
    assert groups[0].first.tasks == {"sciq": [(500, 0.25), (1000, 0.5)]}
    drawn = draw(groups)
    assert drawn["task_curves"] == ["sciq"]
    assert drawn["options"] == [
        f"{measure} and {option}"
        for option in ("dilation", "period")
        for measure in ("validation perplexity", "training speed")
    ]
    assert {"experts", "task_sizes"} <= drawn.keys()
    (_, bars), *_ = TRAINING_VIEWS[9].draw_panels(GroupedRuns(groups))
    assert bars.keywords["bars"][1].label == "dense MUDD\ndense, ΔL -0.0596"


def test_a_run_without_a_result_is_no_size(tmp_path):
    """Of four runs of one method in two sizes, the one that has evaluated tasks is not finished."""
    arms = {}
    for layers in (12, 24):
        options = {"connection": "mudd", "parameters": layers * 10**6}
        arms[f"{layers} layers"] = options | {"options": {"layers": layers}}
    folder = write_comparison(tmp_path / "sizes", arms, seeds=2)
    results = json.loads((folder / COMPARISON_RESULTS_FILE).read_text())
    left = results["runs"].pop(1)
    assert (left["arm"], left["seed"]) == ("12 layers", 1)
    (folder / COMPARISON_RESULTS_FILE).write_text(json.dumps(results))
    accuracy = {"model": "a/model", "tasks": {"results": {"sciq": {"acc,none": 0.5}}}}
    for run in (folder / RUNS_FOLDER).iterdir():
        (run / "eval" / "step-500").mkdir(parents=True)
        (run / "eval" / "step-500" / "evaluation.json").write_text(json.dumps(accuracy))
    groups = read_groups(folder)
    assert [group.first.status for group in groups] == ["", "not finished", ""]
    assert not groups[1].first.result
    assert list(split_by_series(groups)) == ["mudd"]
    (series,) = measure_scaling(groups)
    assert series.power_law is not None
    (view,) = [view for view in TRAINING_VIEWS if view.name == "task_sizes"]
    ((_, drawn),) = view.draw_panels(GroupedRuns(groups))
    (line,) = drawn.keywords["lines"]
    assert line.x == [12e6, 24e6]


def test_long_names_stay_within_the_figure(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    arms = {
        f"arm {number} at another learning rate than {number}e-3": {
            "connection": "hyper" if number else "prenorm",
            "loss_of": lambda step, number=number: falling_loss(step, speed=1 + 0.1 * number),
        }
        for number in range(9)
    }
    runs = GroupedRuns(read_groups(write_comparison(tmp_path / "many", arms)))
    for view in TRAINING_VIEWS:
        panels = view.draw_panels(runs)
        if panels:
            render_figure(panels)
            box, (width, height) = drawn[-1].get_tightbbox(), drawn[-1].get_size_inches()
            assert min(box.x0, box.y0) >= 0, view.name
            assert box.x1 <= width, view.name
            assert box.y1 <= height, view.name
    assert len(drawn) == 5


def test_points_and_their_notes_can_be_told_apart():
    axes = Figure().subplots()
    lines = [
        LineSeries(str(number), number, [1, 2], [3, 3], notes=["12", "24"], is_marked=True)
        for number in range(8)
    ]
    draw_line_series(axes, lines, ("x", "y"))
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
    assert len(set(looks)) == 8
    places = [(note.xy, tuple(note.get_position())) for note in axes.texts[:12]]
    assert len(set(places)) == 12


def ends_at(shape: Any, place: float) -> list[float]:
    """Where a band ends at a place of the horizontal axis."""
    heights = [y for x, y in shape.get_paths()[0].vertices if x == place]
    return [min(heights), max(heights)]


def test_ranges_notes_and_marks_of_lines():
    axes = Figure().subplots()
    low, high = [2.0, 0.5], [6.0, 1.5]
    lines = [
        LineSeries("band", 1, [1, 2], [3.0, 1.0], low, high, marks=[(2, 1.0)]),
        LineSeries("bars", 2, [1, 2], [3.0, 1.0], low, high, ["", "note"], is_marked=True),
    ]
    draw_line_series(axes, lines, ("x", "y"))
    (band,) = [shape for shape in axes.collections if not isinstance(shape, LineCollection)]
    assert [ends_at(band, place) for place in (1, 2)] == [[2, 6], [0.5, 1.5]]
    (bars,) = [shape for shape in axes.collections if isinstance(shape, LineCollection)]
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [[2, 6], [0.5, 1.5]]
    colours = [line_look(number)["color"] for number in (1, 2)]
    assert [to_hex(shape.get_edgecolor()[0]).upper() for shape in (band, bars)] == colours
    (mark,) = [line for line in axes.lines if line.get_marker() == "v"]
    assert mark.get_xydata().tolist() == [[2, 1]] and mark.get_color() == colours[0]
    (note,) = axes.texts
    assert (note.get_text(), note.xy, note.get_color()) == ("note", (2, 1.0), colours[1])


def test_bars_end_at_their_values():
    """Also where they start at another value than zero."""
    axes = Figure().subplots()
    bars = [ValueBar("known", 1, 1.5, 1.2, 1.6), ValueBar("alone", 0, 0.5)]
    draw_bars(axes, bars, "x", ".1f", start=1.0)
    ends = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in axes.patches]
    assert ends == [[1, 1.5], [0.5, 1]]
    for bar, number in zip(axes.patches, (1, 0), strict=True):
        assert to_hex(bar.get_facecolor()).upper() == line_look(number)["color"]
    (interval,) = axes.collections
    assert interval.get_segments()[0][:, 0].tolist() == pytest.approx([1.2, 1.6])
    assert [text.get_text() for text in axes.texts] == ["1.5\n(1.2 to 1.6)", "0.5"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["known", "alone"] and axes.yaxis_inverted()


def test_the_steep_beginning_of_a_curve_is_cut_off():
    """At 15 % of the x axis the higher of the two is at 7."""
    axes = Figure().subplots()
    lines = [
        LineSeries("a", 0, [0, 10, 20, 100], [90.0, 8.0, 6.0, 2.0]),
        LineSeries("b", 1, [0, 100], [5.0, 1.0]),
    ]
    focus_on_end(axes, lines)
    assert axes.get_ylim() == pytest.approx((1 - 0.06 * 6, 7 + 0.06 * 6))


def test_metrics_alone_and_one_run_alone_are_enough(tmp_path):
    write_metrics(tmp_path / "run", seconds=None)
    (group,) = read_groups(tmp_path / "run")
    assert (group.label, group.first.status) == ("run (not finished)", "not finished")
    assert draw([group]).keys() == {"losses", "valid_losses"}
    write_metrics(tmp_path / "faster", lambda step: falling_loss(step, 2), every=50)
    groups = read_groups(tmp_path / "run", tmp_path / "faster")
    # nothing says which is pre-norm: the first is the baseline
    assert speedups_of(groups) == {"faster (not finished)": pytest.approx(2, abs=0.02)}


def test_an_unfinished_run_says_what_it_is(tmp_path):
    write_metrics(tmp_path)
    identity = SETTINGS | {"connection": "hyper", "seed": 3, "data sha256": "1a"}
    (tmp_path / RUN_FILE).write_text(json.dumps(identity))
    (run,) = read_runs(tmp_path)
    assert (run.connection, run.seed, run.data_digest) == ("hyper", 3, "1a")
    assert run.settings["layers"] == 12


def test_runs_without_a_result_are_apart(comparison, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    content = json.loads((copy / "results.json").read_text())
    *content["runs"], unfinished = content["runs"]
    first = content["runs"].pop(0)
    content["diverged"] = [{"arm": first["arm"], "seed": 0, "step": 900, "loss": "nan"}]
    (copy / "results.json").write_text(json.dumps(content))
    labels = [(group.label, [run.seed for run in group.runs]) for group in read_groups(copy)]
    assert labels == [
        ("Transformer (diverged)", [0]),
        ("Transformer", [1, 2]),
        ("DHC×4", [0, 1]),
        (f"{unfinished['arm']} (not finished)", [2]),
    ]


def test_results_alone_are_enough(comparison, tmp_path):
    (tmp_path / "results.json").write_bytes((comparison / "results.json").read_bytes())
    groups = read_groups(tmp_path)
    assert groups[1].mean("valid_loss") == pytest.approx(falling_loss(1000, 1.8) + 0.01)
    assert groups[0].first.curve.valid["held-out"][-1] == (1000, falling_loss(1000))


DAMAGED = {
    "no step": ('{"loss": 1}\n', "line 1: has no step"),
    "no JSON": ('{"step": 1, "loss": 2}\n\0\0\n', "line 2: not JSON"),
    "not UTF-8": (b'{"step": 1, "los\xff": 2}\n\xff\n', "line 2: not JSON"),
    "backwards": ('{"step": 9, "loss": 1}\n{"step": 3, "loss": 1}\n', "step 3 comes after step 9"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_metrics_are_one_line(name, tmp_path):
    content, message = DAMAGED[name]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / METRICS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_runs(tmp_path)


def test_results_of_eval_make_no_comparison(tmp_path):
    results = json.dumps({"tasks": {"results": {"sciq": {"acc_norm,none": 0.5}}}})
    run, model = tmp_path / "run", tmp_path / "model"
    write_metrics(run)
    (run / "evaluation.json").write_text(results)
    (only,) = read_runs(run)
    assert only.tasks == {"sciq": [(1000, 0.5)]}
    model.mkdir()
    for name in ("evaluation.json", "config.json"):
        (model / name).write_text(results)
    for folder in (run, model):
        assert not is_comparison_folder(folder)
    assert is_run_folder(run) and not is_run_folder(model)


def test_damaged_results_are_one_line(tmp_path, comparison):
    content = json.loads((comparison / "results.json").read_text())
    for damage in (
        {"arms": []},
        {"arms": {"Transformer": {"connection": "prenorm"}}},
        {"runs": [1]},
        {"settings": {"steps": "many"}},
        {"environment": {}},
        {"runs": [{**content["runs"][0], "tokens_per_second": 0}]},
    ):
        (tmp_path / "results.json").write_text(json.dumps(content | damage))
        with pytest.raises(ValueError, match=r"\(damaged\?\)") as caught:
            read_runs(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="neither a run's folder"):
        read_runs(tmp_path / "nothing")


def test_the_command_draws_training_without_a_model(comparison, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("crosslayer.convert.pretrained.open_model", None)
    out = tmp_path / "out"
    command = ["inspect", str(comparison), "--sections", "losses,sizes", "--out", str(out)]
    assert main(command) == 0
    assert "sizes is not drawn; it needs finished runs" in capsys.readouterr().out
    assert [path.name for path in sorted((out / "figures").iterdir())] == [
        "losses.png",
        "losses.svg",
    ]
    content = json.loads((out / "inspection.json").read_text())
    assert content["training"]["groups"][1]["speedup"] == pytest.approx(1.8, abs=0.01)
    page = (out / "report.html").read_text()
    assert "<h1>Training of Transformer and DHC×4</h1>" in page
    assert "<td>1.80</td>" in page
    assert "<td>100 seconds</td><td>1,000</td>" in page


def test_a_comparison_s_models_are_the_last_that_each_run_kept(comparison, tmp_path):
    shutil.copytree(comparison, tmp_path / "copy")
    names = [f"{arm}, seed {seed}" for arm in ("Transformer", "DHC×4") for seed in range(3)]
    assert find_compared_models(tmp_path / "copy") == dict.fromkeys(names)
    run = tmp_path / "copy" / "runs" / run_folder_name("DHC×4", 1)
    for step in ("step-000900", "step-001000", "step-10000"):
        (run / "models" / step).mkdir(parents=True)
    (run / "models" / "notes.txt").touch()
    for step in ("step-000900", "step-001000"):  # the third one was not saved to its end
        (run / "models" / step / "config.json").touch()
    kept = run / "models" / "step-001000"
    assert find_compared_models(tmp_path / "copy") == dict.fromkeys(names) | {"DHC×4, seed 1": kept}
    (run / "model").mkdir()
    assert last_saved_model(run) == run / "model"
    one = write_comparison(tmp_path / "one", {"mudd": {"connection": "mudd"}})
    assert find_compared_models(one) == {"mudd": None}


def test_no_view_has_the_name_of_a_section():
    names = [part.name for part in (*SECTIONS, *TRAINING_VIEWS)]
    assert len(set(names)) == len(names)


def test_sections_that_nothing_can_feed_are_refused(comparison, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["inspect", str(comparison), "--sections", "cosines", *out]) == 1
    assert "no model, which cosines needs" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--sections", "training", *out]) == 1
    assert "no folder of crosslayer train or compare" in capsys.readouterr().err
    assert main(["inspect", str(comparison), "--running-mean", "1", *out]) == 1
    assert "--running-mean must be from 0 to below 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_run_has_all_that_the_views_read(tmp_path):
    sizes = "--steps 12 --batch 2 --context 16 --layers 2 --dim 16 --heads 2 --eval-batches 1"
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 200)
    run = tmp_path / "hyper"
    command = ["train", "--arm", "hyper", "--data", str(tmp_path / "text.txt"), "--out", str(run)]
    assert main([*command, *sizes.split(), "--evals", "4"]) == 0
    ((found,),) = [group.runs for group in read_groups(run)]
    assert (found.name, found.connection, found.status) == ("hyper", "hyper", "")
    assert found.units_per_step == (32, "tokens")
    assert found.curve.steps == [10]
    assert [step for step, _ in found.curve.valid["held-out"]] == [3, 6, 9, 12]
    assert 0 < found.curve.seconds[0] < found.seconds_at([12])[0]
    assert found.number("inference_speed") > 0
    out = tmp_path / "out"
    inspect = ["inspect", str(run), "--sections", "training,cosines", "--sequences", "2"]
    assert main([*inspect, "--context", "16", "--out", str(out), "--data", command[4]]) == 0
    drawn = {path.stem for path in (out / "figures").glob("*.png")}
    assert drawn == {"losses", "valid_losses", "times", "cosines"}
    content = json.loads((out / "inspection.json").read_text())
    assert [model["name"] for model in content["models"]] == ["hyper"]


def planted_run(seed, settings, execution=()):
    return TrainingRun(
        name="mudd",
        folder=Path(str(seed)),
        curve=TrainingCurve(),
        connection="mudd",
        seed=seed,
        settings=settings,
        result={"execution": dict(execution)},
        data_digest="data",
    )


def test_seeds_are_one_group_whatever_does_not_change_what_is_learned():
    """Workers, the place of the same data, and options that a comparison does not name."""
    settings = [{"layers": 2, "workers": 1, "data": "here"}, {"layers": 2, "data": "there"}]
    runs = [planted_run(seed, options) for seed, options in enumerate(settings)]
    assert [len(group.runs) for group in group_runs(runs)] == [2]
    slower = planted_run(2, settings[0], {"recompute": "streams"})
    deeper = planted_run(3, {"layers": 3})
    assert [len(group.runs) for group in group_runs([*runs, slower, deeper])] == [2, 1, 1]


def test_speeds_of_runs_that_were_executed_otherwise_are_not_drawn(tmp_path):
    """Neither beside pre-norm's nor against an option. The losses are."""
    once, twice = {"accumulate": 1}, {"accumulate": 2}
    arms = {"prenorm": {"connection": "prenorm", "inference_speed": 1.0, "execution": once}}
    for dilation, execution in ((1, once), (2, once), (3, twice)):
        arms[f"dilated {dilation}"] = {
            "connection": f"denseformer(dilation={dilation})",
            "inference_speed": 1.0,
            "execution": execution,
        }
    runs = GroupedRuns(read_groups(write_comparison(tmp_path / "out", arms)))
    views = {view.name: dict(view.draw_panels(runs)) for view in TRAINING_VIEWS}
    for panel in views["speeds"].values():
        assert sum(len(line.x) for line in panel.keywords["lines"]) == 3
    drawn = {title: panel.keywords["lines"][0].x for title, panel in views["options"].items()}
    assert [len(x) for x in drawn.values()] == [3, 2, 2], drawn


def test_a_run_that_was_executed_otherwise_is_said():
    """Its speed cannot be compared with that of pre-norm of the same size; its loss can."""
    once, twice = {"recompute": None, "accumulate": 1}, {"recompute": None, "accumulate": 2}
    runs = [
        planted_run(0, {"dim": dim}, execution)
        for dim, execution in ((8, once), (8, twice), (16, twice))
    ]
    prenorm = [
        replace(planted_run(0, {"dim": dim}, execution), name="prenorm", connection="prenorm")
        for dim, execution in ((8, once), (16, twice))
    ]
    groups = group_runs([*runs, *prenorm])
    assert [", accumulate=2" in group.label for group in groups] == [False, True, *[False] * 3]
    assert {group.series for group in groups} == {"mudd", "prenorm"}
    of_other_data = [replace(run, data_digest="other") for run in (runs[1], prenorm[1])]
    groups = group_runs([*runs[:1], *prenorm[:1], *of_other_data])
    assert not any("accumulate" in group.label for group in groups)


def test_every_depth_is_drawn():
    """More depths than line styles."""
    runs = []
    for layers in range(2, 8):
        for width in (1, 2):
            settings = {"layers": layers, "dim": 16 * width}
            size = {"parameters": 1e5 * layers * width**2, "valid_loss": 3.0 - 0.1 * width}
            runs.append(replace(planted_run(0, settings), result=size, name=f"{layers} {width}"))
    (view,) = [view for view in TRAINING_VIEWS if view.name == "depths"]
    panels = dict(view.draw_panels(GroupedRuns(group_runs(runs))))
    lines = panels["against size"].keywords["lines"]
    assert sum(len(line.x) for line in lines) == len(runs)
    assert len(lines) == 6
    render_figure(list(panels.items()))


def test_seeds_with_another_first_validation_set_are_no_group():
    """The loss of a run is that of its first set, and a digest is of all of them."""
    orders = [{"valid": {"a": "a", "b": "b"}}, {"valid": {"b": "b", "a": "a"}}]
    runs = [planted_run(seed, options) for seed, options in enumerate(orders)]
    assert [len(group.runs) for group in group_runs(runs)] == [1, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"family": "llama"}, False),
        ({"family": "mixtral"}, True),
        ({"family": "granitemoe", "model_config": {"num_local_experts": 8}}, True),
        ({"family": "deepseek_v3"}, True),
    ],
)
def test_experts_are_found_in_the_familys_config(settings, expected):
    (group,) = group_runs([planted_run(0, settings)])
    assert has_experts(group) is expected
