"""examples/retrofit.py: results that it cannot read."""

import pytest

from examples.retrofit import load_runs


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
