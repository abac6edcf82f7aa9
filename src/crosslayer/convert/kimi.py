"""Kimi-K3's attention-residual tensors, under the names of public serving code.

    layers.{l}.self_attention_res_proj.weight [1, D]   w of the attention's pool
    layers.{l}.self_attention_res_norm.weight [D]      its g
    layers.{l}.mlp_res_proj.weight, ..._res_norm.weight             of the MLP's pool
    output_attn_res_proj.weight, output_attn_res_norm.weight        of the readout's pool

`attn_res_block_size` counts layers; `block_size` here counts sub-layers, so it is twice as large.
The attention of layer 0 has one source, so its pair is never read: loading keeps it as unused.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from ..spec import all_options, make
from ..validation import check_positive
from .rows import (
    DROP_FIRST_AXIS,
    ConnectionParameters,
    TensorRow,
    check_names,
    check_one_model,
    check_shapes,
    convert_tensors,
    count_layers,
    join_sites,
    prefix_rows,
    read_shapes,
    reverse_rows,
    rows_of_modules,
    short_spec,
    split_sites,
)

_POOL = (
    TensorRow("_proj.weight", "query", DROP_FIRST_AXIS),
    TensorRow("_norm.weight", "key_norm"),
)
_ATTENTION_POOL = "layers.{l}.self_attention_res"
_MLP_POOL = "layers.{l}.mlp_res"
_READOUT_POOL = "output_attn_res"


def load_connections(
    tensors: Mapping[str, Tensor], attn_res_block_size: int, rms_norm_eps: float = 1e-5
) -> ConnectionParameters:
    """The attention residuals of a checkpoint as parameters of `make("attnres")`.

    Args:
        tensors: a state dict with any prefix before `layers`; other tensors are ignored.
        attn_res_block_size: of the config, in layers.
        rms_norm_eps: of the config, the eps of the keys' norm. Where outputs are small, another
            value gives another read-out.

    Raises:
        ValueError: a tensor is missing or of another shape, or the tensors are of two models.
    """
    check_positive(attn_res_block_size=attn_res_block_size)
    pattern = re.compile(r"(.*\.)?layers\.(\d+)\.(?:self_attention|mlp)_res_(?:proj|norm)\.weight")
    matches = [match for match in map(pattern.fullmatch, tensors) if match]
    if not matches:
        raise ValueError("no attention-residual tensors; expected 'layers.0.mlp_res_proj.weight'")
    prefixes = {match[1] or "" for match in matches}
    check_one_model({f"{prefix}layers.0.mlp_res_proj.weight" for prefix in prefixes})
    (prefix,) = prefixes
    layers = count_layers(match[2] for match in matches)
    rows = _pool_rows(layers, prefix)
    names = {row.source for row in rows}
    of_pools = {name: tensor for name, tensor in tensors.items() if name in names}
    check_names(names, of_pools)
    dim = of_pools[prefix + _READOUT_POOL + "_norm.weight"].numel()
    expected = {name: (dim,) if name.endswith("_norm.weight") else (1, dim) for name in names}
    check_shapes(expected, read_shapes(of_pools))
    sites = split_sites(convert_tensors(rows, of_pools), 2 * layers + 1)
    unused = {}
    for row in prefix_rows(_POOL, _ATTENTION_POOL.format(l=0), ""):
        if prefix + row.source in tensors:
            unused[row.source] = tensors[prefix + row.source]
    spec = short_spec("attnres", block_size=2 * attn_res_block_size, eps=rms_norm_eps)
    return ConnectionParameters(spec, sites, unused)


def save_connections(parameters: ConnectionParameters, prefix: str = "") -> dict[str, Tensor]:
    """The inverse of `load_connections`, bitwise.

    Raises:
        ValueError: the spec is not attnres, or its blocks end inside a layer.
    """
    spec = make(parameters.spec)
    if spec.name != "attnres" or all_options(spec)["block_size"] % 2:
        raise ValueError(
            "expected an attnres whose block_size is a multiple of 2, the sub-layers of a layer, "
            f"got {str(spec)!r}"
        )
    layers = (len(parameters.sites) - 1) // 2
    rows = reverse_rows(_pool_rows(layers, prefix))
    tensors = convert_tensors(rows, join_sites(parameters.sites))
    return tensors | {prefix + name: tensor for name, tensor in parameters.unused.items()}


def _pool_rows(layers: int, prefix: str) -> list[TensorRow]:
    pools = []
    for l in range(layers):
        pools += [_ATTENTION_POOL.format(l=l), _MLP_POOL.format(l=l)]
    pools.append(_READOUT_POOL)
    rows = rows_of_modules(_POOL, [prefix + pool for pool in pools])
    return rows[len(_POOL) :]  # The first site has one source and no parameters.
