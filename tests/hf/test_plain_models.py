"""Models of plain torch, with nanoGPT's names and layout."""

import copy
import math
import pickle
import random
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.connections.mudd import Mudd
from crosslayer.hf.attach import find_backbone
from crosslayer.hf.families import FUSED_PROJECTIONS, FusedQKV
from crosslayer.hf.hidden_states import StreamUseError
from crosslayer.hf.projections import find_projections
from crosslayer.hf.qkv import FusedLinear, FusedProjection
from crosslayer.hf.verification import verify_wiring
from crosslayer.testing.tiny_model import perturb_weights
from crosslayer.train.diagnostics import connection_diagnostics
from tests.support.split_inputs import check_split_inputs

DIM = 32
HEADS = 4
CONNECTIONS = ["mudd", "hyper", "denseformer", "mhc"]


class CausalSelfAttention(nn.Module):
    """Named and built as nanoGPT's."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)
        self.resid_dropout = nn.Dropout(0.1)
        self.n_embd = DIM

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        qkv = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, DIM)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(DIM, 4 * DIM), gelu=nn.GELU(), c_proj=nn.Linear(4 * DIM, DIM)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


LISTS: dict[str, Callable[[list[nn.Module]], Any]] = {
    "list": nn.ModuleList,
    "dict": lambda blocks: nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}),
    "sequence": lambda blocks: nn.Sequential(*blocks),
    "sequence of names": lambda blocks: nn.Sequential(
        OrderedDict((f"layer_{i}", block) for i, block in enumerate(blocks))
    ),
}


class GPT(nn.Module):
    """A GPT with tied embeddings and nanoGPT's names. kind: of its list of layers."""

    def __init__(self, kind: str = "list"):
        super().__init__()
        self.config = SimpleNamespace(n_embd=DIM, block_size=16)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50, DIM),
                "wpe": nn.Embedding(16, DIM),
                "h": LISTS[kind]([Block() for _ in range(3)]),
                "ln_f": nn.LayerNorm(DIM),
            }
        )
        self.lm_head = nn.Linear(DIM, 50, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1]))
        if isinstance(parts.h, nn.Sequential):
            return self.lm_head(parts.ln_f(parts.h(x)))
        for block in parts.h.values() if isinstance(parts.h, nn.ModuleDict) else parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def make_ids() -> Tensor:
    return torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("spec", CONNECTIONS)
def test_a_model_of_plain_torch(spec, kind, tmp_path):
    """It starts as the model was, every parameter learns, and it is saved as any module is."""
    plain = GPT(kind).eval()
    expected = plain(make_ids())
    model = crosslayer.connect(copy.deepcopy(plain), spec)
    rounding = 0 if spec in ("mudd", "denseformer") else 1e-4
    torch.testing.assert_close(model(make_ids()), expected, rtol=0, atol=rounding)
    assert not hasattr(model.config, "crosslayer")

    perturb_weights(model, 0.05)(make_ids()).square().mean().backward()
    without_gradient = [name for name, p in model.named_parameters() if p.grad is None]
    assert without_gradient == []
    groups = crosslayer.param_groups(model, lr=1e-3, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))

    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = crosslayer.connect(GPT(kind).eval(), spec)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(loaded(make_ids()), model(make_ids()))


def test_disconnecting_a_model_of_plain_torch():
    plain = GPT("dict").eval()
    model = crosslayer.disconnect(crosslayer.connect(copy.deepcopy(plain), "mudd"))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(model(make_ids()), plain(make_ids()))


def test_a_subclass_of_a_connected_model_runs():
    """FSDP2 makes subclasses of the classes that `connect` made."""
    model = crosslayer.connect(GPT().eval(), "mudd")
    expected = model(make_ids())
    for module in [model, *model.transformer.h, model.transformer.h[1].attn]:
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert torch.equal(model(make_ids()), expected)


@pytest.mark.parametrize("change", ["names", "outputs"])
def test_another_class_of_the_same_name_has_one_input(change):
    """Its q, k and v cannot be told, so MUDD mixes one input for it."""
    model = GPT()
    for block in model.transformer.h:
        if change == "names":
            del block.attn.n_embd
        else:
            block.attn.c_attn = nn.Linear(DIM, 2 * DIM)
    crosslayer.connect(model, "mudd")
    assert model.transformer.h[1].connections[0].ports == ("mixer",)


def test_q_k_and_v_of_nanogpt():
    attention = CausalSelfAttention()
    check_split_inputs(attention, lambda x: attention.c_attn(x).split(DIM, dim=2), DIM)


def test_diagnostics_of_numbered_layers():
    model = crosslayer.connect(GPT("dict"), "mudd")
    found = connection_diagnostics(model, lambda: model(make_ids()))
    assert len(found) > 0 and all(math.isfinite(value) for value in found.values())


