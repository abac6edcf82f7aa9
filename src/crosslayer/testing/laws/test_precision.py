"""bf16, float16, autocast and float32 streams."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.testing.tiny_model import perturb_weights, tiny_gpt, token_ids

from .shared import (
    every_method,
    every_option,
    every_sequential,
    every_variant,
    every_variant_twice,
    make_connections,
    run_connections,
    sublayer_output,
)


def in_float32(function, *state):
    """The result of `function` computed in float32 throughout and rounded to bf16 where it is."""
    wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, state)
    return tree_map(
        lambda x, like: x.to(like.dtype) if isinstance(x, Tensor) else x,
        function(*wide),
        function(*state),
    )


@every_method
def test_a_bf16_model_keeps_coefficients_in_float32(spec, parallel):
    exact = tiny_gpt(spec, parallel).double()
    model = copy.deepcopy(exact).float().bfloat16()
    for connection in find_connections(model):
        assert all(p.dtype == torch.float32 for p in connection.parameters(recurse=False))
        assert all(p.dtype == torch.bfloat16 for p in connection.norms.parameters())
    logits = model(token_ids())
    assert logits.dtype == torch.bfloat16, (
        "the streams became wider than the model: cast to the stream's dtype after a product with "
        "a float32 coefficient"
    )
    prenorm = tiny_gpt("prenorm", parallel).double()
    rounded = copy.deepcopy(prenorm).float().bfloat16()(token_ids()).double()
    rounding = (rounded - prenorm(token_ids())).norm()
    error = (logits.double() - exact(token_ids())).norm()
    assert error < 3 * rounding, "a connection may lose at most 3 times what a plain residual does"


@every_option
def test_mixing_weights_of_bf16_streams_are_float32(spec, parallel):
    """A method need not have them."""
    if crosslayer.make(spec).method.mixing_weights is crosslayer.Connection.mixing_weights:
        pytest.skip("the method has no mixing_weights")
    sites = [site.float() for site in make_connections(spec, parallel)]
    for site in sites:
        site.norms.bfloat16()
    state = sites[0].init(torch.randn(2, 5, 6).bfloat16())
    for k, site in enumerate(sites):
        weights = site.mixing_weights(state)
        matrices = {"write": weights.write, "read": weights.read, "carry": weights.carry}
        rounded = {name: m.dtype for name, m in matrices.items() if m.dtype != torch.float32}
        assert not rounded, f"site {k}: {rounded}"
        if not site.is_readout:
            inputs, state = site.read(state)
            state = site.write(state, sublayer_output(k, inputs))


@every_variant
def test_bf16_error_is_at_most_twice_the_float32_internal_reference(spec, parallel):
    """The reference reads every bf16 state in float32 throughout and rounds its results alone."""
    dim = 48
    make = crosslayer.make(spec)
    sites = [make(site, dim, lambda port: nn.Identity()) for site in crosslayer.plan(4, parallel)]
    exact = [perturb_weights(site.double()) for site in sites]
    sites = [copy.deepcopy(site).float() for site in exact]
    x = torch.randn(4, 32, dim).bfloat16()

    def reference(sites, x):
        state = sites[0].init(x)
        for k, site in enumerate(sites[:-1]):
            inputs, state = in_float32(site.read, state)
            state = site.write(state, sublayer_output(k, inputs))
        return in_float32(sites[-1].readout, state)

    truth = run_connections(exact, x.double())
    error = (run_connections(sites, x).double() - truth).norm()
    reference_error = (reference(sites, x).double() - truth).norm()
    assert error <= 2 * reference_error


@every_variant_twice
def test_float16_has_the_range_of_prenorm(spec, parallel):
    """A sum of streams does not overflow before the norm that follows it."""
    make = crosslayer.make(spec)
    x = torch.full((1, 1, 6), 5e4, dtype=torch.float16, requires_grad=True)
    for eps in (1e-6, None):
        norm = lambda port: nn.RMSNorm(6, eps=eps)  # noqa: E731
        sites = [make(site, 6, norm).half() for site in crosslayer.plan(4, parallel)]
        out = run_connections(sites, x)
        assert out.isfinite().all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@every_variant
def test_a_model_of_any_default_dtype(spec, parallel):
    """Under a float64 default all is float64; under a bf16 default initial values stay float32."""
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert tiny_gpt(spec, parallel)(token_ids()).dtype == torch.float64
        torch.set_default_dtype(torch.bfloat16)
        half = tiny_gpt(spec, parallel, perturbed=False)
    finally:
        torch.set_default_dtype(usual)
    full = tiny_gpt(spec, parallel, perturbed=False)
    for one, other in zip(find_connections(half), find_connections(full), strict=True):
        for name, value in one.named_parameters(recurse=False):
            expected = other._parameters[name]
            assert value.dtype == expected.dtype, f"{name}: use float32_parameter"
            assert torch.equal(value, expected), name


@every_variant
def test_autocast_leaves_coefficients_in_float32(spec, parallel):
    """At every site: the first ones of most methods mix nothing."""
    sites = [site.float() for site in make_connections(spec, parallel)]
    state = sites[0].init(torch.randn(2, 8, 6))
    for k, site in enumerate(sites):
        with torch.autocast("cpu", torch.bfloat16):
            read = site.read(state)
        expected = site.read(state)
        for x, y in zip(tree_leaves(read), tree_leaves(expected), strict=True):
            assert x is y or torch.equal(x, y), f"site {k} computes in bf16 under autocast"
        if not site.is_readout:
            inputs, state = expected
            state = site.write(state, sublayer_output(k, inputs))


@every_variant
def test_half_precision_outputs_are_summed_in_the_embeddings_dtype(spec, parallel):
    """Under autocast sub-layers return bf16: the streams lose no more than those outputs did.

    The writes are exact in bf16, so summed in float32 they are what float32 writes would be.
    """
    sites = [site.float() for site in make_connections(spec, parallel, layers=5)]
    x = torch.randn(2, 8, 6)
    states = [sites[0].init(x), sites[0].init(x)]
    with torch.autocast("cpu", torch.bfloat16):
        for k, site in enumerate(sites[:-1]):
            inputs, states[0] = site.read(states[0])
            _, states[1] = site.read(states[1])
            y = sublayer_output(k, inputs).bfloat16()
            states = [site.write(states[0], y), site.write(states[1], y.float())]
        half, full = (sites[-1].readout(state) for state in states)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=1e-5, atol=1e-6)


@every_sequential
def test_stream_dtype_is_the_dtype_of_the_streams(spec, parallel):
    """Float32 streams in a bf16 model: they are those of a float32 model with the same writes."""
    sites = [site.float() for site in make_connections(f"{spec}(stream_dtype='float32')", parallel)]
    bf16_sites = [copy.deepcopy(site).bfloat16() for site in sites]
    for site, bf16_site in zip(sites, bf16_sites, strict=True):
        site.norms.load_state_dict(bf16_site.norms.state_dict())
    x = torch.randn(2, 8, 6).bfloat16()
    bf16_state = bf16_sites[0].init(x)
    state = sites[0].init(x.float())
    for k, (bf16_site, site) in enumerate(zip(bf16_sites[:-1], sites[:-1], strict=True)):
        inputs, bf16_state = bf16_site.read(bf16_state)
        _, state = site.read(state)
        assert all(x.dtype == torch.bfloat16 for x in inputs)
        torch.testing.assert_close(bf16_state, state, rtol=1e-5, atol=1e-6)
        y = sublayer_output(k, inputs)
        bf16_state = bf16_site.write(bf16_state, y)
        state = site.write(state, y.float())
    hidden = bf16_sites[-1].readout(bf16_state)
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.float(), sites[-1].readout(state), rtol=2e-2, atol=2e-2)
