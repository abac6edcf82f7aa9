"""The `denseformer` package's parameters: bitwise round trips, and the averages they make."""

import pytest
import torch

from crosslayer.convert import denseformer, fill_connections, read_connections
from crosslayer.testing.tiny_model import equal_tensors
from tests.support.chain import D, randn, row, run, sublayer


def alphas(blocks: int, dilation: int, period: int) -> dict[str, torch.Tensor]:
    return {
        f"alphas.{i - 1}.weight": randn(1, i // dilation + 1)
        for i in range(period, blocks + 1, period)
    }


@pytest.mark.parametrize(
    ("dilation", "period", "sublayers"), [(1, 1, 2), (4, 5, 1), (2, 3, 2), (1, 7, 2), (3, 1, 1)]
)
def test_denseformer(dilation, period, sublayers):
    theirs = alphas(12, dilation, period)
    ours = denseformer.load_connections(theirs, 12, dilation, period, sublayers)
    sites = row(ours.spec, parallel=sublayers == 1, layers=12)
    fill_connections(sites, ours)
    assert equal_tensors(denseformer.save_connections(ours), theirs)
    assert equal_tensors(
        denseformer.save_connections(ours._replace(sites=read_connections(sites))), theirs
    )

    # the averages, from their definition
    x = torch.randn(2, 3, D)
    Y, X = x, [x]
    for i in range(1, 13):
        h, k = Y, (i - 1) * sublayers
        for j in range(sublayers):
            h = h + sublayer(k + j, h)
        X.append(h)
        if i % period == 0:
            (weights,) = theirs[f"alphas.{i - 1}.weight"]
            h = sum(
                w * X[j] for w, j in zip(weights, range(i % dilation, i + 1, dilation), strict=True)
            )
        Y = h
    torch.testing.assert_close(run(sites, x), Y, rtol=1e-4, atol=1e-4)


def test_a_period_longer_than_the_model():
    ours = denseformer.load_connections({}, 4, period=5)
    assert denseformer.save_connections(ours) == {}


def test_what_does_not_fit():
    theirs = alphas(6, 2, 3)
    with pytest.raises(
        ValueError,
        match=r"'alphas.2.weight' has the shape \(1, 2\), expected \(1, 4\) for dilation=1",
    ):
        denseformer.load_connections(theirs, 6, 1, 3)
    with pytest.raises(ValueError, match=r"4 tensors are missing, the first: 'alphas\.0\.weight'"):
        denseformer.load_connections(theirs, 6, 2)
    with pytest.raises(ValueError, match=r"a tensor is unknown: 'alphas\.5\.weight'"):
        denseformer.load_connections(theirs, 5, 2, 3)
    for spec in ("denseformer(last_k=2)", "denseformer(period='last')", "mudd"):
        with pytest.raises(ValueError, match="the package has only dilation and period"):
            denseformer.save_connections(
                denseformer.load_connections(theirs, 6, 2, 3)._replace(spec=spec)
            )
