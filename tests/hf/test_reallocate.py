"""MUDD's Eq. 9: wider MLPs higher up, the total as it was."""

import pytest
import torch
from bodies import HOSTS, ids
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer.hf.reallocate import growing as widths


@pytest.mark.parametrize(("layers", "width"), [(24, 5504), (32, 6912), (42, 4096), (3, 64), (7, 100), (2, 3), (1, 9)])
def test_widths(layers, width):
    found = widths(layers, width)
    assert abs(sum(found) - layers * width) <= 0.005 * layers * width
    assert found == sorted(found) and len(found) == layers
    if layers > 1 and width > 1000:
        assert found[0] == pytest.approx(0.5 * width, abs=64) and found[-1] == pytest.approx(1.5 * width, abs=64)


@pytest.mark.parametrize("host", HOSTS)
def test_reallocated_and_saved(host, tmp_path):
    plain = sum(p.numel() for p in HOSTS[host](intermediate_size=128).parameters())
    model = crosslayer.connect(HOSTS[host](intermediate_size=128), "prenorm", reallocate=True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(plain, rel=0.005)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    with torch.device("meta"):
        crosslayer.connect(HOSTS[host](), "mudd", reallocate=True)
