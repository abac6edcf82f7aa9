"""README's blocks run, and its table is the docstrings'."""

import re
from pathlib import Path

import pytest
import torch

from tests.hf.backbones import build
from tools import readme

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf8"), re.DOTALL)


def test_generated_pages_are_fresh():
    for path, text in readme.pages().items():
        assert path.read_text("utf8") == text, "run python tools/readme.py"


@pytest.mark.parametrize("block", BLOCKS, ids=["connect", "retrofit", "loop", "memory"])
def test_blocks_run(block, tmp_path, monkeypatch):
    # a folder of that name stands in for the hub
    build("neox-parallel").save_pretrained(tmp_path / "EleutherAI" / "pythia-1.4b")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block, names)
    assert any(isinstance(value, torch.Tensor | torch.nn.Module) for value in names.values())


def test_the_example_trains():
    from examples import gpt

    assert gpt.main("mudd(dilation=2)", steps=10) < 4.5
