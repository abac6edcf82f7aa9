"""What a layer's own code may do with its stream, and what `connect` refuses."""

import copy
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.hf.attach import find_backbone
from crosslayer.hf.verification import verify_wiring
from crosslayer.recompute import enable_recompute
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.plain_models import (
    DIM,
    FACTORS,
    GPT,
    Block,
    CausalSelfAttention,
    FactorModel,
    make_ids,
    model_of,
    output_and_gradients,
)

COMPUTED = "what it does depends on its own parameters or buffers, or on the shape of its input"
IN_TRAINING = "in training its own code does something else than in evaluation"
REFUSED_FACTORS = {
    "a function of a parameter": (lambda block, y: torch.tanh(block.alpha) * y, COMPUTED),
    "the positive part": (lambda block, y: block.alpha.relu() * y, COMPUTED),
    "at most 2": (lambda block, y: block.alpha.clamp(max=2) * y, COMPUTED),
    "at least 0.1": (lambda block, y: block.gains.clamp(min=0.1) * y, COMPUTED),
    "a sign": (lambda block, y: y if block.alpha > 0 else -y, COMPUTED),
    "a length": (lambda block, y: math.log(y.shape[1]) * y, COMPUTED),
    "a number of sequences": (lambda block, y: y / y.shape[0], COMPUTED),
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
    "a dropout by length": (
        lambda block, y: F.dropout(y, 0.1 * y.shape[1], block.training),
        COMPUTED,
    ),
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
        "attn gets what the layer computes with its own parameters",
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


@pytest.mark.parametrize("factor", FACTORS)
def test_factors_are_kept(factor):
    """Of each layer and in training: learned ones learn, and others may depend on the depth."""
    torch.manual_seed(0)
    plain = FactorModel(FACTORS[factor])
    expected, expected_gradients = output_and_gradients(plain)
    output, gradients = output_and_gradients(crosslayer.connect(copy.deepcopy(plain), "prenorm"))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def random_states() -> tuple[Any, ...]:
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy


def test_connect_draws_no_random_numbers():
    """But for a connection's own parameters, of which this one has none."""
    model, before = model_of(Block), random_states()
    crosslayer.connect(model, "prenorm")
    assert random_states() == before


@pytest.mark.parametrize("factor", REFUSED_FACTORS)
def test_factors_that_are_refused(factor):
    scale, message = REFUSED_FACTORS[factor]
    model, before = FactorModel(scale), random_states()
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(model, "prenorm")
    assert random_states() == before


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
        verify_wiring(plain, backbone, wiring._replace(of_layers=(layer_wiring,) * 3))


@pytest.mark.parametrize("activation", REFUSED_ACTIVATIONS)
def test_activations_that_are_refused(activation):
    activate, message = REFUSED_ACTIVATIONS[activation]
    with pytest.raises(ValueError, match=message):
        crosslayer.connect(WrittenMLPModel(activate), "prenorm")


class InnerNormBlock(WrittenMLPBlock):
    """A norm of its hidden width is the first of its modules."""

    def __init__(self):
        super().__init__(lambda block, y: block.inner(y))
        self._modules = {"inner": nn.LayerNorm(3 * DIM), **self._modules}


def test_the_width_is_that_of_the_final_norm():
    plain = FactorModel(FACTORS["by depth"])
    plain.layers = nn.ModuleList(InnerNormBlock() for _ in range(3))
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


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
        self.mlpf = lambda x, *, factor=1: factor * mlp.c_proj(mlp.gelu(mlp.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


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


class SequencesBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> int:
        return x.shape[0]


class RolledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x)).roll(1, 0)
        return x + self.mlp(self.ln_2(x))


class FlatBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x).flatten(0, 1)).view(x.shape)


class NumberedBlock(Block):
    """It reads the number of a module, by which layers of one kind may differ."""

    def __init__(self):
        super().__init__()
        self.attn.layer_idx = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x)) * (0.5 if self.attn.layer_idx == 0 else 1)
        return x + self.mlp(self.ln_2(x))


class LoggingBlock(Block):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x.mean())
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NamedBlock(Block):
    def __init__(self):
        super().__init__()
        self.wiring = "copper"


class TrainingBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> bool:
        return not self.training


class MaskBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1])


class TableBlock(ConstantBlock):
    def is_doubled(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.ones(1),)


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


class NoInputBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp()


class ByTurnsBlock(Block):
    """One module unpacked into two names, then into three."""

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attn(self.ln_1(x))
        x = x + y
        y, _, _ = self.attn(self.ln_2(x))
        return x + y


def test_a_module_of_two_names():
    plain = model_of(RenamedBlock)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))
    assert model.state_dict().keys() >= plain.state_dict().keys()


