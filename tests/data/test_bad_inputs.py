"""Generated damage to every kind of file that a data command reads: success, or one line."""

import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from crosslayer.cli.main import main
from crosslayer.data.prepared import prepare_corpus
from crosslayer.data.tokenizing import byte_tokenizer_json
from crosslayer.train.recipe import load_recipe
from tests.data.conftest import STORIES

LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in STORIES).encode()
TOKENIZER = json.loads(byte_tokenizer_json())
TOKENIZER["model"]["vocab"]["</s>"] = 256
RECIPE = {
    "family": "llama",
    "layers": 2,
    "betas": [0.9, 0.95],
    "valid": {"a": "b.txt"},
    "model_config": {"tie_word_embeddings": True},
    "arms": ["prenorm", {"name": "M", "connection": "mudd", "paper": {"loss": 1.0}, "lr": 1e-3}],
}


DEEP = "DEEP"  # becomes 100,000 brackets
VALUES = st.sampled_from(
    [None, True, 3, "", [], {}, [1], {"text": 1}, "\ud800", 10**40, "1" * 5000, DEEP, DEEP, "x"]
)


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """Cut off, overwritten, or replaced altogether."""
    start = draw(st.integers(0, len(content)))
    new = draw(st.binary(max_size=9))
    tail = draw(st.sampled_from([b"", content[start + len(new) :], content[start:]]))
    return content[:start] + new + tail


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every item at any depth, as its container and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


@st.composite
def damaged_json(draw: Any, value: Any) -> Any:
    """One item at any depth has another value or another key, or is missing."""
    value = json.loads(json.dumps(value))
    container, key = draw(st.sampled_from([([value], 0), *places(value)]))
    is_whole = container == [value]
    what = draw(st.sampled_from(["value", "value", "key", "nothing"]))
    if what == "value" or is_whole:
        container[key] = draw(VALUES)
        return container[0] if is_whole else value
    item = container.pop(key)
    if what == "key" and isinstance(container, dict):
        container[draw(st.sampled_from([1, None, True, "txt", 2.5]))] = item
    return value


def one_line(*arguments: str) -> None:
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = main(list(arguments))
    written = error.getvalue()
    assert code == 0 or (code == 1 and written.startswith("crosslayer: ")), written
    assert code == 0 or written.count("\n") == 1, written


def to_json(value: Any) -> bytes:
    text = json.dumps(value, default=repr).replace(f'"{DEEP}"', "[" * 100_000)
    return text.encode("utf8", "surrogatepass")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad")
    (path / "good.txt").write_text("some text " * 60)
    prepare_corpus(str(path / "good.txt"), "bytes", path / "prepared")
    parquet.write_table(pyarrow.table({"text": STORIES[:9]}), path / "a.parquet")
    return path


generated = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.json.zst", "b.parquet"])
@generated
@given(data=st.data())
def test_damaged_corpora(folder, tmp_path, name, data):
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    content = LINES
    if name.endswith(".parquet"):
        content = (folder / "a.parquet").read_bytes()
    damage = data.draw(st.sampled_from(["bytes", "row", "row", "file"]))
    if damage == "bytes":
        content = data.draw(damaged_bytes(content))
    elif damage == "row":
        content = to_json(data.draw(damaged_json({"text": "a", "id": [1]}))) + b"\n" + content
    content = compress(content)
    if damage == "file":
        content = data.draw(damaged_bytes(content))
    (tmp_path / name).write_bytes(content)
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    one_line("data", "prepare", str(tmp_path / name), "--out", str(out))


TOKENIZER_CONFIG = {"eos_token": {"content": "</s>"}}


@pytest.mark.slow
def test_the_tokenizer_that_is_not_damaged(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(to_json(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_bytes(to_json(TOKENIZER_CONFIG))
    command = ["data", "prepare", str(folder / "good.txt"), "--tokenizer", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0


@pytest.mark.slow
@generated
@given(data=st.data())
def test_damaged_tokenizers(folder, tmp_path, data):
    files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    for name, value in files.items():
        content = to_json(data.draw(damaged_json(value)))
        if data.draw(st.booleans()):
            content = data.draw(damaged_bytes(content))
        (tmp_path / name).write_bytes(content)
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    source = str(folder / "good.txt")
    one_line("data", "prepare", source, "--tokenizer", str(tmp_path), "--out", str(out))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["corpus.json", "train/state.json", "dataset_dict.json"])
@generated
@given(data=st.data())
def test_damaged_preparations(folder, name, data):
    file = folder / "prepared" / name
    before = file.read_bytes()
    content = to_json(data.draw(damaged_json(json.loads(before))))
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(content))
    file.write_bytes(content)
    try:
        one_line("data", "show", str(folder / "prepared"))
    finally:
        file.write_bytes(before)


@pytest.mark.slow
@settings(generated, max_examples=100)
@given(data=st.data())
def test_damaged_recipes(tmp_path, data):
    path = Path(tmp_path) / "recipe.yaml"
    content = yaml.dump(data.draw(damaged_json(RECIPE)), allow_unicode=True)
    content = content.replace(DEEP, "[" * 5000).encode("utf8", "surrogatepass")
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(content))
    path.write_bytes(content)
    try:
        load_recipe(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