class FactorBlock(nn.Module):
    """A block that multiplies what its sub-layers return. `factor` is one of `FACTORS`."""

    def __init__(self, number: int, factor: Any):
        super().__init__()
        self.number, self.factor = number, factor
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attn, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.alpha = nn.Parameter(torch.tensor(0.3 + number))
        self.gains = nn.Parameter(torch.rand(1, 1, DIM))
        self.register_buffer("share", torch.tensor(0.5 + number))
        self.setting = {"factor": 1 + number}
        self._private = np.float32(1 + number)
        self.config = SimpleNamespace(factor=1 + number)
        self.attn.factor = 1 + number
        self.register_buffer("depth", torch.tensor(1 + number))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor(self, self.attn(self.norms[0](x)))
        return x + self.factor(self, self.mlp(self.norms[1](x)))


class FactorModel(nn.Module):
    def __init__(self, factor: Any, order: Any = lambda layers: layers):
        super().__init__()
        self.order = order
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(FactorBlock(number, factor) for number in range(4))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.order(self.layers):
            x = layer(x)
        return self.norm(x)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


FACTORS = {
    "one learned number": lambda block, y: block.alpha * y,
    "learned, one a channel": lambda block, y: block.gains * y,
    "by depth": lambda block, y: y / (block.number + 1),
    "by parity": lambda block, y: y if block.number % 2 else y / 2,
    "a setting": lambda block, y: y * block.setting["factor"],
    "a private number": lambda block, y: y * float(block._private),
    "of a config": lambda block, y: y * block.config.factor,
    "of a module": lambda block, y: y * block.attn.factor,
    "a whole number as a buffer": lambda block, y: y / block.depth,
    "dropout": lambda block, y: F.dropout(y, 0.1, block.training),
}
COMPUTED = "what it does depends on its own parameters or buffers, or on the length of its input"
IN_TRAINING = "in training its own code does something else than in evaluation"
REFUSED_FACTORS = {
    "a function of a parameter": (lambda block, y: torch.tanh(block.alpha) * y, COMPUTED),
    "a buffer": (lambda block, y: block.share * y, COMPUTED),
    "the positive part": (lambda block, y: block.alpha.relu() * y, COMPUTED),
    "at most 2": (lambda block, y: block.alpha.clamp(max=2) * y, COMPUTED),
    "at least 0.1": (lambda block, y: block.gains.clamp(min=0.1) * y, COMPUTED),
    "a sign": (lambda block, y: y if block.alpha > 0 else -y, COMPUTED),
    "a length": (lambda block, y: math.log(y.shape[1]) * y, COMPUTED),
    "a clamp": (lambda block, y: y.clamp(-6, 6), COMPUTED),
    "two parameters": (lambda block, y: block.alpha * block.gains * y, COMPUTED),
    "stochastic depth": (
        lambda block, y: y * 2 * (torch.rand(()) > 0.5) if block.training else y,
        IN_TRAINING,
    ),
    "noise": (lambda block, y: y + torch.randn(DIM) if block.training else y, IN_TRAINING),
    "numpy's numbers": (
        lambda block, y: 0 * y if block.training and np.random.rand() < 1e-9 else y,
        IN_TRAINING,
    ),
    "dropout in evaluation": (lambda block, y: F.dropout(y, 0.1), "has dropout in evaluation"),
    "no dropout": (lambda block, y: F.dropout(y, 0.1, False), IN_TRAINING),
    "a module's mode": (lambda block, y: y if block.attn.training else y / 2, IN_TRAINING),
    "an expectation": (lambda block, y: y if block.training else y / 2, IN_TRAINING),
    "a choice": (
        lambda block, y: 0 * y if block.training and random.random() < 1e-9 else y,
        IN_TRAINING,
    ),
}
ACTIVATIONS = {
    "GELU": lambda block, y: F.gelu(y, approximate="tanh"),
    "a squared ReLU": lambda block, y: y.relu() ** 2,
    "with dropout": lambda block, y: F.dropout(torch.tanh(y), 0.1, block.training),
    "times a parameter": lambda block, y: block.alpha * F.leaky_relu(y, 0.3, inplace=True),
}
NO_SUM = "fc2 gets no sum of the stream and of modules' outputs"
REFUSED_ACTIVATIONS = {
    "gated": (lambda block, y: y * torch.sigmoid(y), NO_SUM),
    "of other tokens": (lambda block, y: F.softmax(y, 1), NO_SUM),
    "in place": (lambda block, y: y.relu_(), NO_SUM),
    "scaled": (lambda block, y: F.gelu(2 * y), "what fc1 returns is scaled"),
    "in training": (lambda block, y: y.relu() if block.training else F.gelu(y), IN_TRAINING),
    "another slope": (
        lambda block, y: F.leaky_relu(y, 0.3 if block.training else 0.2),
        IN_TRAINING,
    ),
    "of a length": (lambda block, y: F.leaky_relu(y, 0.1 * y.shape[1]), COMPUTED),
    "of a parameter": (lambda block, y: F.gelu(y) if block.alpha > 0 else y, COMPUTED),
}
NORM_FUNCTIONS = {
    "RMSNorm": lambda block, x: F.rms_norm(x, (x.size(-1),)),
    "LayerNorm with eps": lambda block, x: F.layer_norm(x, [DIM], eps=1e-3),
    "scaled": lambda block, x: 0.5 * F.rms_norm(x, x.shape[-1:]),
}
REFUSED_NORM_FUNCTIONS = {
    "with a weight": (
        lambda block, x: F.rms_norm(x, (DIM,), block.weight),
        "scales what attn gets by its own parameters",
    ),
    "times a weight": (
        lambda block, x: F.rms_norm(x, (DIM,)) * block.weight,
        "rms_norm, weight, attn is no sub-layer with at most one norm before it",
    ),
    "written out": (
        lambda block, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        "attn gets no sum of the stream and of modules' outputs",
    ),
    "over the tokens": (lambda block, x: F.rms_norm(x, x.shape[1:]), COMPUTED),
    "no norm": (lambda block, x: F.gelu(x), "gelu is no norm, and attn reads it"),
    "another eps": (
        lambda block, x: F.rms_norm(x, (DIM,), eps=1e-3 if block.training else 1e-6),
        IN_TRAINING,
    ),
}
ORDERS = {
    "twice": (lambda layers: [*layers, *layers], "it runs layers.0 after layer 3"),
    "from the last": (reversed, "it runs layers.3 after the embedding"),
    "some": (lambda layers: layers[:3], "it runs 3 of its 4 layers"),
}


