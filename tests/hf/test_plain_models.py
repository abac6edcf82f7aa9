"""Models of plain torch, with nanoGPT's names and layout."""

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.connections.mudd import Mudd
from crosslayer.hf import reset_connections
from crosslayer.hf.hidden_states import StreamUseError
from crosslayer.testing.tiny_model import equal_tensors, perturb_weights
from crosslayer.train.diagnostics import connection_diagnostics
from tests.hf.plain_models import (
    DIM,
    FACTORS,
    GPT,
    LISTS,
    Block,
    CausalSelfAttention,
    FactorModel,
    make_ids,
    model_of,
)

CONNECTIONS = ["mudd", "hyper", "denseformer", "mhc"]


def test_new_widths_need_initial_values():
    with pytest.raises(ValueError, match="reallocate makes new projections, and ModuleDict has no"):
        crosslayer.connect(GPT(), "mudd", reallocate=True)


@pytest.mark.parametrize(
    "spec", ["mudd(normed='every way')", "resi_dual", "hyper(output_scale='1/sqrt(n)')"]
)
def test_connected_before_there_are_weights(spec):
    """The meta device, empty memory, the model's own initialisation by name, then theirs."""
    plain = GPT()
    torch.manual_seed(5)
    expected = crosslayer.connect(copy.deepcopy(plain), spec).state_dict()
    with torch.device("meta"):
        model = crosslayer.connect(GPT(), spec)
    with pytest.raises(ValueError, match=r"is on the meta device; call model.to_empty"):
        reset_connections(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        for name, value in plain.named_parameters(remove_duplicate=False):
            model.get_parameter(name).copy_(value)
    reset_connections(model)
    assert equal_tensors(model.state_dict(), expected)
    with pytest.raises(ValueError, match="no connections to reset"):
        reset_connections(plain)


class WrappedNorm(nn.Module):
    """With its weights in a child, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def test_owned_norms_of_any_class_are_reset():
    model = GPT().eval()
    for block in model.transformer.h:
        block.ln_1 = WrappedNorm()
    crosslayer.connect(model, "mudd")
    expected = model(make_ids())
    for name, tensor in model.state_dict().items():
        if ".connection" in name:
            tensor.fill_(torch.nan)
    reset_connections(model)
    assert torch.equal(model(make_ids()), expected)


def test_connections_of_a_frozen_model_learn():
    plain = GPT().requires_grad_(False)
    for spec in ("mudd", "resi_dual"):
        model = crosslayer.connect(copy.deepcopy(plain), spec)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {name for name, _ in plain.named_parameters()}


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


def test_diagnostics_of_numbered_layers():
    model = crosslayer.connect(GPT("dict"), "mudd")
    found = connection_diagnostics(model, lambda: model(make_ids()))
    assert len(found) > 0 and all(math.isfinite(value) for value in found.values())


ORDERS = {
    "twice": (lambda layers: [*layers, *layers], "it runs layers.0 after layer 3"),
    "from the last": (reversed, "it runs layers.3 after the embedding"),
    "some": (lambda layers: layers[:3], "it runs 3 of its 4 layers"),
}


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
    "its 'mean'": lambda hidden, host: hidden.mean(),
    r"parts of it but a slice of the tokens, like \[:, -1:\]": lambda hidden, host: hidden[:, -1],
    "an element of it": lambda hidden, host: host.h[1](hidden[0]),
}


@pytest.mark.parametrize("use", STREAM_USES)
def test_what_a_host_cannot_do_with_a_state(use):
    host = crosslayer.connect(GPT().eval(), "hyper").transformer
    hidden = host.h[0](torch.zeros(2, 5, DIM))
    with pytest.raises(StreamUseError, match=f"the host cannot use {use} there"):
        STREAM_USES[use](hidden, host)


def test_a_state_takes_no_attribute():
    hidden = crosslayer.connect(GPT(), "hyper").transformer.h[0](torch.zeros(2, 5, DIM))
    with pytest.raises(AttributeError, match="immutable: 'mask' cannot be set"):
        hidden.mask = None


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
        self.stem = nn.Sequential(Block(), Block())
        self.last = nn.Sequential(Block(), nn.LayerNorm(DIM))
        self.layers = layers

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.stem(self.last(self.embed(ids)))


class PoolingModel(FactorModel):
    """It has timm's two norms, and uses one of them, before or after it pools its tokens."""

    def __init__(self, norm: nn.Module, fc_norm: nn.Module):
        super().__init__(FACTORS["by depth"])
        self.norm, self.fc_norm = norm, fc_norm

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc_norm(super().forward(ids).mean(1))


def test_a_sequence_beside_the_list_of_layers_is_not_connected():
    plain = StemModel().eval()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(model(make_ids()), plain(make_ids()))
    names = [name for name, module in model.named_modules() if isinstance(module, Mudd)]
    assert len(names) == 9 and not any(name.startswith(("stem", "last")) for name in names)


def test_a_sequence_of_layers_and_other_modules_is_refused():
    model = GPT()
    model.transformer["h"] = nn.Sequential(nn.Linear(DIM, DIM), Block(), Block())
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


def test_the_width_may_be_known_by_the_embeddings_alone():
    plain = model_of(NormedSublayersBlock)
    plain.transformer["ln_f"] = nn.Identity()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    torch.testing.assert_close(model(make_ids()), plain(make_ids()), rtol=0, atol=1e-6)
    plain.transformer["wpe"] = nn.Embedding(16, DIM + 1)
    with pytest.raises(ValueError, match="no hidden_size, and no embeddings of one width"):
        crosslayer.connect(plain, "mudd")


def test_a_list_of_embeddings_is_none_of_layers():
    plain = GPT().eval()
    tables = nn.ModuleList(nn.Embedding(4, DIM) for _ in plain.transformer.h)
    plain.transformer = nn.ModuleDict({"tables": tables, **plain.transformer})
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(make_ids()), plain(make_ids()))


def test_a_wrapped_model_is_refused():
    with pytest.raises(ValueError, match="connect before DataParallel wraps the model"):
        crosslayer.connect(nn.DataParallel(GPT()), "mudd")


class ReaddingGPT(GPT):
    """Adds the embedding again after each layer."""

    def forward(self, ids):
        parts = self.transformer
        embedding = parts.drop(parts.wte(ids))
        x = embedding
        for block in parts.h:
            x = block(x) + 0.1 * embedding
        return self.lm_head(parts.ln_f(x))


def test_a_sum_between_layers_is_refused():
    """Of layers in an `nn.ModuleDict`, which has no forward, and beside dropout in training."""
    model = ReaddingGPT()
    model.transformer["drop"] = nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"changes the stream after transformer\.h\.0 \(torch"):
        crosslayer.connect(model.train(), "mudd")
    assert not any("connections" in name for name, _ in model.named_modules())


def test_connect_leaves_buffers_as_they_are():
    """The check runs the modules beside the layers, which may count or average what they see."""
    model = GPT()
    model.transformer.wpe = nn.Sequential(model.transformer.wpe, nn.BatchNorm1d(DIM))
    model.transformer.wpe.register_buffer("mask", torch.ones(4, 1).expand(4, 4))
    before = {name: value.clone() for name, value in model.named_buffers()}
    crosslayer.connect(model.train(), "mudd")
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())


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
@pytest.mark.parametrize("spec", ["mudd", "hyper", "attnres", "mgr(streams=8)"])
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
