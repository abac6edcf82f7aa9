"""Names and layouts of parameters as rows of data, converted in either direction by one function.

A row pairs the names of tensors in a source with their names in a target. A side has several names,
separated by spaces, where it splits what the other side fuses. The row's change says how the
tensors differ, in both directions. Names are templates: `expand_rows` fills in `{l}`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection
from ..spec import ConnectionSpec, default_options, make
from ..validation import did_you_mean

TensorTuple = tuple[Tensor, ...]


class TensorChange(NamedTuple):
    """A change of a row's tensors and its inverse.

    Each takes and returns as many tensors as the row has names. Both run on the meta device too.
    """

    apply: Callable[..., TensorTuple]
    revert: Callable[..., TensorTuple]


def _keep(*tensors: Tensor) -> TensorTuple:
    return tensors


def _transpose(tensor: Tensor) -> TensorTuple:
    return (tensor.T.contiguous(),)


def _drop_first_axis(tensor: Tensor) -> TensorTuple:
    return (tensor.squeeze(0),)


def _add_first_axis(tensor: Tensor) -> TensorTuple:
    return (tensor.unsqueeze(0),)


def _scalar_to_vector(scalar: Tensor) -> TensorTuple:
    return (scalar.reshape(1),)


def _vector_to_scalar(vector: Tensor) -> TensorTuple:
    return (vector.reshape(()),)


_KEEP = TensorChange(_keep, _keep)
TRANSPOSE = TensorChange(_transpose, _transpose)
DROP_FIRST_AXIS = TensorChange(_drop_first_axis, _add_first_axis)  # [1, N] -> [N]
SCALAR_TO_VECTOR = TensorChange(_scalar_to_vector, _vector_to_scalar)  # [] -> [1]


class TensorRow(NamedTuple):
    """One or several tensors under their names in the source and in the target."""

    source: str
    target: str
    change: TensorChange = _KEEP


class ConnectionParameters(NamedTuple):
    """The parameters of a model's connections, without the model.

    Args:
        spec: the connection they belong to.
        sites: by site the connection's own parameters, without its norms; the readout is the last.
        unused: tensors of the source that no site reads; saving returns them unchanged.
    """

    spec: ConnectionSpec
    sites: list[dict[str, Tensor]]
    unused: dict[str, Tensor]


def expand_rows(rows: Iterable[TensorRow], **values: object) -> list[TensorRow]:
    """The rows with `{name}` filled in on both sides."""
    return [
        TensorRow(row.source.format(**values), row.target.format(**values), row.change)
        for row in rows
    ]


def prefix_rows(rows: Iterable[TensorRow], source: str, target: str) -> list[TensorRow]:
    """The rows with a prefix before the names of each side."""
    return [
        TensorRow(_prefix_names(row.source, source), _prefix_names(row.target, target), row.change)
        for row in rows
    ]


def _prefix_names(names: str, prefix: str) -> str:
    return " ".join(prefix + name for name in names.split())


def rows_of_modules(rows: Iterable[TensorRow], prefixes: Sequence[str]) -> list[TensorRow]:
    """The rows of a module for each prefix of the source, with the site's number in the target."""
    expanded = []
    for site, prefix in enumerate(prefixes):
        expanded += prefix_rows(rows, prefix, f"{site}.")
    return expanded


def check_prefixes(prefixes: Sequence[str], sublayers: int) -> None:
    """Raise a ValueError unless there is a prefix for each sub-layer."""
    if len(prefixes) != sublayers:
        raise ValueError(
            f"expected a prefix for each of {sublayers} sub-layers, got {len(prefixes)}"
        )