def output_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)  # of dropout
    output = model(make_ids())
    output[..., 0].sum().backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("factor", FACTORS)
def test_factors_are_kept(factor):
    """Of each layer and in training: learned ones learn, and others may depend on the depth."""
    torch.manual_seed(0)
    plain = FactorModel(FACTORS[factor])
    expected, expected_gradients = output_and_gradients(plain)
    output, gradients = output_and_gradients(crosslayer.connect(copy.deepcopy(plain), "prenorm"))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", REFUSED_FACTORS)
def test_factors_that_are_refused(factor):
    scale, message = REFUSED_FACTORS[factor]
    model, before = FactorModel(scale), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, "prenorm")
    assert torch.equal(torch.get_rng_state(), before)


class WrittenMLPBlock(nn.Module):
    """Its MLP is two linear layers with a function between them."""

    def __init__(self, activate: Any):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, 3 * DIM)
        self.fc2 = nn.Linear(3 * DIM, DIM)
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.activate(self, self.fc1(self.norm(x))))


class WrittenMLPModel(FactorModel):
    def __init__(self, activate: Any):
        super().__init__(FACTORS["by depth"])
        self.layers = nn.ModuleList(WrittenMLPBlock(activate) for _ in range(3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_that_are_functions(activation):
    """They are kept with their options. A wiring that leaves one out is noticed."""
    torch.manual_seed(0)
    plain = WrittenMLPModel(ACTIVATIONS[activation])
    model = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    results = [output_and_gradients(each) for each in (model, plain)]
    torch.testing.assert_close(*results, rtol=0, atol=0)

    backbone, wiring = find_backbone(plain)
    assert pickle.loads(pickle.dumps(wiring)) == wiring
    (site,) = wiring.of_layers[0].sites
    without = site[0]._replace(after=site[0].after[1:])
    layer_wiring = wiring.of_layers[0]._replace(sites=((without,),))
    with pytest.raises(ValueError, match="connect would change what layer 0"):
        verify_wiring(backbone, wiring._replace(of_layers=(layer_wiring,) * 3))


@pytest.mark.parametrize("activation", REFUSED_ACTIVATIONS)
def test_activations_that_are_refused(activation):
    activate, message = REFUSED_ACTIVATIONS[activation]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(WrittenMLPModel(activate), "prenorm")


class FunctionNormBlock(nn.Module):
    """Its norms are functions without weights."""

    def __init__(self, norm: Any):
        super().__init__()
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.ReLU(), nn.Linear(3 * DIM, DIM))
        self.weight = nn.Parameter(torch.ones(DIM))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(self, x))
        return x + self.mlp(self.norm(self, x))


