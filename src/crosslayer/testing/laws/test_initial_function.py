"""What a model computes at initialisation, as its connections declare it."""

import pytest
import torch
from torch import Tensor, nn

import crosslayer
from crosslayer.connection import PRENORM_FUNCTIONS, find_connections
from crosslayer.testing.tiny_model import TESTED_SPECS, tiny_gpt, token_ids, without_eps

from .shared import every_variant_twice, sublayer_output

SITES = crosslayer.plan(layers=2)


def initial_function(spec: str) -> str:
    """What a model with this connection computes at first; "other" where its sites differ."""
    sites = [crosslayer.make(spec)(site, 6, lambda port: nn.RMSNorm(6)) for site in SITES]
    functions = {site.initial_function for site in sites}
    return functions.pop() if len(functions) == 1 else "other"


def specs_that_start_as(*functions: str) -> list[str]:
    return [spec for spec in TESTED_SPECS if initial_function(spec) in functions]


def first_reads(
    spec: str, norm: type[nn.Module] = nn.Identity, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """What each sub-layer reads at its first port at initialisation, and the readout."""
    sites = [crosslayer.make(spec)(site, 6, lambda port: norm(6)).to(dtype) for site in SITES]
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    state = sites[0].init(x)
    reads = []
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        reads.append(inputs[0])
        state = site.write(state, sublayer_output(k, inputs[:1]))
    return [*reads, sites[-1].readout(state)]


@every_variant_twice
def test_starts_as_prenorm_where_it_says_so(spec, parallel):
    prenorm = tiny_gpt("prenorm", parallel, eps=0.0, perturbed=False).double()
    model = tiny_gpt(without_eps(spec), parallel, eps=0.0, perturbed=False).double()
    for key in prenorm.state_dict().keys() & model.state_dict().keys():
        assert torch.equal(prenorm.state_dict()[key], model.state_dict()[key]), (
            "building a connection must not change the backbone's weights"
        )
    error = (model(token_ids()) - prenorm(token_ids())).abs().max()
    functions = {connection.initial_function for connection in find_connections(model)}
    if functions <= set(PRENORM_FUNCTIONS):
        assert error < 1e-12, (
            "it does not start as pre-norm: mend reset_parameters, or declare "
            '`initial_function = "other"`, in __init__ where that depends on options'
        )
    else:
        assert error > 1e-3, (
            "it starts as pre-norm: declare initial_function as one of "
            + ", ".join(map(repr, PRENORM_FUNCTIONS))
        )


@every_variant_twice
def test_starts_bitwise_as_prenorm_where_it_says_so(spec, parallel):
    prenorm = tiny_gpt("prenorm", parallel, perturbed=False)(token_ids())
    model = tiny_gpt(spec, parallel, perturbed=False)
    is_bitwise = torch.equal(model(token_ids()), prenorm)
    declared = {connection.initial_function for connection in find_connections(model)}
    assert is_bitwise == (declared == {"bitwise prenorm"}), (
        f"its first logits are {'' if is_bitwise else 'not '}bitwise those of pre-norm: declare "
        f"another initial_function than {', '.join(sorted(declared))}"
    )


@pytest.mark.parametrize(
    "spec", specs_that_start_as(*{*PRENORM_FUNCTIONS} - {"prenorm up to scales"})
)
def test_scales_nothing_else_than_it_says(spec):
    """At initialisation, where no norm removes a scale."""
    function = initial_function(spec)
    *inputs, hidden = first_reads(without_eps(spec))
    *prenorm_inputs, prenorm_hidden = first_reads("prenorm")
    assert all(map(torch.allclose, inputs, prenorm_inputs)), (
        'it scales inputs of sub-layers: declare `initial_function = "prenorm up to scales"`'
    )
    if function != "prenorm up to scale of readout":
        assert torch.allclose(hidden, prenorm_hidden), (
            'it scales the readout: declare `initial_function = "prenorm up to scale of readout"`'
        )


@pytest.mark.parametrize("spec", specs_that_start_as("bitwise postnorm"))
def test_is_postnorm_where_it_says_so(spec):
    """x ← Norm(x + F(x)), the embedding normed too, bit for bit."""
    norm = nn.RMSNorm(6)
    h = norm(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4)))
    expected = []
    for k in range(4):
        expected.append(h)
        h = norm(h + sublayer_output(k, (h,)))
    assert all(map(torch.equal, first_reads(spec, nn.RMSNorm, torch.float32), [*expected, h]))
