"""examples/retrofit.py: results that it cannot read, and the page of those that are committed."""

import pytest

from benchmarks.evidence.pages import fill_page
from examples.retrofit import load_runs
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