class FunctionNormModel(nn.Module):
    """The embedding and what the last layer returns pass such a norm too."""

    def __init__(self, norm: Any):
        super().__init__()
        self.wte = nn.Embedding(50, DIM)
        self.blocks = nn.ModuleList(FunctionNormBlock(norm) for _ in range(3))
        self.lm_head = nn.Linear(DIM, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.rms_norm(self.wte(ids), (DIM,))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(F.rms_norm(x, (DIM,)))


@pytest.mark.parametrize("norm", NORM_FUNCTIONS)
def test_norms_that_are_functions(norm):
    """They are those of all inputs, and kept with their options."""
    torch.manual_seed(0)
    plain = FunctionNormModel(NORM_FUNCTIONS[norm]).eval()
    connected = crosslayer.connect(copy.deepcopy(plain), "prenorm")
    results = [output_and_gradients(each) for each in (connected, plain)]
    torch.testing.assert_close(*results, rtol=0, atol=0)

    model = crosslayer.connect(plain, "mudd")
    perturb_weights(model)
    inputs: list[Tensor] = []
    model.blocks[2].connections[0].register_forward_hook(lambda *args: inputs.extend(args[2][0]))
    model(make_ids())
    sizes = torch.stack(inputs).square().mean(-1)
    assert len(inputs) == 3
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0.01, atol=0)


@pytest.mark.parametrize("norm", REFUSED_NORM_FUNCTIONS)
def test_norms_that_are_functions_and_refused(norm):
    function, message = REFUSED_NORM_FUNCTIONS[norm]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(FunctionNormModel(function), "prenorm")


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


@pytest.mark.parametrize("order", ORDERS)
def test_layers_in_another_order_are_refused(order):
    run_layers, message = ORDERS[order]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(FactorModel(FACTORS["by depth"], run_layers), "mudd")


@pytest.mark.parametrize("spec", ["mudd", "mgr"])
def test_an_order_that_connect_did_not_see_is_refused_by_the_forward(spec):
    model = crosslayer.connect(FactorModel(FACTORS["dropout"]), spec)
    model(make_ids())
    model.order = lambda layers: [layers[0], *layers[2:]]
    with pytest.raises(ValueError, match="layer 2 runs in the place of layer 1"):
        model(make_ids())


STREAM_USES = {
    "it in layer_norm": lambda hidden, host: nn.LayerNorm(DIM)(hidden),
    "it in linear": lambda hidden, host: nn.Linear(DIM, DIM)(hidden),
    "it in add": lambda hidden, host: torch.zeros(1) + hidden,
    "it in a sum": lambda hidden, host: hidden + torch.zeros(1),
    "it in a product": lambda hidden, host: 2 * hidden,
    "its 'shape'": lambda hidden, host: hidden.shape,
    "parts of it": lambda hidden, host: hidden[:, -1],
    "an element of it": lambda hidden, host: host.h[1](hidden[0]),
}


@pytest.mark.parametrize("use", STREAM_USES)
def test_what_a_host_cannot_do_with_a_state(use):
    host = crosslayer.connect(GPT().eval(), "hyper").transformer
    hidden = host.h[0](torch.zeros(2, 5, DIM))
    with pytest.raises(StreamUseError, match=f"the host cannot use {use} there"):
        STREAM_USES[use](hidden, host)


def test_the_final_norm_refuses_an_element_of_a_state():
    host = crosslayer.connect(GPT().eval(), "hyper").transformer
    hidden = host.h[0](torch.zeros(2, 5, DIM))
    with pytest.raises(StreamUseError, match="the host cannot use an element of it there"):
        host.ln_f(hidden[0])


class CheckpointedGPT(nn.Module):
    """A host that owns its layers, and checkpoints them itself."""

    reentrant: bool | None = None  # None: without checkpointing

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.norm(x)


class KeywordGPT(CheckpointedGPT):
    """A host that gives its layers and its final norm their input by name."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x=x)
        return self.norm(input=x)


def test_the_stream_may_be_given_by_name():
    model = KeywordGPT().eval()
    expected = model(make_ids())
    assert torch.equal(crosslayer.connect(model, "mudd")(make_ids()), expected)
    with pytest.raises(TypeError, match="takes 1 arguments, got 2"):
        model.layers[0](torch.zeros(1, 2, DIM), None)


@pytest.mark.parametrize("spec", CONNECTIONS)
def test_a_host_that_checkpoints_its_layers(spec):
    model = CheckpointedGPT()
    model.reentrant = True
    with pytest.raises(ValueError, match=r"after layers\.0 \(torch\.Tensor\.requires_grad\)"):
        crosslayer.connect(model, spec)
    model.reentrant = False
    crosslayer.connect(model, spec)
    perturb_weights(model)
    gradients = []
    for model.reentrant in (None, False):
        torch.manual_seed(0)  # of dropout
        model.zero_grad()
        model(make_ids()).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    model.reentrant = True  # leaves a plain tuple
    with pytest.raises(StreamUseError, match="checkpoint, use_reentrant must be False"):
        model(make_ids())


class RenamedBlock(Block):
    """A module has two names, and the forward uses the second."""

    def __init__(self):
        super().__init__()
        self.first_norm, self.feed_forward = self.ln_1, self.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first_norm(x))
        return x + self.feed_forward(self.ln_2(x))


class FunctionBlock(Block):
    """Its MLP is a function that knows the modules, as in minGPT."""

    def __init__(self):
        super().__init__()
        mlp: Any = nn.ModuleDict(self.mlp.named_children())
        self.mlp = mlp
        self.mlpf = lambda x: mlp.c_proj(mlp.gelu(mlp.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class NormedSublayersBlock(nn.Module):
    """Its sub-layers have their norms, so nothing beside them says how wide the stream is."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(DIM), CausalSelfAttention())
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class StemModel(FactorModel):
    """A sequence of other modules of one class comes before its list of layers."""

    def __init__(self):
        super().__init__(FACTORS["by depth"])
        layers = self.layers
        del self.layers
        self.stem = nn.Sequential(SwitchedBlock(), SwitchedBlock())
        self.layers = layers

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.stem(self.embed(ids))


