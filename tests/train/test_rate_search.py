"""`crosslayer compare --search-rates`: each arm at its own best learning rate."""

import math

import pytest
from matplotlib.figure import Figure

from crosslayer.cli.main import main
from crosslayer.train import compare
from crosslayer.train.compare import prepare_comparison, run_comparison
from crosslayer.train.comparison_results import DivergedRun
from crosslayer.train.rate_search import is_limit, next_factor, scale_rates
from crosslayer.train.recipe import Arm, Recipe
from crosslayer.train.report import markdown_report, plot_differences, plot_rates
from crosslayer.train.report_notes import scope_notes
from crosslayer.train.results_table import result_table
from crosslayer.train.settings import OptimizationSettings
from tests.train.runs import run_with_loss

TINY = {"steps": 2, "batch": 2, "context": 16, "layers": 1, "dim": 8, "heads": 1}
BEST_RATE = {"prenorm": 1e-3, "mudd": 4e-3, "hyper": 1e-3 / 8}


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    return str(tmp_path / "text.txt")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """No model is trained here, and a collection takes half a second of this process."""
    monkeypatch.setattr(compare.gc, "collect", lambda: 0)


def known_loss(comparison, arm, seed, on_step):
    """What training would give, were the best rate of each connection known."""
    lr = comparison.recipe.settings(arm).optimization.lr
    if lr > 5e-3:
        return DivergedRun(arm.name, seed, 1, "nan")
    loss = 3 + abs(math.log2(lr / BEST_RATE[arm.connection])) / 10 + seed / 100
    return run_with_loss(arm, seed, loss)


def searched(text_file, folder, seeds, **overrides):
    arms = [Arm.from_row(spec) for spec in BEST_RATE]
    recipe = Recipe(arms, {**TINY, "data": text_file, "lr": 7e-4}, overrides=overrides)
    return prepare_comparison(recipe, seeds, folder, search_rates=True)


def test_a_rate_of_zero_cannot_be_searched(text_file, tmp_path):
    with pytest.raises(ValueError, match=r"search_rates scales .*, and prenorm has lr 0"):
        searched(text_file, tmp_path / "out", seeds=1, lr=0.0)


def test_a_given_rate_is_searched_around_in_place_of_an_arms_own(text_file, tmp_path):
    arm = Arm.from_row({"name": "own", "connection": "prenorm", "lr": 1e-3})
    recipe = Recipe([arm], {**TINY, "data": text_file}, overrides={"lr": 2e-3})
    searching = prepare_comparison(recipe, 1, tmp_path / "out", search_rates=True).recipe
    assert searching.settings(searching.arms[0]).optimization.lr == 2e-3


def test_each_arm_at_its_best_rate(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_do_run", known_loss)
    # the rate of the command line comes before the recipe's, and is scaled as well
    comparison = searched(text_file, tmp_path / "out", seeds=2, lr=1e-3)
    run_comparison(comparison, lambda *_: None)
    rates = {
        arm.connection: comparison.recipe.settings(arm).optimization.lr for arm in comparison.arms
    }
    assert rates == BEST_RATE
    tried = [sorted(comparison.rate_trials(arm)) for arm in comparison.recipe.arms]
    assert tried == [[0.5, 1, 2], [1, 2, 4, 8], [1 / 16, 1 / 8, 1 / 4, 0.5, 1, 2]]
    assert len(comparison.results.runs) + len(comparison.results.diverged) == 3 + 4 + 6 + 3
    rows = result_table(comparison)
    assert [row.arm for row in rows] == ["prenorm", "mudd at 4 × lr", "hyper at 0.125 × lr"]
    assert [row.loss.mean for row in rows] == pytest.approx([3.005] * 3)
    assert [row.loss_at_same_rate for row in rows] == pytest.approx([3, 3.2, 3.3])
    assert [row.difference and row.difference.mean for row in rows] == [None, 0, 0]
    report = markdown_report(comparison)
    assert "mudd: 3.2000 at 1 ×, 3.1000 at 2 ×, 3.0000 at 4 ×, diverged at 8 ×" in report

    axes = Figure().subplots()
    plot_rates(axes, comparison)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["mudd"].get_xdata()) == [1e-3, 2e-3, 4e-3], "without the diverged run"
    assert list(lines["mudd"].get_ydata()) == pytest.approx([3.2, 3.1, 3.0]), "of seed 0"
    marks = [line.get_xydata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 1]
    assert marks[1] == pytest.approx([4e-3, 3.01]), "seed 1, which only the chosen rate has"
    assert axes.get_ylim()[0] < 3.0 and 3.1 < axes.get_ylim()[1] < 3.4

    axes = Figure().subplots()
    plot_differences(axes, comparison)
    drawn = [text.get_text() for text in axes.get_legend().get_texts()]
    assert drawn == ["mudd at 4 × lr", "hyper at 0.125 × lr"], "and not pre-norm itself"


