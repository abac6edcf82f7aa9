"""DeepSeek-V4's and V4.1's mHC tensors: `fn`, `base` and `scale` of every sub-layer, float32, with
the layout of "mhc".

    released        layers.{l}.hc_attn_fn, layers.{l}.hc_ffn_fn, …; V4's readout: hc_head_fn, …
    transformers    layers.{l}.attn_hc.fn, layers.{l}.ffn_hc.fn, …; V4's readout: hc_head.hc_fn, …

V4 is "mhc". V4.1 (single-pass mHC) has the same tensors but no head: "mhc(single_pass=True)".
Models that adopted mHC under transformers' names have other specs, like GLM-5's
"mhc(readout='mean', norm_eps=1e-5)", which has no head either. The tensors do not show which spec
they belong to, so the caller names it.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..spec import ConnectionSpec, all_options, default_options, make
from ..validation import check_choice, check_option_type, check_positive
from .rows import (
    ConnectionParameters,
    TensorRow,
    check_names,
    check_one_model,
    check_shapes,
    convert_tensors,
    count_layers,
    join_sites,
    read_shapes,
    reverse_rows,
    rows_of_modules,
    short_spec,
    split_sites,
)


class _SiteNames(NamedTuple):
    """What the names of a site's tensors begin with; {l} is the layer."""

    attention: str
    mlp: str
    head: str


_NAMES = {
    "released": _SiteNames("layers.{l}.hc_attn_", "layers.{l}.hc_ffn_", "hc_head_"),
    "transformers": _SiteNames("layers.{l}.attn_hc.", "layers.{l}.ffn_hc.", "hc_head.hc_"),
}
_ROWS = (TensorRow("fn", "fn"), TensorRow("base", "base"), TensorRow("scale", "scale"))
_CONFIG_OPTIONS = {
    "hc_mult": "streams",
    "hc_sinkhorn_iters": "iterations",
    "hc_eps": "eps",
    "rms_norm_eps": "norm_eps",
}


def spec_from_config(config: Mapping[str, Any], **options: Any) -> ConnectionSpec:
    """The spec that a config.json's `hc_*` and `rms_norm_eps` describe.

    Args:
        config: the content of config.json.
        options: what it does not say, like single_pass=True.

    Raises:
        ValueError: a value is of the wrong type.
    """
    default = default_options(make("mhc").method)
    described = {}
    for key, option in _CONFIG_OPTIONS.items():
        if key in config:
            check_option_type(f"config.json: {key}", config[key], type(default[option]))
            described[option] = config[key]
    return short_spec("mhc", **(described | options))


def load_connections(
    tensors: Mapping[str, Tensor], spec: str | ConnectionSpec = "mhc"
) -> ConnectionParameters:
    """The hyper-connections of a checkpoint as parameters of `make("mhc")`.

    Args:
        tensors: a state dict under either names, with any prefix before `layers`; other tensors are
            ignored.
        spec: what they belong to, an mhc.

    Raises:
        ValueError: a tensor is missing or of another shape, the spec has another head, number of
            streams or residual, or the tensors are of two models.
    """
    spec = make(spec)
    n, fn_rows, has_head = _mhc_shape(spec)
    names, prefix = _find_names(tensors)
    if not has_head:
        head_prefix = prefix + names.head
        if any(name.startswith(head_prefix) for name in tensors):
            raise ValueError(
                f"these tensors have a head and {str(spec)!r} has none; DeepSeek-V4's spec is 'mhc'"
            )
    layers = _count_layers(tensors, prefix)
    rows = _mhc_rows(names, layers, has_head, prefix)
    expected = {row.source for row in rows}
    given = {name: tensor for name, tensor in tensors.items() if name in expected}
    if has_head:
        head_rows = rows[-len(_ROWS) :]
        if not any(row.source in given for row in head_rows):
            raise ValueError(
                f"these tensors have no head, which {str(spec)!r} needs; "
                "DeepSeek-V4.1's spec is 'mhc(single_pass=True)'"
            )
    check_names(expected, given)
    fn_names = [row.source for row in rows if row.target.endswith(".fn")]
    width = given[fn_names[0]].shape[-1]
    for name in fn_names[: 2 * layers]:  # the head's has another shape
        fn = given[name]
        if fn.ndim != 2 or len(fn) != fn_rows or fn.shape[1] % n:
            raise ValueError(
                f"{name!r} has the shape {tuple(fn.shape)}, "
                f"expected ({fn_rows}, {n}·D) for {str(spec)!r}"
            )
    check_shapes(_expected_shapes(rows, layers, n, fn_rows, width), read_shapes(given))
    sites = split_sites(convert_tensors(rows, given), 2 * layers + 1)
    return ConnectionParameters(spec, sites, {})


def save_connections(
    parameters: ConnectionParameters,
    names: Literal["released", "transformers"] = "released",
    prefix: str = "",
) -> dict[str, Tensor]:
    """The inverse of `load_connections`, bitwise.

    Args:
        parameters: of an mhc.
        names: whose names the tensors get.
        prefix: before every name.

    Raises:
        ValueError: the spec is not mhc, or the names are neither.
    """
    _, _, has_head = _mhc_shape(make(parameters.spec))
    layers = (len(parameters.sites) - 1) // 2
    rows = _mhc_rows(check_choice("names", names, _NAMES), layers, has_head, prefix)
    return convert_tensors(reverse_rows(rows), join_sites(parameters.sites))


def _mhc_rows(names: _SiteNames, layers: int, has_head: bool, prefix: str) -> list[TensorRow]:
    prefixes = []
    for l in range(layers):
        for name in (names.attention, names.mlp):
            prefixes.append(prefix + name.format(l=l))
    if has_head:
        prefixes.append(prefix + names.head)
    return rows_of_modules(_ROWS, prefixes)


def _expected_shapes(
    rows: list[TensorRow], layers: int, n: int, fn_rows: int, width: int
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor. width: nD."""
    of_site = {"fn": (fn_rows, width), "base": (fn_rows,), "scale": (3 if fn_rows > 2 * n else 2,)}
    of_head = {"fn": (n, width), "base": (n,), "scale": (1,)}
    shapes = {}
    for row in rows:
        site, parameter = row.target.split(".")
        shapes[row.source] = (of_head if int(site) == 2 * layers else of_site)[parameter]
    return shapes


def _mhc_shape(spec: ConnectionSpec) -> tuple[int, int, bool]:
    """The streams n of an mhc, the rows of its fn, and whether it has a head."""
    if spec.name != "mhc":
        raise ValueError(f"these tensors belong to mhc, got the connection {str(spec)!r}")
    options = all_options(spec)
    n = options["streams"]
    check_positive(streams=n)
    has_head = options["readout"] == "head" and not options["single_pass"]
    fn_rows = 2 * n
    if options["residual"] == "sinkhorn":
        fn_rows += n * n
    return n, fn_rows, has_head


def _find_names(tensors: Mapping[str, Tensor]) -> tuple[_SiteNames, str]:
    """The names that the tensors have, and the prefix before `layers`."""
    first_names = []
    found = {}
    for names in _NAMES.values():
        first_name = names.attention.format(l=0) + "fn"
        first_names.append(repr(first_name))
        for name in tensors:
            if name == first_name or name.endswith("." + first_name):
                found[name] = (names, name.removesuffix(first_name))
    if not found:
        raise ValueError(f"no mHC tensors; expected {' or '.join(first_names)}")
    check_one_model(found)
    return next(iter(found.values()))


def _count_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"layers\.(\d+)\..*hc")
    return count_layers(match[1] for match in map(pattern.match, tensors) if match)