class PoolingModel(FactorModel):
    """It has timm's two norms, and uses one of them, before or after it pools its tokens."""

    def __init__(self, norm: nn.Module, fc_norm: nn.Module):
        super().__init__(FACTORS["by depth"])
        self.norm, self.fc_norm = norm, fc_norm

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc_norm(super().forward(ids).mean(1))


class ListedBlock(nn.ModuleList):
    """Without a forward: the model adds up what its modules return."""

    def __init__(self):
        super().__init__([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])


class IdleBlock(Block):
    def __init__(self):
        super().__init__()
        self.ln_3 = nn.LayerNorm(DIM)


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SwitchedAttention(CausalSelfAttention):
    """What it does depends on an argument, whose default is not that of its layers."""

    def forward(self, x: Tensor, doubled: bool = False) -> Tensor:
        return super().forward(x) * (2 if doubled else 1)


class OptionsAttention(SwitchedAttention):
    """It names no argument."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x, **options)


class SwitchedBlock(Block):
    def __init__(self):
        super().__init__()
        self.attn = SwitchedAttention()

    def forward(self, x: Tensor, doubled: bool = True) -> Tensor:
        x = x + self.attn(self.ln_1(x), doubled=doubled)
        return x + self.mlp(self.ln_2(x))


class ConstantBlock(SwitchedBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), self.is_doubled(x))
        return x + self.mlp(self.ln_2(x))

    def is_doubled(self, x: Tensor) -> Any:
        return True


class LengthBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> bool:
        return x.shape[1] > 1


class TrainingBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> bool:
        return not self.training


class MaskBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1])


class TableBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.ones(1),)


class HandingBlock(Block):
    """Its MLP gets what its attention returns besides its output."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.mlp = SwitchedAttention()

    def forward(self, x: Tensor) -> Tensor:
        x_normed = self.ln_1(x)
        y, weights = self.attn(x_normed, x_normed, x_normed)
        x = x + y
        return x + self.mlp(self.ln_2(x), weights)


class DeviceBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> torch.device:
        return x.device


