"""What a language model loses without a part whose worth is known, and its singular values."""

import math

import pytest
import torch

import crosslayer
from crosslayer import methods
from crosslayer.connection import find_connections
from crosslayer.connections.prenorm import PreNorm
from crosslayer.float32_parameters import float32_parameter
from crosslayer.inspect import source_ablation
from crosslayer.inspect.ablation import (
    ablate_blocks,
    ablate_sublayers,
    find_depth_weights,
    mean_token_loss,
)
from crosslayer.inspect.attention import measure_head_activations
from crosslayer.inspect.lens import measure_site_losses
from crosslayer.inspect.mixing_summary import find_mix_pattern
from crosslayer.inspect.singular_values import measure_singular_values
from crosslayer.inspect.source_ablation import ablate_sources, find_mix_weights
from tests.inspect.test_report import BATCHES, language_model

pytestmark = pytest.mark.filterwarnings("ignore:connecting")


def test_without_the_source_that_carries_all():
    model = language_model("denseformer", layers=3)
    readout = find_connections(model)[-1]
    with torch.no_grad():
        readout.alpha.zero_()
        readout.alpha[1] = 1  # X_1 carries all
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ablate_sources(model, BATCHES)
    assert found.mixes == ["1.attn", "2.attn", "readout"]
    assert found.sources == ["X_0", "X_1", "X_2", "X_3"]
    # Without it the readout is zero, and every token as likely.
    assert found.increase[2, 1] == pytest.approx(math.log(64) - found.loss, abs=1e-5)
    assert found.increase[2, [0, 2, 3]].tolist() == [0, 0, 0]
    assert found.increase[0].isnan().tolist() == [False, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ablate_sources(model, BATCHES, layers=[2]).mixes == ["2.attn"]
    assert ablate_sources(language_model(None), BATCHES) is None


def test_a_module_of_two_layers_is_not_removed():
    model = language_model(None)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert ablate_sublayers(model, BATCHES).labels == ["0.attn", "1.attn"]


def test_labels_of_next_tokens_are_shifted():
    model = language_model("mudd")
    ids = torch.randint(64, (2, 9))
    labels = ids.clone()
    labels[0, 3] = labels[1, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        assert mean_token_loss(model, [batch]) == pytest.approx(
            model(**batch).loss.item(), abs=1e-6
        )
    assert len(measure_site_losses(model, [batch]).labels) == 5
    assert measure_head_activations(model, [batch]).active.shape == (2,)


def test_head_activations_of_no_token_are_one_line():
    padded = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    padded["attention_mask"] = torch.zeros_like(padded["input_ids"])
    for batches in ([], [padded]):
        with pytest.raises(ValueError, match="the batches have no token"):
            measure_head_activations(language_model(None), batches)


def test_without_one_source_of_one_way_or_stream():
    model = language_model("mudd")
    found = ablate_sources(model, BATCHES)
    assert found.mixes == ["1.q", "1.k", "1.v", "1.r", "readout"]
    site = find_connections(model)[2]
    with torch.no_grad():  # A of v for X_0, by hand
        site.a[2, 0] = 0
        site.W2.unflatten(1, site.a.shape)[:, 2, 0].zero_()
    expected = mean_token_loss(model, BATCHES) - found.loss
    assert abs(expected) > 1e-6
    assert found.increase[2, 0] == pytest.approx(expected, abs=1e-6)


def hyper_without_a_stream() -> tuple[float, float]:
    """What analysis and hand find without stream 1 in the input of the second sub-layer."""
    model = language_model("hyper(streams=2, dynamic=False)")
    found = ablate_sources(model, BATCHES)
    row = found.mixes.index("0.mlp")
    with torch.no_grad():
        find_connections(model)[1].static_alpha[1, 0] = 0
    return found.increase[row, 1].item(), mean_token_loss(model, BATCHES) - found.loss


def test_without_a_stream_in_an_input(monkeypatch):
    found, expected = hyper_without_a_stream()
    assert abs(expected) > 1e-6
    assert found == pytest.approx(expected, abs=1e-6)
    right = source_ablation._without_part
    monkeypatch.setattr(  # a planted bug: the other stream
        source_ablation, "_without_part", lambda connection, part: right(connection, 1 - part)
    )
    found, expected = hyper_without_a_stream()
    assert found != pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("spec", "weights"), [("attnres", 2 + 3 + 4 + 5), ("mgr(streams=2)", 4 * 2), ("prenorm", 0)]
)
def test_the_number_of_sources(spec, weights):
    assert len(find_mix_weights(language_model(spec), BATCHES[:1])) == weights


class OwnSources(PreNorm):
    """A method of a user's own, whose attributes have names that others have too."""

    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm)
        self.sources = (0, 1)
        self.alpha = float32_parameter(1)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.alpha)


def test_attributes_of_another_method_are_no_weights_over_depth(monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})
    crosslayer.register_connection("own_sources", OwnSources)
    model = language_model("own_sources")
    assert find_mix_pattern(model) is None and not find_depth_weights(model)


def test_perplexity_without_a_block():
    model = language_model("mgr(streams=3)", layers=3)
    found = ablate_blocks(model, BATCHES)
    assert found.labels == ["1", "2"]  # the outputs of block 0 are streams
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    without = math.exp(mean_token_loss(model, BATCHES))
    assert found.increase[1] == pytest.approx(without - found.perplexity, abs=1e-3)
    # the output of block 0's attention is a stream, that of its MLP is not
    assert ablate_blocks(language_model("mgr(streams=2)"), BATCHES).labels == ["1"]


def test_singular_values_are_means_over_blocks():
    model = language_model("mudd")
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            weight = layer.self_attn.o_proj.weight
            weight.copy_(torch.diag(torch.arange(24.0, 0, -1)) * (number + 1))
    found = measure_singular_values(model)
    assert "embedding" in found.names
    assert not any("connections" in name for name in found.names)
    of_equal_shapes = measure_singular_values(language_model("hyper"))
    assert of_equal_shapes.names == found.names
    values = dict(zip(found.names, found.values, strict=True))
    expected = torch.arange(24.0, 0, -1).double() * 1.5
    torch.testing.assert_close(values["self_attn.o_proj"], expected)
    up = model.model.layers[0].mlp.up_proj.weight.double()
    one = torch.linalg.svdvals(up) + torch.linalg.svdvals(
        model.model.layers[1].mlp.up_proj.weight.double()
    )
    torch.testing.assert_close(values["mlp.up_proj"], one / 2)