def test_a_rate_that_diverges_is_not_doubled():
    assert next_factor({1: math.inf}) == 0.5
    assert next_factor({1: math.inf, 0.5: math.inf}) == 0.25
    assert next_factor({1: math.inf, 0.5: 3.0}) == 0.25
    assert next_factor({1: 3.0, 2: math.inf}) == 0.5


def test_a_search_resumes(text_file, tmp_path, monkeypatch):
    done = []

    def stopping(comparison, arm, seed, on_step):
        if len(done) in (1, 6):
            done.append("stop")
            raise KeyboardInterrupt
        done.append((arm.name, seed))
        return known_loss(comparison, arm, seed, on_step)

    monkeypatch.setattr(compare, "_do_run", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_comparison(searched(text_file, tmp_path / "out", 2, lr=1e-3), lambda *_: None)
        report = markdown_report(searched(text_file, tmp_path / "out", 2, lr=1e-3))
        assert "at 1 ×" in report and ": ." not in report  # of arms that were not tried yet
    run_comparison(searched(text_file, tmp_path / "out", 2, lr=1e-3), lambda *_: None)
    runs = [run for run in done if run != "stop"]
    assert len(runs) == len(set(runs)) == 16


def test_a_search_without_memory(text_file, tmp_path, monkeypatch):
    """The second trial of mudd does not fit. The other arms are searched and seeded."""

    def lacking(comparison, arm, seed, on_step):
        if arm.name == "mudd at 2 × lr":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return known_loss(comparison, arm, seed, on_step)

    monkeypatch.setattr(compare, "_do_run", lacking)
    comparison = searched(text_file, tmp_path / "out", 2, lr=1e-3)
    run_comparison(comparison, lambda *_: None)
    assert comparison.without_memory == [("mudd at 2 × lr", 0)]
    assert len(comparison.results.runs) + len(comparison.results.diverged) == 3 + 1 + 6 + 2
    report = markdown_report(comparison)
    assert "Out of memory: mudd at 2 × lr, seed 0." in report
    assert "; the best learning rate of mudd, as the search has not ended" in report
    assert searched(text_file, tmp_path / "out", 2, lr=1e-3).missing_runs()


def test_the_grid_ends():
    falling = {2.0**power: -power for power in range(6)}
    assert next_factor(falling) is None  # 32 is the largest
    assert next_factor({0.5: math.inf, 1.0: math.inf, 2.0: math.inf}) == 0.25
    diverged = {2.0**power: math.inf for power in range(-5, 2)}
    assert next_factor(diverged) is None  # 1/32 is the smallest


def test_both_rates_of_muon_are_scaled():
    optimization = OptimizationSettings(optimizer="muon", lr=0.25, muon_lr=0.5)
    assert scale_rates(Arm.from_row("mudd"), optimization, 4).options == {"lr": 1, "muon_lr": 2}


def test_the_grid_has_a_limit_at_either_end():
    assert is_limit(32) and is_limit(1 / 32) and not is_limit(16)


def test_a_search_that_ends_at_its_limit(text_file, tmp_path, monkeypatch):
    """The report does not call the last rate an arm's best."""
    monkeypatch.setattr(compare, "_do_run", known_loss)
    comparison = searched(text_file, tmp_path / "out", seeds=1, lr=1e-3 / 32)
    run_comparison(comparison, lambda *_: None)
    limit = "; the best learning rate of prenorm, mudd, as the search ended at its limit, 32 ×"
    assert limit in " ".join(scope_notes(comparison))


def test_the_command(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_do_run", known_loss)
    options = [f"--{key}={value}" for key, value in {**TINY, "data": text_file}.items()]
    out = ["--search-rates", "true", "--out", str(tmp_path / "out")]
    assert main(["compare", "--arms", "prenorm", *options, *out]) == 0
    report = (tmp_path / "out" / "report.html").read_text()
    assert "at the given lr" in report and "Loss of seed 0 at each learning rate" in report
