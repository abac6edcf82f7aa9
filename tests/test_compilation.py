"""Compiled backward passes under autocast."""

import pytest
import torch
import torch._functorch.config

from crosslayer.compilation import run_backward_without_autocast
from crosslayer.testing.laws.shared import make_connections, run_connections


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["hyper", "mudd", "attnres"])
def test_gradients_of_coefficients_are_those_of_an_eager_backward(spec, monkeypatch):
    """By torch's default they are computed in bfloat16."""
    sites = [site.float() for site in make_connections(spec, False, layers=1)]
    x = torch.randn(2, 5, 6)
    own = [p for site in sites for p in site.parameters(recurse=False) if p.requires_grad]

    def gradients(run) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(sites, x).square().sum()
        found = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in found])

    expected = gradients(run_connections)

    def error_of_compiled() -> float:
        torch.compiler.reset()
        compiled = gradients(torch.compile(run_connections, backend="aot_eager"))
        return ((compiled - expected).norm() / expected.norm()).item()

    # torch's default, restored after the test
    monkeypatch.setattr(torch._functorch.config, "backward_pass_autocast", "same_as_forward")
    assert error_of_compiled() > 1e-5
    run_backward_without_autocast()
    assert error_of_compiled() < 1e-5
