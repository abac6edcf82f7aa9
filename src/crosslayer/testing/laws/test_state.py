"""The state, which goes from site to site: each read depends on it alone."""

import pickle

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from crosslayer.testing.tiny_model import tiny_gpt, token_ids

from .shared import (
    every_fused,
    every_method,
    every_option,
    every_sequential,
    every_variant,
    make_connections,
    run_connections,
    sublayer_output,
)


@every_method
def test_every_token_is_alone(spec, parallel):
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    order = torch.randperm(6)
    out = run_connections(sites, x)
    torch.testing.assert_close(
        out[:, order], run_connections(sites, x[:, order]), rtol=0, atol=1e-12
    )
    # nor does a token see another sequence
    of_one_token = run_connections(sites, x.reshape(12, 1, 6))
    torch.testing.assert_close(out, of_one_token.view_as(out), rtol=0, atol=1e-12)
    # decoding reads one token of one sequence
    first = run_connections(sites, x[:1, :1])
    torch.testing.assert_close(out[:1, :1], first, rtol=0, atol=1e-12)


@every_method
def test_two_inputs_by_turns(spec, parallel):
    """Two inputs that one model reads alternately, site by site, do not see each other."""
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 1, 4, 6, dtype=torch.float64)
    alone = [run_connections(sites, one_input) for one_input in x]
    states = [sites[0].init(one_input) for one_input in x]
    for k, site in enumerate(sites[:-1]):
        for i in range(2):
            inputs, states[i] = site.read(states[i])
            states[i] = site.write(states[i], sublayer_output(k, inputs))
    for state, expected in zip(states, alone, strict=True):
        assert torch.equal(sites[-1].readout(state), expected)


@every_option
def test_hidden_state_is_an_input_before_its_norm(spec, parallel):
    sites = make_connections(spec, parallel)
    state = sites[0].init(torch.randn(2, 6, 6, dtype=torch.float64))
    for k, site in enumerate(sites):
        hidden = site.hidden_state(state)
        inputs, state_after = site.read(state)
        assert hidden.shape == inputs[0].shape
        # several streams may make one readout, and a split input is none of the stream's
        if len(inputs) == len(site.ports) and not site.splits_inputs:
            torch.testing.assert_close(site.norms[0](hidden), inputs[0], rtol=0, atol=1e-12)
        if not site.is_readout:
            state = site.write(state_after, sublayer_output(k, inputs))


@every_sequential
def test_causal(spec, parallel):
    model = tiny_gpt(spec, parallel).double()
    ids = token_ids()
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=0, atol=1e-12)


@every_sequential
def test_training_and_evaluation_compute_the_same(spec, parallel):
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    outputs = [run_connections([site.train(mode) for site in sites], x) for mode in (True, False)]
    assert torch.equal(*outputs)


@every_option
def test_reads_compute_the_same_without_gradients(spec, parallel):
    """Evaluation and generation run under `no_grad` or in inference mode. A read changes no tensor
    of its state, which the caller may read again.
    """
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = run_connections(sites, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = sites[0].init(x.clone())
            for k, site in enumerate(sites):
                before = [leaf.clone() for leaf in tree_leaves(state) if leaf is not None]
                inputs, state_after = site.read(state)
                after = [leaf for leaf in tree_leaves(state) if leaf is not None]
                assert all(map(torch.equal, before, after)), f"site {k} changes its state in place"
                if not site.is_readout:
                    state = site.write(state_after, sublayer_output(k, inputs))
            torch.testing.assert_close(inputs[0], expected, rtol=0, atol=1e-12)


@every_option
def test_frozen_weights_pass_gradients_on(spec, parallel):
    """As when other parts of a model are trained, like an adapter below its layers."""
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for trained in (True, False):
        for site in sites:
            site.requires_grad_(trained)
        out = run_connections(sites, x)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@every_option
def test_strides_do_not_matter(spec, parallel):
    """The embedding and outputs may be views, as of [T B D] or of a larger tensor."""

    def strided(x: Tensor) -> Tensor:
        wide = x.new_full((x.shape[1], x.shape[0], x.shape[2] + 1), float("nan"))
        view = wide.transpose(0, 1)[..., :-1]
        return view.copy_(x)

    sites = make_connections(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    state = sites[0].init(strided(x))
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        state = site.write(state, strided(sublayer_output(k, inputs)))
    out = sites[-1].readout(state)
    torch.testing.assert_close(out, run_connections(sites, x), rtol=0, atol=1e-12)


@every_variant
def test_state_cuts_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    expected = model(ids)
    for cut in range(len(model.blocks)):
        state = model.readout.init(model.embed_tokens(ids))
        for block in model.blocks[:cut]:
            state = block(state)
        assert hasattr(state, "_fields"), "a state is a NamedTuple"
        leaves, structure = tree_flatten(state)
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves), (
            "a state contains tensors, tuples and None"
        )
        viewed = [leaf._base if leaf is not None and leaf._is_view() else leaf for leaf in leaves]
        assert not any(isinstance(tensor, nn.Parameter) for tensor in viewed), (
            "FSDP would free a parameter that travels in the state, or a view of one: put a clone "
            "in instead"
        )
        cloned = [leaf if leaf is None else leaf.clone() for leaf in leaves]
        state = tree_unflatten(cloned, structure)
        for block in model.blocks[cut:]:
            state = block(state)
        assert torch.equal(model.head(model.readout.readout(state)), expected)


@every_sequential
def test_forward_stores_nothing(spec, parallel):
    model = tiny_gpt(spec, parallel)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    pickled = pickle.dumps(model)
    model(token_ids())
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        for key, value in vars(module).items():
            assert value is before[name][key], f"{name}.{key} changed in forward"
    assert pickle.dumps(model) == pickled, "a container of a module changed in forward"


@every_fused
def test_fused_norms_are_those_of_the_ports(spec, parallel):
    """`fused_read` with the ports' norms gives what `read` gives with the norms as modules."""
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    state = sites[0].init(x)
    fused_sites = 0
    for k, site in enumerate(sites):
        inputs, state_after = site.read(state)
        norms = site.fused_norm_specs()
        if norms:
            fused_sites += 1
            assert len(norms) == len(site.ports)
            fused_inputs, fused_state = site.fused_read(state, norms)
            fused = [*fused_inputs, *tree_leaves(fused_state)]
            for a, b in zip(fused, [*inputs, *tree_leaves(state_after)], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        if k < len(sites) - 1:
            state = site.write(state_after, sublayer_output(k, inputs))
    assert fused_sites, "no site fuses its norms"
