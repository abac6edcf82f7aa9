"""The scaling of initial output weights with which hyper-connections are trained from scratch."""

import pytest
import torch
from torch import nn

import crosslayer
from tests.hf.backbones import build, ids, llama
from tests.hf.plain_models import DIM, Block, model_of


def summed_output_std(spec: str) -> float:
    """Standard deviation of what the final norm reads, in a new model with a small embedding."""
    torch.manual_seed(0)
    model = llama(initializer_range=0.2, num_hidden_layers=6).model
    model.embed_tokens.weight.data.mul_(0.1)
    model.norm = nn.Identity()
    return crosslayer.connect(model, spec)(ids()).last_hidden_state.std().item()


def test_output_scale_keeps_the_standard_deviation_of_the_output():
    """Section 4 of the paper asks for it. The n streams start as equal copies of the residual."""
    original = summed_output_std("prenorm")
    ratios = {
        scale: summed_output_std(f"hyper(output_scale={scale!r})") / original
        for scale in ("1", "1/n", "1/sqrt(n)", "sqrt(n)")
    }
    assert ratios["1"] == pytest.approx(4, rel=1e-3)
    assert ratios["1/n"] == pytest.approx(1, rel=0.1)
    assert ratios["1/sqrt(n)"] == pytest.approx(2, rel=0.1)
    assert ratios["sqrt(n)"] == pytest.approx(8, rel=0.1)


def test_output_scale_is_applied_once(tmp_path):
    model = crosslayer.connect(llama(), "hyper(output_scale='1/n')")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(model(ids()).logits, loaded(ids()).logits)


def test_output_scale_in_a_model_that_is_built_from_a_config():
    model = crosslayer.connect(llama(), "hyper(output_scale='1/n')")
    torch.manual_seed(0)
    scaled = type(model)(model.config)
    model.config.crosslayer = "hyper"
    torch.manual_seed(0)
    plain = type(model)(model.config)
    assert scaled.model.connection_spec == "hyper(output_scale='1/n')"
    for name, weight in plain.named_parameters():
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = weight / 4 if is_output else weight
        assert torch.equal(scaled.get_parameter(name), expected), name


@pytest.mark.parametrize(
    "spec", ["hyper(output_scale='1/n')", "hyper(beta=0.5)", "mudd(normed='pre')"]
)
def test_options_that_change_a_pretrained_model_warn(spec):
    model = llama()
    model.model.norm.weight.data.uniform_()  # the mark of a trained model
    with pytest.warns(UserWarning, match="changes the outputs of this pretrained model"):
        crosslayer.connect(model, spec)


def test_output_scale_is_refused_where_nothing_would_be_scaled():
    with pytest.raises(ValueError, match=r"cannot scale what 'self_attn' adds .* no norm follows"):
        crosslayer.connect(build("gemma2"), "hyper(output_scale='1/n')")
    with pytest.raises(ValueError, match="Stack does not know"):
        crosslayer.Stack("hyper(output_scale='1/n')", [nn.Linear(8, 8), nn.Linear(8, 8)], dim=8)


class SteppedBlock(Block):
    """A matrix follows its MLP."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.step(self.mlp(self.ln_2(x)))


def test_output_scale_is_refused_where_a_matrix_follows_the_projection():
    with pytest.raises(ValueError, match="cannot scale what 'mlp' adds to the stream"):
        crosslayer.connect(model_of(SteppedBlock), "hyper(output_scale='1/n')")
