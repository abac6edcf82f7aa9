"""`connect(..., reallocate=True)`, MUDD's Eq. 9: MLP widths that grow with depth, with the same
sum.
"""

import pytest
import torch

import crosslayer
from crosslayer.hf.mlp_widths import growing_widths
from tests.hf.backbones import WIRINGS, build, output


def test_reallocating_a_trained_model_is_announced():
    model = build("llama", intermediate_size=128)
    with torch.no_grad():
        model.model.norm.weight.normal_()
    with pytest.warns(UserWarning, match="reallocate replaces the weights of its MLPs"):
        crosslayer.connect(model, "mudd", reallocate=True)


@pytest.mark.parametrize(
    ("layers", "width"), [(24, 5504), (32, 6912), (42, 4096), (3, 64), (7, 100), (2, 3), (1, 9)]
)
def test_growing_widths(layers, width):
    widths = growing_widths(layers, width)
    assert abs(sum(widths) - layers * width) <= 0.005 * layers * width
    assert widths == sorted(widths)
    assert len(widths) == layers
    if layers > 1 and width > 1000:
        assert widths[0] == pytest.approx(0.5 * width, abs=64)
        assert widths[-1] == pytest.approx(1.5 * width, abs=64)


def test_widths_whose_sum_no_rounding_keeps():
    """Of 31.5, 63 and 94.5: halves are rounded up."""
    assert growing_widths(3, 63) == [32, 63, 95]


def test_new_projections_are_initialised_as_the_hosts():
    """With the standard deviation of the config and biases of 0, not as torch's `nn.Linear`."""
    sizes = {"intermediate_size": 128, "initializer_range": 0.5}
    model = crosslayer.connect(build("neox-parallel", **sizes), "prenorm", reallocate=True)
    for layer in model.gpt_neox.layers:
        for projection in (layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h):
            assert projection.weight.std().item() == pytest.approx(0.5, rel=0.1)
            assert not projection.bias.any()


def test_new_projections_have_the_dtype_of_the_hosts():
    model = crosslayer.connect(build("llama").bfloat16(), "prenorm", reallocate=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


# Experts and DiT's MLP have no widths to set; arcee's MLP has no gate.
@pytest.mark.parametrize("family", [*(k for k in WIRINGS if k not in ("mixtral", "dit")), "arcee"])
def test_reallocated_and_saved(family, tmp_path):
    sizes = {"n_inner": 128} if family == "gpt2" else {"intermediate_size": 128}
    expected_count = sum(p.numel() for p in build(family, **sizes).parameters())
    model = crosslayer.connect(build(family, **sizes), "prenorm", reallocate=True)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(expected_count, rel=0.005)
    assert model.config.crosslayer_widths == [64, 128, 192]
    model.save_pretrained(tmp_path)
    loaded = crosslayer.from_pretrained(tmp_path)
    assert torch.equal(output(loaded, family), output(model, family))
    with torch.device("meta"):
        crosslayer.connect(build(family), "mudd", reallocate=True)
