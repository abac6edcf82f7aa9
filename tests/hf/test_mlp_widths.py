"""MUDD's Eq. 9: wider MLPs higher up, the total as it was."""

import pytest
import torch

import crosslayer
from crosslayer.hf.mlp_widths import growing_widths
from tests.hf.backbones import FAMILIES, build, output


@pytest.mark.parametrize(
    ("layers", "width"), [(24, 5504), (32, 6912), (42, 4096), (3, 64), (7, 100), (2, 3), (1, 9)]
)
def test_widths(layers, width):
    found = growing_widths(layers, width)
    assert abs(sum(found) - layers * width) <= 0.005 * layers * width
    assert found == sorted(found) and len(found) == layers
    if layers > 1 and width > 1000:
        assert found[0] == pytest.approx(0.5 * width, abs=64) and found[-1] == pytest.approx(
            1.5 * width, abs=64
        )


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("mixtral", "olmoe", "dit")])
def test_reallocated_and_saved(family, tmp_path):
    size = {"n_inner": 128} if family == "gpt2" else {"intermediate_size": 128}
    plain = sum(p.numel() for p in build(family, **size).parameters())
    model = crosslayer.connect(build(family, **size), "prenorm", reallocate=True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(plain, rel=0.005)
    model.save_pretrained(tmp_path)
    assert model.config.crosslayer_widths == [64, 128, 192]
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(output(loaded, family), output(model, family))
    with torch.device("meta"):
        crosslayer.connect(build(family), "mudd", reallocate=True)
