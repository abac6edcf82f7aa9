"""Rows of names and layouts, converted in both directions."""

import pytest
import torch

from crosslayer.convert import fill_connections, kimi, read_connections
from crosslayer.convert.rows import (
    TensorChange,
    TensorRow,
    check_names,
    convert_tensors,
    expand_rows,
    prefix_rows,
    reverse_rows,
)
from crosslayer.testing.tiny_model import equal_tensors
from tests.convert.test_kimi import kimi_tensors
from tests.support.chain import D, randn, row


def test_a_row_is_converted_in_both_directions():
    """One tensor of the source is two of the target."""
    parts = TensorChange(lambda whole: tuple(whole.chunk(2)), lambda *halves: (torch.cat(halves),))
    rows = prefix_rows(
        expand_rows([TensorRow("w.{l}", "a.{l} b.{l}", parts), TensorRow("n", "n")], l=3),
        "theirs.",
        "ours.",
    )
    theirs = {"theirs.w.3": randn(4, 2), "theirs.n": randn(2)}
    ours = convert_tensors(rows, theirs)
    assert ours.keys() == {"ours.a.3", "ours.b.3", "ours.n"} and ours["ours.b.3"].equal(
        theirs["theirs.w.3"][2:]
    )
    assert (
        equal_tensors(convert_tensors(reverse_rows(rows), ours), theirs)
        and reverse_rows(reverse_rows(rows)) == rows
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": 1, "z": 1}, r"^a tensor is missing: 'y'$"),
        ({}, r"^2 tensors are missing, the first: 'x'$"),
        ({"x": 1, "y": 1, "y2": 1}, r"^a tensor is unknown: 'y2' \(did you mean 'y'\?\)$"),
        (
            {"norm_weigth": 1, "x": 1, "y": 1, "norm": 1},
            r"^2 tensors are unknown, the first: 'norm'$",
        ),
    ],
)
def test_names(given, message):
    with pytest.raises(ValueError, match=message):
        check_names(["x", "y"], given)


def test_what_is_read_stays_when_the_connections_change():
    ours, sites = kimi.load_connections(kimi_tensors(), 1), row("attnres(block_size=2)")
    fill_connections(sites, ours)
    read = read_connections(sites)
    with torch.no_grad():
        for site in sites:
            for parameter in site.parameters():
                parameter.zero_()
    assert all(equal_tensors(a, b) for a, b in zip(read, ours.sites, strict=True))


def test_a_failed_fill_changes_nothing():
    ours, sites = kimi.load_connections(kimi_tensors(), 1), row("attnres(block_size=2)")
    before = read_connections(sites)
    ours.sites[3]["query"] = randn(D + 1)
    with pytest.raises(ValueError, match=r"'3.query' has the shape \(13,\), expected \(12,\)"):
        fill_connections(sites, ours)
    with pytest.raises(ValueError, match="the parameters are of 7 sites, got 6 connections"):
        fill_connections(sites[1:], ours)
    ours.sites[3] |= {"query": randn(D), "key": randn(D)}
    with pytest.raises(ValueError, match=r"a tensor is unknown: '3\.key'"):
        fill_connections(sites, ours)
    assert all(equal_tensors(a, b) for a, b in zip(read_connections(sites), before, strict=True))
