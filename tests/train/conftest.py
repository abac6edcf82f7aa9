import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The path of a small text."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "".join(f"{i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(400))
    )
    return str(path)
