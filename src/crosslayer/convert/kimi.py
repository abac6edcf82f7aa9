"""Kimi-K3's attention-residual tensors, as public serving code names them.

    layers.{l}.self_attention_res_proj.weight [1, D]    w of the attention's pool      ..._res_norm.weight [D]   its g
    layers.{l}.mlp_res_proj.weight [1, D]               w of the MLP's                 ..._res_norm.weight [D]
    output_attn_res_proj.weight [1, D]                  w of the readout's             ..._res_norm.weight [D]

Its `attn_res_block_size` counts layers, ours sub-layers: twice as many. Layer 0's attention has one source, so that its
pair is never read: it goes back as it came. Keys are normalised with eps 1e-6 here.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from ..spec import default_options, make
from ..validation import check_positive
from .rows import (
    Change,
    Connections,
    Row,
    check_names,
    convert,
    expand,
    joined,
    placed,
    split,
    turned,
)

FLAT = Change(lambda w: (w.squeeze(0),), lambda w: (w.unsqueeze(0),))
POOL = (Row("{pool}_proj.weight", "query", FLAT), Row("{pool}_norm.weight", "key_norm"))
ATTN, MLP, OUT = "layers.{l}.self_attention_res", "layers.{l}.mlp_res", "output_attn_res"


def load(tensors: Mapping[str, Tensor], attn_res_block_size: int) -> Connections:
    """The attention residuals of a checkpoint as ours.

    Args:
        tensors: a state dict, whole or these tensors alone, with any prefix before `layers`; others are passed over.
        attn_res_block_size: of the config, in layers.

    Raises:
        ValueError: there are none, or one is missing.
    """
    check_positive(attn_res_block_size=attn_res_block_size)
    found = [
        m
        for name in tensors
        if (m := re.fullmatch(r"(.*\.)?layers\.(\d+)\.mlp_res_proj\.weight", name))
    ]
    if not found:
        raise ValueError("no attention-residual tensors; expected 'layers.0.mlp_res_proj.weight'")
    prefix = found[0][1] or ""
    layers = 1 + max(int(m[2]) for m in found if (m[1] or "") == prefix)
    table = rows(layers, prefix)
    idle = {row.theirs for row in placed(expand(POOL, pool=ATTN.format(l=0)), prefix, "")}
    wanted = {row.theirs for row in table}
    given = {name: t for name, t in tensors.items() if name in wanted}
    check_names(wanted, given)
    states = split(convert(table, given), 2 * layers + 1)
    unused = {name.removeprefix(prefix): tensors[name] for name in sorted(idle & tensors.keys())}
    return Connections(f"attnres(block_size={2 * attn_res_block_size})", states, unused)


def save(connections: Connections, prefix: str = "") -> dict[str, Tensor]:
    """The way back, to the last bit.

    Raises:
        ValueError: the arm is no attnres, or its blocks end inside a layer.
    """
    factory = make(connections.arm)
    size = (default_options(factory.method) | factory.options).get("block_size", 1)
    if factory.name != "attnres" or size % 2:
        raise ValueError(
            f"expected an attnres whose block_size is a number of layers, two each, got {connections.arm!r}"
        )
    layers = (len(connections.states) - 1) // 2
    given = convert(turned(rows(layers, prefix)), joined(connections.states))
    return given | {prefix + name: tensor for name, tensor in connections.unused.items()}


def rows(layers: int, prefix: str) -> list[Row]:
    pools = [pool.format(l=l) for l in range(layers) for pool in (ATTN, MLP)]
    sites = list(enumerate([*pools, OUT]))[1:]
    return [
        row for site, pool in sites for row in placed(expand(POOL, pool=pool), prefix, f"{site}.")
    ]
