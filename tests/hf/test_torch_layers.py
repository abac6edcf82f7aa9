"""The Transformer layers of `torch.nn`."""

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.plain_models import DIM, HEADS, make_ids, output_and_gradients


class EncoderModel(nn.Module):
    """A causal model of torch's own layers, with padding."""

    def __init__(self, norm_first: bool, batch_first: bool, final: nn.Module | None = None):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 2 * DIM, norm_first=norm_first, batch_first=batch_first
        )
        self.batch_first = batch_first
        self.embed = nn.Embedding(50, DIM)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=final)

    def forward(self, ids: Tensor, is_padding: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        mask = None
        if is_padding is None:
            mask = torch.full((ids.shape[1],) * 2, -math.inf).triu(1)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, mask, is_padding, is_causal=mask is not None)
        return x if self.batch_first else x.transpose(0, 1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layers_of_torch(norm_first, batch_first):
    """With masks, in training, and where torch has fused code and nested tensors."""
    torch.manual_seed(0)
    plain = EncoderModel(norm_first, batch_first)
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm" if norm_first else "postnorm")
    results = [output_and_gradients(each) for each in (model, plain)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    is_padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
    with torch.no_grad():
        for arguments in ((), (is_padding,)):
            found, expected = (m.eval()(make_ids(), *arguments) for m in (model, plain))
            is_token = ~is_padding if arguments else torch.ones_like(is_padding)
            torch.testing.assert_close(found[is_token], expected[is_token], rtol=1e-4, atol=1e-5)


class DecoderModel(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, norm_first=True, batch_first=True)
        self.embed = nn.Embedding(50, DIM)
        self.decoder = nn.TransformerDecoder(layer, 3, norm=nn.LayerNorm(DIM))

    def forward(self, ids: Tensor) -> Tensor:
        memory = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
        is_padding = torch.arange(5).expand(2, 5) >= torch.tensor([[5], [3]])
        causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
        x: Tensor = self.decoder(
            self.embed(ids), memory, causal, None, None, is_padding, tgt_is_causal=True
        )
        return x


def test_the_decoder_of_torch():
    """What it attends to besides is an argument of its layers."""
    torch.manual_seed(0)
    plain = DecoderModel()
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    results = [output_and_gradients(each) for each in (model, plain)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Its attention to another text has one input rightly.
        layer = crosslayer.connect(plain, "mudd").decoder.layers[1]
    assert [connection.ports for connection in layer.connections] == [
        ("q", "k", "v"),
        ("mixer",),
        ("mlp",),
    ]


def test_torchs_attention_gets_three_inputs():
    model = crosslayer.connect(EncoderModel(True, True, nn.LayerNorm(DIM)), "mudd")
    perturb_weights(model)
    layer = model.encoder.layers[1]
    inputs: list[Tensor] = []
    layer.connections[0].register_forward_hook(lambda *args: inputs.extend(args[2][0]))
    received: list[Tensor] = []
    layer.self_attn.register_forward_pre_hook(lambda module, args: received.extend(args))
    model(make_ids())
    torch.testing.assert_close(received, inputs, rtol=0, atol=0)
    assert len(inputs) == 3 and not torch.equal(inputs[0], inputs[1])
