"""examples/retrofit.py: results that it cannot read, and the page of those that are committed."""

from dataclasses import replace

import pytest

from benchmarks.evidence.pages import fill_page
from examples import retrofit
from examples.retrofit import RetrofitRun, load_runs, report_section
from tools import update_retrofit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}', "run.json: not a result of `run`"),
        ("[]", "run.json: expected an object of JSON, got list"),
        (None, "has no result of prenorm, the baseline"),
    ],
)
def test_results_that_cannot_be_read_are_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_runs(tmp_path)


def test_the_page_has_the_table_of_the_runs():
    page = update_retrofit.PAGE.read_text("utf8")
    assert fill_page(page, update_retrofit.page_sections()) == page


def test_a_run_of_every_switch_has_its_seed(tmp_path, monkeypatch):
    """Without it, all seeds would be one run, and their differences 0."""
    calls = []

    def train(settings, examples, connection, switch, seed):
        calls.append((connection, switch, seed))
        return RetrofitRun(connection, switch, seed, None, 1.0, [], 0.0, {}, {})

    (tmp_path / "text.txt").write_text("some text " * 200)
    monkeypatch.setattr(retrofit, "train_retrofit", train)
    settings = {"data": str(tmp_path / "text.txt"), "steps": 8, "context": 16}
    retrofit.run(str(tmp_path / "out"), ["prenorm", "mudd"], (0.0, 0.75), 3, settings)
    assert calls == [("prenorm", 0, 3), ("mudd", 0, 3), ("mudd", 6, 3)]
    for share in (0.05, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"a switch must be 0, or from 0\.12 "):
            retrofit.run(str(tmp_path / "out"), ["hyper"], (0.0, share), 3, settings)
    # a folder has runs of the same settings, whatever their connection: `report` subtracts them
    with pytest.raises(ValueError, match=r"belongs to another run, with .*; choose another folder"):
        retrofit.run(str(tmp_path / "out"), ["hyper"], (0.0,), 3, settings | {"steps": 16})
    assert len(calls) == 3


def test_the_change_at_the_switch_is_the_largest_of_all_seeds():
    runs = load_runs(update_retrofit.DOCS / "retrofit")
    switched = next(run for run in runs if run.loss_change is not None)
    changed = [replace(switched, seed=s, loss_change=c) for s, c in enumerate((0.1, -0.3, 0.2))]
    baseline = [run for run in runs if run.connection == "prenorm"]
    assert "| -3.0e-01 |" in report_section([*baseline, *changed], "figure.svg")[-1]
