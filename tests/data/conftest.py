import json

import pytest

STORIES = [f"{i}: the fox ☕ jumps over {i * i} dogs.\n" * (1 + i % 7) for i in range(80)]


@pytest.fixture
def stories(tmp_path):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's caches, or shows bars."""
    import datasets

    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets"))
    )
    datasets.disable_progress_bars()
