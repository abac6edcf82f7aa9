"""What else a host gives and takes: hidden states, attention weights, router logits, other attention kernels."""

import pytest
import torch
from test_connect import connected, trained

import crosslayer
from tests.hf.backbones import LANGUAGE, checkpoint, ids, inputs, output

recording = pytest.mark.parametrize("family", [*LANGUAGE, "vit"])
methods = pytest.mark.parametrize("arm", crosslayer.available())


@recording
def test_hidden_states_are_the_hosts_under_prenorm(family):
    plain = trained(family)
    expected = plain(**inputs(family), output_hidden_states=True, output_attentions=False)
    model = crosslayer.connect(plain, "prenorm")
    found = model(**inputs(family), output_hidden_states=True)
    assert len(found.hidden_states) == len(expected.hidden_states) == 4
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    as_tuple = model(**inputs(family), output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[-1][1], expected.hidden_states[1])
    model.config.output_hidden_states = True
    assert torch.equal(model(**inputs(family)).hidden_states[2], expected.hidden_states[2])


@recording
@methods
def test_hidden_states_are_what_the_attentions_read(family, arm):
    model = connected(family, arm)
    out = model(**inputs(family), output_hidden_states=True)
    assert torch.equal(out.logits, output(model, family))
    layers = next(
        m
        for m in model.modules()
        if isinstance(m, torch.nn.ModuleList) and hasattr(m[0], "connections")
    )
    for layer, state in zip(layers[1:], out.hidden_states[1:], strict=False):
        assert state.shape == out.hidden_states[0].shape
        read = []
        norms = layer.connections[0].norms
        hook = norms[0].register_forward_pre_hook(lambda module, args: read.append(args[0]))
        model(**inputs(family))
        hook.remove()
        assert torch.equal(read[0], state)


def test_chosen_hidden_states():
    model = connected("llama", "mudd")
    every = model(ids(), output_hidden_states=True).hidden_states
    some = model(ids(), output_hidden_states=[1, 2]).hidden_states
    kept = [state for state in some if state is not None]
    assert len(kept) == 2 and all(any(torch.equal(k, e) for e in every) for k in kept)


def test_hidden_states_have_gradients_and_survive_checkpointing():
    model = connected("llama", "mudd").train()
    expected = model(ids(), output_hidden_states=True).hidden_states
    checkpoint(model, "llama")
    found = model(ids(), output_hidden_states=True).hidden_states
    assert all(map(torch.equal, found, expected))
    found[2].sum().backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
    assert model.model.layers[2].mlp.down_proj.weight.grad is None


def test_hidden_states_in_one_graph():
    model = connected("llama", "mudd")
    # the host puts its hooks on under a lock, which cannot be compiled
    expected = model(ids(), output_hidden_states=True).hidden_states
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_compiled_one_by_one():
    model = connected("llama", "mudd")
    expected = model(ids()).logits
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(ids()).logits, expected)
    assert len(graphs) == 3


@recording
@methods
def test_attention_weights(family, arm):
    model = connected(family, arm, attn_implementation="eager")
    out = model(**inputs(family), output_attentions=True)
    tokens = out.attentions[0].shape[-1]
    assert [tuple(a.shape) for a in out.attentions] == [(2, 4, tokens, tokens)] * 3
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4, tokens))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
@methods
def test_router_logits(family, arm):
    model = connected(family, arm)
    out = model(ids(), labels=ids(), output_router_logits=True)
    assert len(out.router_logits) == 3 and out.aux_loss > 0


# flex's kernel has no use on a CPU, and says so; gpt2 does not have it
@pytest.mark.filterwarnings("ignore")
@recording
@pytest.mark.parametrize("arm", ["prenorm", "mudd"])
@torch.no_grad()
def test_attention_kernels(family, arm):
    model = connected(family, arm, attn_implementation="eager")
    expected = output(model, family)
    for kernel in ("sdpa", "flex_attention"):
        if kernel == "sdpa" and family == "gemma2":  # whose soft-capped scores sdpa does not have
            continue
        if kernel == "flex_attention" and not model._supports_flex_attn:
            continue
        model.set_attn_implementation(kernel)
        torch.testing.assert_close(output(model, family), expected, rtol=1e-4, atol=1e-4)
