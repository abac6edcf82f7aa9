"""Published checkpoints' folders, as the tests load them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def checkpoint(tmp_path):
    """A folder in the published layout: a golden case's weights and config.json, with changes."""

    def write(case: str, **config) -> Path:
        folder = tmp_path / "published"
        folder.mkdir()
        shutil.copyfile(GOLDEN / f"{case}.params.safetensors", folder / "model.safetensors")
        # the golden runs generate without an end of text
        whole = (
            json.loads((GOLDEN / f"{case}.json").read_text())["config"]
            | {"eos_token_id": None}
            | config
        )
        (folder / "config.json").write_text(json.dumps(whole))
        return folder

    return write


@pytest.fixture
def written(tmp_path):
    """A folder with these tensors and this config.json."""

    def write(tensors, config, name="published") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write
