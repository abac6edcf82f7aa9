"""Names and layouts of parameters as rows of data, applied either way by one function.

A row pairs their names with ours, several separated by spaces where one side splits or fuses what the other does not,
and says what becomes of the tensors on the way there and on the way back. Names are templates: `{l}` is filled in by
`expand`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection
from ..validation import did_you_mean

Tensors = tuple[Tensor, ...]


class Change(NamedTuple):
    """What becomes of a row's tensors; the names say how many come in and go out. Works on the meta device too."""

    there: Callable[..., Tensors]
    back: Callable[..., Tensors]


def same(*tensors: Tensor) -> Tensors:
    return tensors


def transposed(t: Tensor) -> Tensors:
    return (t.T.contiguous(),)


SAME = Change(same, same)
TRANSPOSED = Change(transposed, transposed)


class Row(NamedTuple):
    theirs: str
    ours: str
    change: Change = SAME


class Connections(NamedTuple):
    """The parameters of a row of connections, apart from any model."""

    arm: str
    states: list[
        dict[str, Tensor]
    ]  # one a site, the readout's last; own parameters alone, no norms
    unused: dict[str, Tensor]  # theirs that no site reads; they go back as they came


def expand(rows: Iterable[Row], **values: object) -> list[Row]:
    """The rows with `{name}` filled in on both sides."""
    return [Row(row.theirs.format(**values), row.ours.format(**values), row.change) for row in rows]


def turned(rows: Iterable[Row]) -> list[Row]:
    """The way back."""
    return [Row(row.ours, row.theirs, Change(row.change.back, row.change.there)) for row in rows]


def convert(rows: Iterable[Row], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors as ours; ours as theirs with `turned(rows)`.

    Raises:
        ValueError: a tensor of a row is not there, or one that is there is in no row.
    """
    rows = list(rows)
    check_names([name for row in rows for name in row.theirs.split()], tensors)
    converted: dict[str, Tensor] = {}
    for row in rows:
        out = row.change.there(*(tensors[name] for name in row.theirs.split()))
        converted |= dict(zip(row.ours.split(), out, strict=True))
    return converted


def check_names(expected: Iterable[str], given: Iterable[str]) -> None:
    """Raise a ValueError that names the first tensor missing, or the first one nobody expects."""
    expected, given = set(expected), set(given)
    missing, foreign = sorted(expected - given), sorted(given - expected)
    for what, names, others in (
        ("missing", missing, foreign),
        ("of no known part", foreign, expected),
    ):
        if names:
            many = (
                f"{len(names)} tensors are {what}, the first"
                if names[1:]
                else f"a tensor is {what}"
            )
            raise ValueError(f"{many}: {names[0]!r}{did_you_mean(names[0], others)}")


def check_shapes(expected: Mapping[str, Tensor], given: Mapping[str, Iterable[int]]) -> None:
    """Raise a ValueError that names the first tensor whose shape is another than expected."""
    for name, tensor in expected.items():
        if tuple(given[name]) != tuple(tensor.shape):
            raise ValueError(
                f"{name!r} has the shape {tuple(given[name])}, expected {tuple(tensor.shape)}"
            )


def placed(rows: Iterable[Row], theirs: str, ours: str) -> list[Row]:
    """The rows beneath a prefix on either side."""
    return [Row(prefixed(row.theirs, theirs), prefixed(row.ours, ours), row.change) for row in rows]


def prefixed(names: str, prefix: str) -> str:
    return " ".join(prefix + name for name in names.split())


def split(tensors: Mapping[str, Tensor], sites: int) -> list[dict[str, Tensor]]:
    """`{"3.fn": t}` as one dictionary a site."""
    states: list[dict[str, Tensor]] = [{} for _ in range(sites)]
    for name, tensor in tensors.items():
        site, own = name.split(".", 1)
        states[int(site)][own] = tensor
    return states


def joined(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{site}.{name}": t for site, state in enumerate(states) for name, t in state.items()}


@torch.no_grad()
def fill(sites: Iterable[Connection], connections: Connections) -> None:
    """Put the parameters into a row of connections built from `connections.arm`.

    Raises:
        ValueError: a site's own parameters have other names or shapes. Nothing is changed then.
    """
    sites = list(sites)
    own = [dict(site.named_parameters(recurse=False)) for site in sites]
    if len(own) != len(connections.states):
        raise ValueError(
            f"the parameters are of {len(connections.states)} sites, got {len(own)} connections"
        )
    wanted, given = joined(own), joined(connections.states)
    check_names(wanted, given)
    check_shapes(wanted, {name: t.shape for name, t in given.items()})
    for name, parameter in wanted.items():
        parameter.copy_(given[name])


def own_states(sites: Iterable[nn.Module]) -> list[dict[str, Tensor]]:
    """What `fill` puts in, taken out again: every site's own parameters, without its norms."""
    return [
        {n: p.detach().clone() for n, p in site.named_parameters(recurse=False)} for site in sites
    ]