def test_functions_that_know_modules():
    model = model_of(FunctionBlock)
    expected = model(make_ids())
    assert torch.equal(crosslayer.connect(model, "mudd")(make_ids()), expected)
    model.transformer.h[1].mlp.c_proj = nn.Linear(4 * DIM, DIM)  # which the function does not know
    assert not torch.equal(model(make_ids()), expected)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (IdleBlock, r"layer 0 \(IdleBlock\): its ln_3 does not run in the forward passes that"),
        (InPlaceBlock, r"connect cannot connect layer 0 \(InPlaceBlock\): .* in-place operation"),
        (ListedBlock, "layer 0 is a ListedBlock, whose modules the model runs and adds up itself"),
        (LengthBlock, "what it does depends on .* the shape of its input"),
        (SequencesBlock, "what it does depends on .* the shape of its input"),
        (RolledBlock, "what it does depends on .* the shape of its input"),
        (FlatBlock, r"it gives mlp its input in another shape, \[.*; reshape it in that module"),
        (NumberedBlock, "layer_idx"),
        (LoggingBlock, "sets log"),
        (NamedBlock, "has an attribute 'wiring', which a connected layer needs"),
        (TrainingBlock, "in training its own code does something else"),
        (MaskBlock, "it gives attn a tensor that it makes itself, 'doubled'; if it is a mask"),
        (TableBlock, r"it gives attn an argument that it makes itself, doubled=\(tensor"),
        (DeviceBlock, "it gives attn an argument that it makes itself, doubled=device"),
        (TwoWayBlock, "what attn returns joins the stream in two ways"),
        (ComparingBlock, "its own code compares the argument 'mode' with 'attention'"),
        (NoInputBlock, "it calls mlp without an input"),
        (ByTurnsBlock, r"does more than to call its modules \(ValueError: .*values to unpack"),
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


class DetachedBlock(Block):
    """Its output is a Block's, and its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x)).detach()
        return x + self.mlp(self.ln_2(x))


def test_another_gradient_is_seen():
    with pytest.raises(ValueError, match="connect would change what layer 0"):
        crosslayer.connect(model_of(DetachedBlock), "prenorm")


def test_a_constant_that_is_left_out_is_seen():
    backbone, wiring = find_backbone(model_of(ConstantBlock))
    layer = wiring.of_layers[0]
    sites = tuple(tuple(sub._replace(preset_arguments=()) for sub in site) for site in layer.sites)
    planted = wiring._replace(of_layers=(layer._replace(sites=sites),) * len(wiring.of_layers))
    with pytest.raises(ValueError, match="connect would change what layer 0"):
        verify_wiring(backbone, backbone, planted)


@pytest.mark.parametrize("scale", [1 + 1e-5, math.nan])
def test_a_wrong_scale_is_seen(scale):
    """Of a layer whose modules are those of another, which has the right one."""
    backbone, wiring = find_backbone(model_of(Block))
    first, last = wiring.of_layers
    sites = tuple(tuple(sub._replace(scale=scale) for sub in site) for site in last.sites)
    changed = wiring._replace(of_layers=(first, last._replace(sites=sites)))
    with pytest.raises(ValueError, match="connect would change what layer 1"):
        verify_wiring(backbone, backbone, changed)


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
    with pytest.raises(ValueError, match="sets log"):
        crosslayer.connect(model, "hyper")
    assert [(layer.runs.item(), layer.log) for layer in model.layers] == [(0, [])] * 4


def test_a_layer_that_draws_random_numbers_of_its_own_is_refused_and_left_as_it_was():

    def draw(block: Any, y: Tensor) -> Tensor:
        return y + 0 * torch.rand((), generator=block.generator) if block.training else y

    model = FactorModel(draw)
    for layer in model.layers:
        layer.generator = torch.Generator()
    before = model.layers[0].generator.get_state()
    with pytest.raises(ValueError, match=IN_TRAINING):
        crosslayer.connect(model, "hyper")
    assert torch.equal(model.layers[0].generator.get_state(), before)


class FlaggedBlock(Block):
    """Its arguments have names that are common."""

    def forward(self, x: Tensor, is_first: bool = False, records: Any = None) -> Tensor:
        return super().forward(x)


class FlaggedGPT(GPT):
    def forward(self, ids: Tensor, output_hidden_states: bool = False) -> Any:
        x = self.transformer.wte(ids)
        hidden = [x]
        for number, block in enumerate(self.transformer.h):
            x = block(x, is_first=number == 0)
            hidden.append(x)
        x = self.transformer.ln_f(x)
        return (x, hidden) if output_hidden_states else x


def test_common_names_of_arguments():
    model = FlaggedGPT()
    model.transformer.h = nn.ModuleList(FlaggedBlock() for _ in range(2))
    model.eval()
    plain = copy.deepcopy(model)
    crosslayer.connect(model, "prenorm")
    out, hidden = model(make_ids(), output_hidden_states=True)
    assert torch.equal(out, plain(make_ids())) and len(hidden) == 3


def test_a_class_that_a_projection_gets_later_is_no_projection_of_connect():
    model = crosslayer.connect(model_of(Block), "mudd")
    projection = model.transformer.h[1].attn.c_attn
    nn.utils.parametrize.register_parametrization(projection, "weight", nn.Identity())
    expected = model(make_ids())
    with pytest.raises(ValueError, match="c_attn was given another class after connect"):
        crosslayer.disconnect(model)
    assert torch.equal(model(make_ids()), expected)
    nn.utils.parametrize.remove_parametrizations(projection, "weight")
    crosslayer.disconnect(model)


class CutGPT(GPT):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)[:, -5:]
        return self.transformer.ln_f(x)


@pytest.mark.parametrize("spec", ["hyper", "mudd"])
def test_tokens_may_be_taken_where_states_are_recomputed(spec):
    stored = perturb_weights(crosslayer.connect(CutGPT().eval(), spec), 0.05)
    recomputed = copy.deepcopy(stored)
    enable_recompute(find_connections(recomputed), "streams")
    for model in (stored, recomputed):
        model(make_ids()).square().mean().backward()
    for (name, p), q in zip(stored.named_parameters(), recomputed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