class WeightlessBlock(Block):
    """The usual call of torch's own attention."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x_normed = self.ln_1(x)
        x = x + self.attn(x_normed, x_normed, x_normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ComparingBlock(Block):
    def forward(self, x: Tensor, mode: str = "full") -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x if mode == "attention" else x + self.mlp(self.ln_2(x))


class TwoWayBlock(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.ln_1(x))
        x = x + y + self.drop(y)
        return x + self.mlp(self.ln_2(x))


def model_of(block: type[Block]) -> GPT:
    model = GPT()
    model.transformer["h"] = nn.ModuleList(block() for _ in range(2))
    return model.eval()


def test_a_module_of_two_names():
    plain = model_of(RenamedBlock)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))
    assert model.state_dict().keys() >= plain.state_dict().keys()


def test_a_sequence_beside_the_list_of_layers_is_not_connected():
    plain = StemModel().eval()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(model(make_ids()), plain(make_ids()))
    names = [name for name, module in model.named_modules() if isinstance(module, Mudd)]
    assert len(names) == 9 and not any(name.startswith("stem") for name in names)


def test_a_sequence_of_layers_and_other_modules_is_refused():
    model = GPT()
    model.transformer["h"] = nn.Sequential(Block(), Block(), nn.LayerNorm(DIM))
    message = "it has no list of layers; put its layers into an nn.ModuleList, or into an nn.Seq"
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, "mudd")


@pytest.mark.parametrize("pools_first", [False, True])
def test_the_final_norm_is_the_one_before_the_tokens_are_pooled(pools_first):
    norms = [nn.LayerNorm(DIM), nn.Identity()]
    plain = PoolingModel(*(reversed(norms) if pools_first else norms)).eval()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(model(make_ids()), plain(make_ids()))
    readouts = [name for name, module in model.named_modules() if isinstance(module, Mudd)][8:]
    assert readouts == (["layers.3.connections.2"] if pools_first else ["norm.connection"])


def test_functions_that_know_modules():
    model = model_of(FunctionBlock)
    expected = model(make_ids())
    assert torch.equal(crosslayer.connect(model, "mudd")(make_ids()), expected)
    model.transformer.h[1].mlp.c_proj = nn.Linear(4 * DIM, DIM)  # which the function does not know
    assert not torch.equal(model(make_ids()), expected)


def test_the_width_may_be_known_by_the_embeddings_alone():
    plain = model_of(NormedSublayersBlock)
    plain.transformer["ln_f"] = nn.Identity()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(model(make_ids()), plain(make_ids()), rtol=0, atol=1e-6)
    plain.transformer["wpe"] = nn.Embedding(16, DIM + 1)
    with pytest.raises(ValueError, match="no hidden_size, and no embeddings of one width"):
        crosslayer.connect(plain, "mudd")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (IdleBlock, r"layer 0 \(IdleBlock\): its ln_3 does not run in the forward passes that"),
        (InPlaceBlock, r"connect cannot connect layer 0 \(InPlaceBlock\): .* in-place operation"),
        (ListedBlock, "layer 0 is a ListedBlock, whose modules the model runs and adds up itself"),
        (LengthBlock, "what it does depends on .* the length of its input"),
        (TrainingBlock, "in training its own code does something else"),
        (MaskBlock, "it gives attn a tensor that it makes itself, 'doubled'; if it is a mask"),
        (TableBlock, r"it gives attn an argument that it makes itself, doubled=\(tensor"),
        (HandingBlock, "it gives mlp an argument .*, doubled=a further output of attn"),
        (DeviceBlock, "it gives attn an argument that it makes itself, doubled=device"),
        (TwoWayBlock, "what attn returns joins the stream in two ways"),
        (ComparingBlock, "its own code compares the argument 'mode' with 'attention'"),
    ],
)
def test_blocks_that_are_refused_by_name(block, message):
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model_of(block), "mudd")


class SkippingBlock(Block):
    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x)) if whole else x


@pytest.mark.parametrize("switch", [False, 0, np.False_, torch.tensor(False)])
def test_a_switch_is_what_it_is_in_an_if(switch):
    model = crosslayer.connect(model_of(SkippingBlock), "mudd")
    layer, x = model.transformer.h[0], torch.randn(1, 3, DIM)
    layer(x, whole=1)
    with pytest.raises(ValueError, match="whole=False"):
        layer(x, whole=switch)


def test_a_list_of_embeddings_is_none_of_layers():
    plain = GPT().eval()
    tables = nn.ModuleList(nn.Embedding(4, DIM) for _ in plain.transformer.h)
    plain.transformer = nn.ModuleDict({"tables": tables, **plain.transformer})
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


@pytest.mark.parametrize(
    ("block", "attention"),
    [
        (SwitchedBlock, SwitchedAttention),
        (SwitchedBlock, OptionsAttention),
        (ConstantBlock, SwitchedAttention),
    ],
)
def test_a_layer_passes_its_own_defaults_and_constants(block, attention):
    plain = model_of(block)
    for block in plain.transformer.h:
        block.attn = attention()
    plain.eval()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


def test_a_constant_that_is_left_out_is_seen():
    backbone, wiring = find_backbone(model_of(ConstantBlock))
    layer = wiring.of_layers[0]
    sites = tuple(tuple(sub._replace(preset_arguments=()) for sub in site) for site in layer.sites)
    planted = wiring._replace(of_layers=(layer._replace(sites=sites),) * len(wiring.of_layers))
    with pytest.raises(ValueError, match="connect would change what layer 0"):
        verify_wiring(backbone, planted)


def test_the_usual_call_of_torchs_attention():
    plain = model_of(WeightlessBlock)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")

    def call(model: GPT) -> tuple[Tensor, dict[str, Any]]:
        options: dict[str, Any] = {}
        model.transformer.h[1].attn.register_forward_pre_hook(
            lambda _, args, given: options.update(given), with_kwargs=True
        )
        return model(make_ids()), options

    expected, options = call(plain)
    out, options_of_connected = call(model)
    assert torch.equal(out, expected)
    assert options == {"attn_mask": None, "need_weights": False}
    assert options_of_connected == {"need_weights": False}


class NamedAttention(nn.Module):
    """An attention whose name in the layer says nothing; `shared`: k and v are one projection."""

    def __init__(self, shared: bool):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.v_proj = self.k_proj if shared else nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class NamedBlock(Block):
    def __init__(self, shared: bool):
        super().__init__()
        self.attn = None
        self.moe_of_heads = NamedAttention(shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe_of_heads(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@pytest.mark.parametrize("shared", [False, True])
def test_an_attention_is_known_by_its_projections(shared):
    """Not by its name. Where one projection is k and v, it has one input."""
    model = GPT()
    model.transformer.h = nn.ModuleList(NamedBlock(shared) for _ in range(2))
    crosslayer.connect(model, "mudd")
    ports = model.transformer.h[1].connections[0].ports
    assert ports == (("mlp",) if shared else ("q", "k", "v"))


class HelpedAttention(NamedAttention):
    def first(self, x: Tensor) -> Tensor:
        return x[:1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y = self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return y + self.first(x)[0].mean()


def test_a_method_that_uses_the_input_has_one_input():
    plain = GPT()
    for block in plain.transformer.h:
        block.attn = HelpedAttention(shared=False)
    plain.eval()
    with pytest.warns(UserWarning, match="one input for q, k and v"):
        model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


class LoopedAttention(NamedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_projections_that_cannot_be_separated_are_named():
    """`mudd` would mix inputs for q, k and v. Other connections and ways do not."""
    model = GPT()
    for block in model.transformer.h:
        block.attn = LoopedAttention(shared=False)
    with pytest.warns(UserWarning, match=r"one input for q, k and v \(LoopedAttention does more"):
        crosslayer.connect(copy.deepcopy(model), "mudd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crosslayer.connect(copy.deepcopy(model), "hyper")
        crosslayer.connect(model, "mudd(ways='qkvr')")


def test_a_wrapped_model_is_refused():
    with pytest.raises(ValueError, match="connect before DataParallel wraps the model"):
        crosslayer.connect(nn.DataParallel(GPT()), "mudd")


def test_connect_leaves_buffers_as_they_are():
    """The check runs the modules beside the layers, which may count or average what they see."""
    model = GPT()
    model.transformer.wpe = nn.Sequential(model.transformer.wpe, nn.BatchNorm1d(DIM))
    model.transformer.wpe.register_buffer("mask", torch.ones(4, 1).expand(4, 4))
    before = {name: value.clone() for name, value in model.named_buffers()}
    crosslayer.connect(model.train(), "mudd")
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Wrapper(nn.Module):
    """As adapters and profilers wrap a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class MaskedBlock(Block):
    def __init__(self):
        super().__init__()
        self.attn = MaskedAttention()

    def forward(self, x, mask=None):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class MaskedAttention(CausalSelfAttention):
    def forward(self, x, mask=None):
        return super().forward(x)


