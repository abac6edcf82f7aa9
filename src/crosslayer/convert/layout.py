"""What the layouts of published MUDD checkpoints share: gpt-fast's names for the sizes, and the dense connections'.

dense_bs.{l}                  a [C, l+2] of the depth aggregation after block l, which ours keeps where l + 1 begins
dynamic_dense.{l}.w1.weight   W1ᵀ [K, D];   dynamic_dense.{l}.w2.weight   W2ᵀ [C(l+2), K]
F_l = round(F(l/(L−1) + 0.5)/128)·128, l = 0..L−1: the hidden width of block l's MLP
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..spec import ConnectionSpec, default_options, make
from ..validation import did_you_mean
from .rows import TRANSPOSED, Change, Row, Tensors, placed

Config = dict[str, Any]


class Layout(NamedTuple):
    """One published layout, both ways."""

    architecture: str  # the reference's class
    defaults: Config  # of its config class, as far as that is public
    fixed: Config  # what every checkpoint has, and ours can represent
    said: tuple[str, ...]  # what config.json must say beside `SAID`
    host: Callable[
        [Config], tuple[type[PreTrainedModel], Config]
    ]  # transformers' class and its config's settings
    rows: Callable[[Config], list[Row]]
    theirs: Callable[[PreTrainedConfig], Config]  # the way back of `host`'s settings


SIZES = ("dim", "n_layer", "n_head", "vocab_size", "block_size", "intermediate_size")
SAID = (
    "dense",
    "use_qk_norm",
    "rope_base",
    *SIZES,
)  # by config.json, or by a default of the reference's
IGNORED = "head_dim"  # the reference's config class puts dim / n_head in its place, whatever config.json says
DENSE = (
    Row("dense_bs.{l}", "a"),
    Row("dynamic_dense.{l}.w1.weight", "W1", TRANSPOSED),
    Row("dynamic_dense.{l}.w2.weight", "W2", TRANSPOSED),
)
OF_DENSE = ("dense_type", "dynamic_dense", "sepln")  # options that dense=False ignores
UNUSED = (
    "dense_bs.",
    "dynamic_dense.",
)  # in a checkpoint with dense=False they are there, and nothing reads them


def completed(given: Mapping[str, Any], layout: Layout) -> Config:
    """Their config.json with the defaults of their config class.

    Raises:
        ValueError: a size is missing or no whole number, or an option is one that ours cannot represent.
    """
    config = layout.defaults | {name: value for name, value in given.items() if name != IGNORED}
    if needed := sorted({*SAID, *layout.fixed, *layout.said} - config.keys()):
        raise ValueError(f"config.json lacks {needed[0]!r}{did_you_mean(needed[0], given)}")
    for name in SIZES:
        if name == "intermediate_size" and config[name] is None and name in layout.defaults:
            config[name] = (
                -(-int(8 * config["dim"] / 3) // 256) * 256
            )  # the reference's, for a gated MLP
        if type(config[name]) is not int or config[name] < 1:
            raise ValueError(
                f"config.json: {name} must be a whole number of at least 1, got {config[name]!r}"
            )
    if not isinstance(config["rope_base"], int | float) or config["rope_base"] <= 0:
        raise ValueError(
            f"config.json: rope_base must be a positive number, got {config['rope_base']!r}"
        )
    for name, value in layout.fixed.items():
        if config[name] != value and (config["dense"] or name not in OF_DENSE):
            raise ValueError(
                f"config.json: {name} must be {value!r} in this layout, got {config[name]!r}"
            )
    if config["n_layer"] < 2:
        raise ValueError(
            "config.json: n_layer must be at least 2, as the MLPs' widths grow from first to last"
        )
    if config["dim"] % config["n_head"]:
        raise ValueError(
            f"config.json: n_head must divide dim={config['dim']}, got {config['n_head']}"
        )
    if config.get("n_local_heads", -1) == -1:
        config["n_local_heads"] = config["n_head"]
    shared = config["n_local_heads"]
    if type(shared) is not int or shared < 1 or config["n_head"] % shared:
        raise ValueError(
            f"config.json: n_local_heads must divide n_head={config['n_head']}, got {shared!r}"
        )
    return config


def shared(config: Config) -> Config:
    """The settings of transformers' config that every body has."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["dim"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["block_size"],
        "tie_word_embeddings": False,
        **{name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "crosslayer": str(arm(config)),
        "crosslayer_widths": widths(config),
    }


def shared_theirs(config: PreTrainedConfig) -> Config:
    factory = make(config.crosslayer)
    every = {name: bool(factory.options.get(name)) for name in ("round64", "expand_last")}
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "block_size": config.max_position_embeddings,
        "rope_base": config.rope_parameters["rope_theta"],
        **{
            name: getattr(config, name, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "tie_word_embeddings": False,
        "dense": factory.name != "prenorm",
        "dynamic_dense": True,
        "sepln": factory.name != "prenorm",
        **every,
    }


def arm(config: Config) -> ConnectionSpec:
    if not config["dense"]:
        return make("prenorm")
    return ConnectionSpec(
        "mudd", {name: True for name in ("round64", "expand_last") if config[name]}
    )


def same_arm(first: str, second: str) -> bool:
    a, b = make(first), make(second)
    return (
        a.name == b.name
        and default_options(a.method) | a.options == default_options(b.method) | b.options
    )


def widths(config: Config) -> list[int]:
    L, F = config["n_layer"], config["intermediate_size"]
    return [round(F * (l / (L - 1) + 0.5) / 128) * 128 for l in range(L)]


def dense_rows(config: Config, body: str, readout: str) -> list[Row]:
    if not config["dense"]:
        return []
    sites = [f"{body}.layers.{l}.connections.0." for l in range(1, config["n_layer"])]
    rows = []
    for l, site in enumerate([*sites, f"{readout}.connection."]):
        rows += placed([row._replace(theirs=row.theirs.format(l=l)) for row in DENSE], "", site)
    return rows


def stacked(*sizes: int) -> Change:
    """Their one matrix of q, k and v, whose rows come one after the other, as three."""

    def there(fused: Tensor) -> Tensors:
        return tuple(part.clone() for part in fused.split(sizes))

    return Change(there, lambda *parts: (torch.cat(parts),))
