"""Rows of names and layouts, applied either way."""

import pytest
import torch

from crosslayer.convert import fill, kimi, own_states
from crosslayer.convert.rows import Change, Row, check_names, convert, expand, placed, turned
from tests.support.chain import LAYERS, D, randn, row, same


def res() -> dict[str, torch.Tensor]:
    """Kimi-K3's tensors of three layers."""
    pools = [f"layers.{l}.{s}_res" for l in range(LAYERS) for s in ("self_attention", "mlp")]
    found = {}
    for pool in (*pools, "output_attn_res"):
        found |= {f"{pool}_proj.weight": randn(1, D), f"{pool}_norm.weight": randn(D)}
    return found


def test_both_ways_of_a_row():
    """Fused where ours is apart: one row, and the way back is the row turned round."""
    parts = Change(lambda whole: tuple(whole.chunk(2)), lambda *halves: (torch.cat(halves),))
    rows = placed(
        expand([Row("w.{l}", "a.{l} b.{l}", parts), Row("n", "n")], l=3), "theirs.", "ours."
    )
    theirs = {"theirs.w.3": randn(4, 2), "theirs.n": randn(2)}
    ours = convert(rows, theirs)
    assert ours.keys() == {"ours.a.3", "ours.b.3", "ours.n"} and ours["ours.b.3"].equal(
        theirs["theirs.w.3"][2:]
    )
    assert same(convert(turned(rows), ours), theirs) and turned(turned(rows)) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": 1, "z": 1}, r"^a tensor is missing: 'y'$"),
        ({}, r"^2 tensors are missing, the first: 'x'$"),
        ({"x": 1, "y": 1, "y2": 1}, r"^a tensor is of no known part: 'y2' \(did you mean 'y'\?\)$"),
        (
            {"norm_weigth": 1, "x": 1, "y": 1, "norm": 1},
            r"^2 tensors are of no known part, the first: 'norm'$",
        ),
    ],
)
def test_names(given, message):
    with pytest.raises(ValueError, match=message):
        check_names(["x", "y"], given)


def test_filling_changes_all_or_nothing():
    ours, sites = kimi.load(res(), 1), row("attnres(block_size=2)")
    before = [{name: t.clone() for name, t in state.items()} for state in own_states(sites)]
    ours.states[3]["query"] = randn(D + 1)
    with pytest.raises(ValueError, match=r"'3.query' has the shape \(13,\), expected \(12,\)"):
        fill(sites, ours)
    with pytest.raises(ValueError, match="the parameters are of 7 sites, got 6 connections"):
        fill(sites[1:], ours)
    assert all(same(a, b) for a, b in zip(own_states(sites), before, strict=True))