def select_modules(tensors: Mapping[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    """The tensors whose names start with one of the prefixes, of which there must be one."""
    if not prefixes:
        raise ValueError("expected the prefixes of the modules, got none")
    return {name: t for name, t in tensors.items() if name.startswith(tuple(prefixes))}


def check_one_model(first_names: Collection[str]) -> None:
    """Raise a ValueError where tensors have the first name of several models, like a draft's."""
    if len(first_names) > 1:
        raise ValueError(
            f"the tensors are of {len(first_names)} models, which have "
            f"{' and '.join(map(repr, sorted(first_names)))}; pass those of one"
        )


def count_layers(numbers: Iterable[str]) -> int:
    """The number of layers that are numbered 0, 1, … in the names of tensors.

    Raises:
        ValueError: a number is missing.
    """
    found = {int(number) for number in numbers}
    for layer in range(len(found)):
        if layer not in found:
            raise ValueError(f"the tensors have layer {max(found)} and lack layer {layer}")
    return len(found)


def reverse_rows(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """The rows with source and target exchanged."""
    return [
        TensorRow(row.target, row.source, TensorChange(row.change.revert, row.change.apply))
        for row in rows
    ]


def convert_tensors(rows: Iterable[TensorRow], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors as the target's.

    Args:
        rows: the names of all tensors on both sides.
        tensors: the source's, all of them.

    Raises:
        ValueError: a tensor of a row is missing, or a tensor is in no row.
    """
    rows = list(rows)
    check_names([name for row in rows for name in row.source.split()], tensors)
    converted: dict[str, Tensor] = {}
    for row in rows:
        changed = row.change.apply(*(tensors[name] for name in row.source.split()))
        converted |= dict(zip(row.target.split(), changed, strict=True))
    return converted


def check_names(expected: Iterable[str], given: Iterable[str]) -> None:
    """Raise a ValueError that names the first missing tensor, or the first unknown one."""
    expected = set(expected)
    given = set(given)
    missing = sorted(expected - given)
    unknown = sorted(given - expected)
    if missing:
        raise ValueError(_describe_names("missing", missing, unknown))
    if unknown:
        raise ValueError(_describe_names("unknown", unknown, expected))


def _describe_names(problem: str, names: list[str], candidates: Iterable[str]) -> str:
    what = f"a tensor is {problem}"
    if len(names) > 1:
        what = f"{len(names)} tensors are {problem}, the first"
    return f"{what}: {names[0]!r}{did_you_mean(names[0], candidates)}"


def read_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_module_shapes(
    tensors: Mapping[str, Tensor],
    prefixes: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    remark: str,
) -> None:
    """`check_shapes` of the tensors of equal modules.

    Args:
        tensors: of all modules, by name.
        prefixes: of the names of each module's tensors.
        shapes: of a module's tensors, by their names without the prefix.
        remark: the end of the message.
    """
    given = read_shapes(tensors)
    for prefix in prefixes:
        check_shapes({prefix + name: shape for name, shape in shapes.items()}, given, remark)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], remark: str = ""
) -> None:
    """Raise a ValueError that names the first tensor with an unexpected shape.

    Args:
        expected: the shape of each tensor.
        given: the shapes of these tensors, and of others.
        remark: the end of the message.
    """
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"{name!r} has the shape {given[name]}, expected {shape}{remark}")


def split_sites(tensors: Mapping[str, Tensor], sites: int) -> list[dict[str, Tensor]]:
    """`{"3.fn": t}` as one dictionary for each site."""
    by_site: list[dict[str, Tensor]] = [{} for _ in range(sites)]
    for name, tensor in tensors.items():
        site, parameter = name.split(".", 1)
        by_site[int(site)][parameter] = tensor
    return by_site


def join_sites(sites: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One dictionary for each site as `{"3.fn": t}`."""
    joined = {}
    for index, tensors in enumerate(sites):
        for name, tensor in tensors.items():
            joined[f"{index}.{name}"] = tensor
    return joined


def short_spec(name: str, **options: Any) -> ConnectionSpec:
    """`make(name, **options)` without the options that are defaults."""
    spec = make(name, **options)
    default = default_options(spec.method)
    return make(name, **{k: v for k, v in spec.options.items() if v != default.get(k)})


@torch.no_grad()
def fill_connections(sites: Iterable[Connection], parameters: ConnectionParameters) -> None:
    """Copy parameters into connections that were built from `parameters.spec`.

    Args:
        sites: the connections in the order of depth, the readout last.
        parameters: what `load_connections` of a module here returned.

    Raises:
        ValueError: a site's own parameters have other names or shapes. Nothing is changed then.
    """
    own_parameters = [dict(site.named_parameters(recurse=False)) for site in sites]
    if len(own_parameters) != len(parameters.sites):
        raise ValueError(
            f"the parameters are of {len(parameters.sites)} sites, "
            f"got {len(own_parameters)} connections"
        )
    expected = join_sites(own_parameters)
    given = join_sites(parameters.sites)
    check_names(expected, given)
    check_shapes(read_shapes(expected), read_shapes(given))
    for name, parameter in expected.items():
        parameter.copy_(given[name])


def read_connections(sites: Iterable[nn.Module]) -> list[dict[str, Tensor]]:
    """The inverse of `fill_connections`: copies of each site's own parameters, without norms."""
    copies = []
    for site in sites:
        parameters = site.named_parameters(recurse=False)
        copies.append({name: parameter.detach().clone() for name, parameter in parameters})
    return copies