def test_an_argument_without_a_name_is_refused():
    model = GPT().eval()
    model.transformer.h = nn.ModuleList(MaskedBlock() for _ in range(3))
    for block in model.transformer.h:
        block.attn = Wrapper(block.attn)
    with pytest.raises(ValueError, match=r"its attn takes the argument 'mask' through \*args"):
        crosslayer.connect(model, "hyper")
    for block in model.transformer.h:
        block.attn = block.attn.module
    crosslayer.connect(model, "hyper")
    for block in model.transformer.h:
        block.attn = Wrapper(block.attn)
    model(make_ids())


@pytest.mark.parametrize("spec", ["hyper", "altup", "mhc", "attnres", "mudd"])
def test_a_scale_that_no_norm_removes_is_said(spec):
    """A trained model whose head follows the last layer directly."""
    model = GPT().eval()
    model.transformer.ln_f = nn.Identity()
    for block in model.transformer.h:
        nn.init.uniform_(block.ln_1.weight, 0.5, 1.5)
    expected = model(make_ids())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        crosslayer.connect(model, spec)
    is_same = torch.allclose(model(make_ids()), expected, atol=1e-4)
    assert is_same == (spec == "mudd")
    said = [str(warning.message) for warning in caught]
    assert any("no norm beside the layers removes that" in text for text in said) != is_same


class DynamicTanhNorm(nn.Module):
    """A norm without statistics, which keeps a part of the scale of its input."""

    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x)


@pytest.mark.parametrize("place", ["final norm", "first norm of each layer"])
@pytest.mark.parametrize("spec", ["mudd", "hyper", "attnres"])
def test_a_norm_that_keeps_scale_is_said(spec, place):
    model = GPT().eval()
    if place == "final norm":
        model.transformer.ln_f = DynamicTanhNorm()
    nn.init.uniform_(model.transformer.ln_f.weight, 0.5, 1.5)
    for block in model.transformer.h:
        if place == "first norm of each layer":
            block.ln_1 = DynamicTanhNorm()
    expected = model(make_ids())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        crosslayer.connect(model, spec)
    is_same = torch.allclose(model(make_ids()), expected, atol=1e-4)
    assert is_same == (spec == "mudd" or (spec == "hyper" and place != "final norm"))
    said = [str(warning.message) for warning in caught]
    assert any("one of them keeps the scale" in text for text in said) != is_same


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["prenorm", "mudd", "hyper"])
def test_blocks_that_are_checkpointed_compile_to_one_graph(spec):
    """As in torchtitan, where the checkpoint is within what is compiled."""

    def gradients(model):
        model(make_ids()).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    model = perturb_weights(crosslayer.connect(GPT().eval(), spec), 0.05)
    expected = gradients(copy.deepcopy(model))
    torch.compiler.reset()
    for name, block in model.transformer.h.named_children():
        wrapped = checkpoint_wrapper(block)
        wrapped.compile(backend="aot_eager", fullgraph=True)
        model.transformer.h.register_module(name, wrapped)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)


