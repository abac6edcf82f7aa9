"""Hooks on a connected model: what docs/your-model.md says of them, or an error or a warning."""

import warnings

import pytest
import torch
from transformers import BertConfig, BertModel, BloomConfig, BloomModel

from crosslayer.hf import connect
from tests.hf.backbones import SIZES, connected

IDS = torch.tensor([[5, 3, 8, 1, 9, 2]])
VECTOR = torch.linspace(-1, 1, SIZES["hidden_size"])
STATE = "no hidden state, and cannot replace it by one; docs/your-model.md, Hooks"


@pytest.fixture(params=["prenorm", "mudd", "hyper", "attnres"])
def model(request):
    return connected("llama", request.param)


@pytest.mark.parametrize(
    "hook",
    [
        lambda layer, args, output: (output[0] + 1.0, *output[1:]),
        lambda layer, args, output: (1.0 + output[0], *output[1:]),
        lambda layer, args, output: (output[0].clone(), *output[1:]),
        lambda layer, args, output: torch.zeros(1, 6, 32),
        lambda layer, args, output: (torch.zeros(1, 6, 32),),
    ],
)
def test_a_hook_on_a_layer_that_wants_a_hidden_state_is_an_error(model, hook):
    """The tensors that a layer returns are parts of a state, the first one often the embedding."""
    model.model.layers[1].register_forward_hook(hook)
    with pytest.raises((AttributeError, TypeError), match=STATE):
        model(IDS)


def test_a_hook_on_what_a_layer_gets(model):
    """The first layer gets the embedding, each other one a state."""
    plain = model(IDS).logits
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    assert not torch.allclose(model(IDS).logits, plain)
    handle.remove()
    for replace in (
        lambda _, args: (2 * args[0], *args[1:]),
        lambda _, args: (torch.zeros(1, 6, SIZES["hidden_size"]),),
    ):
        handle = model.model.layers[1].register_forward_pre_hook(replace)
        with pytest.raises(TypeError, match=STATE):
            model(IDS)
        handle.remove()


def test_a_hook_that_changes_nothing(model):
    plain = model(IDS).logits
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model.model.layers[1].register_forward_hook(lambda layer, args, output: list(output))
    assert torch.equal(model(IDS).logits, plain)
    assert type(model.model.layers[1]) in seen


def bert():
    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    return connect(BertModel(config), "postnorm").eval()


def bloom():
    config = BloomConfig(vocab_size=16, hidden_size=16, n_layer=2, n_head=2)
    return connect(BloomModel(config), "hyper").eval()


@pytest.mark.parametrize(
    ("build", "layer", "path"),
    [
        (bert, "encoder.layer.1", "attention.output"),
        (bert, "encoder.layer.0", "output"),
        (bloom, "h.1", "mlp"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_on_modules_that_are_not_called_are_told(build, layer, path, kind):
    model = build()
    handle = getattr(model.get_submodule(f"{layer}.{path}"), kind)(lambda *_: None)
    with pytest.warns(UserWarning, match=rf"the hooks on {path} of layer {layer[-1]} do not run"):
        model(IDS)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        model(IDS, output_hidden_states=True)  # transformers puts hooks of its own there
        model(IDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + VECTOR,
        lambda x: VECTOR + x,
        lambda x: x - (-VECTOR),
        lambda x: (2 * x + 2 * VECTOR) / 2,
        lambda x: (x + x + 2 * VECTOR) * 0.5,
        lambda x: VECTOR - (x * -1),
        lambda x: x @ torch.eye(len(VECTOR)) + VECTOR,
        lambda x: tuple(port + VECTOR for port in x),
        lambda x: [port + VECTOR for port in x],
        lambda x: type(x)(port + VECTOR for port in x),
    ],
)
def test_steering_what_an_attention_reads(change):
    """With MUDD it reads three inputs: a vector joins each of them, as it would join the one."""
    model = connected("llama", "mudd")
    attention = model.model.layers[1].self_attn
    plain = model(IDS).logits
    handles = [
        projection.register_forward_pre_hook(lambda _, args: (args[0] + VECTOR,))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    expected = model(IDS).logits
    assert not torch.allclose(expected, plain)
    for handle in handles:
        handle.remove()
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}),
        with_kwargs=True,
    )
    torch.testing.assert_close(model(IDS).logits, expected)
