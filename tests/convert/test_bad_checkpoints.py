"""Damaged and hostile checkpoints: `crosslayer convert` ends in one line, and runs nothing."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosslayer.cli.main import main
from tests.convert import test_muddpythia

CASE = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
DEEP = "[" * 100_000


@pytest.fixture
def folder(checkpoint):
    """A small checkpoint of MUDDFormer's layout."""
    return checkpoint(CASE)


CONFIGS = {
    "n_layer": ["many", -3, 0, 1.5, True, None, [4], 10**9, 10**30],
    "dim": [0, "64", 10**6, 10**30],
    "n_head": [0, -4, 10**9, {}],
    "n_local_heads": [0, "4"],
    "vocab_size": [-1, 10**9, None],
    "block_size": [0, "2048", 10**30],
    "intermediate_size": [-192, "wide", 10**400],
    "norm_eps": [0, -1e-6, "small", math.nan, math.inf, None],
    "rope_base": [0, -1, "1e4", math.inf],
    "dense": ["no", 1, None],
    "use_qk_norm": ["no", []],
    "round64": ["yes"],
    "dense_type": [["qkvr"], {"qkvr": 1}, None, "qk"],
    "eos_token_id": [-1, 97, True, "</s>", [[]], 10**30],
    "pad_token_id": [10**6, 1.0],
    "model_type": [[], {}, 5, "x" * 100_000],
}
FILES = {
    "list": (b"[]", "config.json: expected an object"),
    "deep": (DEEP.encode(), "config.json: JSON that is nested too deep"),
    "latin-1": (b'{"a": "\xe9"}', "config.json: not text in UTF-8"),
    "empty": (b"", "config.json: not JSON"),
    "cut": (b'{"dim": 64, ', "config.json: not JSON"),
    "digits": (b'{"dim": ' + b"9" * 5000 + b"}", "config.json: not JSON"),
}


def error_line(folder: Path, capsys) -> str:
    out = folder / "out"
    code = main(["convert", str(folder), str(out)])
    printed, error = capsys.readouterr()
    assert (code, printed) == (1, "") and not out.exists()
    assert error.startswith("crosslayer: ") and error.count("\n") == 1 and len(error) < 700
    return error


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_of_wrong_values(key, written, capsys):
    config = test_muddpythia.CONFIG
    folder = written(test_muddpythia.weights(config), config)
    for value in CONFIGS[key]:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        error = error_line(folder, capsys)
        assert str(folder) in error, value
        # A size that is possible, but not that of the weights, is shown by a tensor.
        assert key in error or "a tensor is missing" in error or "has the shape" in error, value


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_config_that_is_none(content, message, folder, capsys):
    (folder / "config.json").write_bytes(content)
    assert message in error_line(folder, capsys)


class Harm:
    """What a pickle runs when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


def _header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _replace_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


def _write_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)


def _folder_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def _only_pickle(folder: Path, name: str = "pytorch_model.bin") -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Harm()))


def _cut_weights(folder: Path) -> None:
    _replace_weights(folder, (folder / "model.safetensors").read_bytes()[:-100])


def _whole_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors")


TRUNCATED = "model.safetensors is truncated or not safetensors"
WEIGHTS = {
    "cut": (_cut_weights, TRUNCATED),
    "pickle": (lambda f: _replace_weights(f, pickle.dumps(Harm())), TRUNCATED),
    "only-pickle": (_only_pickle, "pytorch_model.bin is a pickle"),
    "only-checkpoint": (lambda f: _only_pickle(f, "last.ckpt"), "last.ckpt is a pickle"),
    "folder": (_folder_of_weights, "model.safetensors: not a file"),
    "huge-header": (lambda f: _replace_weights(f, b"\xff" * 16), TRUNCATED),
    "deep-header": (lambda f: _replace_weights(f, _header(DEEP.encode())), TRUNCATED),
    "list-header": (lambda f: _replace_weights(f, _header(b"[]")), TRUNCATED),
    "whole-numbers": (_whole_numbers, "'norm.weight' is I32"),
    "deep-index": (lambda f: _write_index(f, DEEP), "JSON that is nested too deep"),
    "list-index": (lambda f: _write_index(f, "[]"), "expected an object of JSON, got list"),
    "empty-index": (lambda f: _write_index(f, '{"weight_map": {}}'), "has no weight_map"),
    "odd-index": (lambda f: _write_index(f, '{"weight_map": [1]}'), "has no weight_map"),
    "odd-map": (lambda f: _write_index(f, '{"weight_map": {"a": ["b"]}}'), "lacks the shard"),
    "up-map": (lambda f: _write_index(f, '{"weight_map": {"a": "../b"}}'), "lacks the shard b"),
    "up-map-to-itself": (
        lambda f: _write_index(f, '{"weight_map": {"a": ".."}}'),
        "lacks the shard ..,",
    ),
}


@pytest.mark.parametrize(("damage", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_none(damage, message, folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    damage(folder)
    assert message in error_line(folder, capsys)
    assert not (tmp_path / "harmed").exists(), "a pickle was run"