def test_shared_and_compiled_layers_are_refused():
    model = FactorModel(FACTORS["dropout"])
    layers = model.layers
    model.layers = nn.ModuleList([layers[0]] * 4)
    with pytest.raises(ValueError, match="its layers share their weights"):
        crosslayer.connect(model, "mudd")
    model.layers = nn.ModuleList(torch.compile(layer) for layer in layers)
    with pytest.raises(ValueError, match="connect the model first, then compile it"):
        crosslayer.connect(model, "mudd")
    model.layers = layers
    layers[1].compile()
    with pytest.raises(ValueError, match="connect the model first, then compile it"):
        crosslayer.connect(model, "mudd")
    layers[1]._compiled_call_impl = None
    layers[1].attn.compile()  # never run here, so nothing is compiled
    crosslayer.connect(model, "mudd")


def test_a_list_with_places_without_a_module_is_none_of_layers():
    """As x-transformers has it, beside its layers and before them."""
    model = FactorModel(FACTORS["dropout"])
    layers = model.layers
    del model.layers
    model.adaptive = nn.ModuleList([None] * len(layers))
    model.layers = layers
    crosslayer.connect(model, "mudd")


def test_a_layer_that_counts_its_runs_is_refused_and_left_as_it_was():

    def count(block: Any, y: Tensor) -> Tensor:
        if block.training:
            block.runs.add_(1)
        block.log.append(1)
        return y

    model = FactorModel(count)
    for layer in model.layers:
        layer.register_buffer("runs", torch.tensor(0))
        layer.log = []
    with pytest.raises(ValueError, match="in training its own code does something else"):
        crosslayer.connect(model, "hyper")
    assert [(layer.runs.item(), layer.log) for layer in model.layers] == [(0, [])] * 4


class JointAttention(nn.Module):
    """With one projection to q, k and v, of which `connect` has no row."""

    def __init__(self):
        super().__init__()
        self.dim = DIM
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(module, x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).chunk(3, -1)
        return module.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class CopyingAttention(JointAttention):
    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return super().forward(x)


class RenamingAttention(JointAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.training:
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            x = (q @ k.mT).tril() @ v
        return self.out(x)


class ProjectingAttention(JointAttention):
    """What it projects to q, k and v is no longer its input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.out(x)
            x = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        else:
            x = self.out(x)
        return x


ROWS = {
    "three of the width": (JointAttention, lambda each: FusedQKV(1, (DIM,) * 3), ""),
    "a name that is used again": (RenamingAttention, lambda each: FusedQKV(1, (DIM,) * 3), ""),
    "two of the width": (
        JointAttention,
        lambda each: FusedQKV(1, (DIM,) * 2),
        "describes 64 outputs, and the projection has 96",
    ),
    "a typing error": (JointAttention, lambda each: FusedQKV(1, (each.dimm,) * 3), "'dimm'"),
    "another forward": (
        CopyingAttention,
        lambda each: FusedQKV(1, (DIM,) * 3),
        "the forward of CopyingAttention must call self.qkv on its unchanged input",
    ),
}


def test_a_projection_whose_class_adds_no_forward_computes_its_share():
    """As torchtitan's `Linear`. Another class is called once for each of q, k and v."""

    class Linear(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for linear, kind in ((Linear, FusedLinear), (Doubled, FusedProjection)):
        model = GPT()
        for block in model.transformer.h:
            block.attn.c_attn = linear(DIM, 3 * DIM)
        crosslayer.connect(model, "mudd")
        assert type(model.transformer.h[1].attn.c_attn).__mro__[1] is kind


def test_projections_of_what_replaces_the_input_are_not_those_of_the_input():
    assert find_projections(ProjectingAttention()) == ((), None)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_a_fused_projection_is_used_or_refused(row, monkeypatch):
    attention, order, message = ROWS[row]
    monkeypatch.setitem(FUSED_PROJECTIONS, f"{attention.__name__}.qkv", order)
    model = GPT()
    for block in model.transformer.h:
        block.attn = attention()
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            crosslayer.connect(model, "mudd")
    else:
        crosslayer.connect(model, "mudd")
        assert model.transformer.h[1].connections[0].ports == ("q", "k", "v")
