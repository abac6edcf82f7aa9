"""Derivatives of first and second order, and transformations by torch.func."""

import torch
from torch import Tensor

from .shared import (
    every_option,
    every_sequential,
    every_variant,
    every_variant_slow,
    make_connections,
    run_connections,
)


@every_variant
def test_gradcheck(spec, parallel):
    sites = make_connections(spec, parallel, dim=6, layers=2)
    x = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    parameters = [p for site in sites for p in site.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(
        lambda x, *_: run_connections(sites, x), (x, *parameters), fast_mode=True
    )


@every_variant_slow
def test_second_derivatives(spec, parallel):
    """A Hessian-vector product, through `create_graph` and through `torch.func`, equals the
    difference of two gradients.
    """
    sites = make_connections(spec, parallel, dim=6, layers=2)
    x, v = torch.randn(2, 1, 2, 6, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return run_connections(sites, x).square().sin().sum()

    def gradient(x: Tensor, create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(loss(x), x, create_graph=create_graph)[0]

    step = 1e-5
    above, below = ((x + s * v).requires_grad_() for s in (step, -step))
    expected = (gradient(above) - gradient(below)) / (2 * step)
    x.requires_grad_()
    (twice,) = torch.autograd.grad(gradient(x, create_graph=True), x, v)
    _, transformed = torch.func.jvp(torch.func.grad(loss), (x.detach(),), (v,))
    for product in (twice, transformed):
        assert (product - expected).norm() < 1e-5 * expected.norm()


@every_variant_slow
def test_vectorised_jacobian(spec, parallel):
    """All rows of a Jacobian in one backward pass: every gradient has one more axis."""
    sites = make_connections(spec, parallel, layers=2)
    x = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for site in sites for p in site.parameters() if p.requires_grad)]
    y = run_connections(sites, x).flatten()
    options = {"retain_graph": True, "allow_unused": True}
    rows = [torch.autograd.grad(row, inputs, **options) for row in y]
    basis = torch.eye(len(y), dtype=y.dtype)
    jacobians = torch.autograd.grad(y, inputs, basis, is_grads_batched=True, allow_unused=True)
    for jacobian, of_rows in zip(jacobians, zip(*rows, strict=True), strict=True):
        if jacobian is None:
            assert all(row is None for row in of_rows)
        else:
            torch.testing.assert_close(jacobian, torch.stack(of_rows))


@every_sequential
def test_vmap_over_the_batch(spec, parallel):
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    mapped = torch.func.vmap(lambda x: run_connections(sites, x))(x)
    torch.testing.assert_close(
        mapped, torch.stack([run_connections(sites, y) for y in x]), rtol=0, atol=1e-12
    )


@every_variant_slow
def test_an_empty_batch_has_zero_gradients(spec, parallel):
    sites = make_connections(spec, parallel, layers=2)
    for batch, length in ((0, 3), (2, 0)):
        x = torch.zeros(batch, length, 6, dtype=torch.float64)
        leaves = [x.requires_grad_(), *(p for site in sites for p in site.parameters())]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(
            run_connections(sites, x).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        assert not any(gradient.any() for gradient in gradients)


@every_option
def test_a_zero_token_has_finite_gradients(spec, parallel):
    """A padding token's embedding is zero, and so may be all that sub-layers write for it."""
    sites = make_connections(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    x[0, 1] = 0
    leaves = [x.requires_grad_(), *(p for site in sites for p in site.parameters())]
    y = run_connections(sites, x)
    assert y.isfinite().all()
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    loss = y.square().sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)
    squares = sum(g.square().sum() for g in gradients if g is not None)
    seconds = torch.autograd.grad(squares, leaves, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in seconds)
