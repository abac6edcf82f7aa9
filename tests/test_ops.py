"""The ops' own identities."""

import pytest
import torch

from crosslayer.ops import attend_ahead, attend_merge, depth_attention, depth_mix, sinkhorn
from crosslayer.ops.products import (
    mix_streams,
    project_back,
    project_manual_grad,
    row_dots,
    stream_gram,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("complete", [1, 2, 5])
def test_two_phases_are_one(dtype, complete):
    X = tuple(torch.randn(2, 3, 7, dtype=torch.float64).to(dtype) for _ in range(complete + 1))
    Q = torch.randn(4, 7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    out, lse = attend_ahead(X[:-1], Q)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for s in range(4):
        torch.testing.assert_close(out[s], depth_attention(X[:-1], Q[s]), rtol=0, atol=tolerance)
        merged = attend_merge(out[s], lse[s], X[-1], Q[s])
        torch.testing.assert_close(merged, depth_attention(X, Q[s]), rtol=0, atol=tolerance)


def test_two_phases_have_one_gradient():
    X = tuple(torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(4))
    q = torch.randn(7, dtype=torch.float64, requires_grad=True)
    out, lse = attend_ahead(X[:-1], q[None])
    two = torch.autograd.grad(attend_merge(out[0], lse[0], X[-1], q).square().sum(), (*X, q))
    one = torch.autograd.grad(depth_attention(X, q).square().sum(), (*X, q))
    for a, b in zip(two, one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_sinkhorn_ends_with_columns_and_differentiates_every_round():
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    M = sinkhorn(logits, 20)
    torch.testing.assert_close(M.sum(-2), torch.ones(3, 4, dtype=torch.float64), rtol=0, atol=2e-6)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, 1e-2), (logits,))


def test_mix_counts_its_weights():
    with pytest.raises(ValueError, match="2 sources but weights for 3"):
        depth_mix((torch.ones(1, 1, 2),) * 2, torch.ones(1, 3))


@pytest.mark.parametrize("few", [2, 4, 5, 17])
def test_products_are_the_same_as_sums(few):
    """What a compiler is given, on both sides of how many products it is given as sums."""
    H, Y, w = torch.randn(2, 3, few, 7), torch.randn(2, 3, 1, 7), torch.randn(2, 3, few, few)
    W, g = torch.randn(7, few), torch.randn(2, 3, few)

    def products(H, Y, w, W, g):
        both = row_dots(Y, H), row_dots(H, H)
        return (
            project_manual_grad(H, W),
            project_back(g, W),
            mix_streams(H, w),
            mix_streams(H, w[0, 0]),
            stream_gram(H, H),
            *both,
        )

    given = [t.double() for t in (H, Y, w, W, g)]
    compiled = torch.compile(products, backend="eager", fullgraph=True)(*given)
    for a, b in zip(compiled, products(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
