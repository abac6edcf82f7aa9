"""What the layouts of published MUDD checkpoints share: gpt-fast's names for the sizes, and the
dense connections'.

dense_bs.{l}                  a [C, l+2] of the depth aggregation after block l; here a parameter of
                              the site that opens block l + 1
dynamic_dense.{l}.w1.weight   W1ᵀ [K, D];   dynamic_dense.{l}.w2.weight   W2ᵀ [C(l+2), K]
F_l = round(F(l/(L−1) + 0.5)/128)·128, l = 0..L−1: the hidden width of block l's MLP
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..spec import ConnectionSpec, make
from ..validation import MAX_LAYERS, check_option_type, check_positive
from .rows import (
    TRANSPOSE,
    TensorChange,
    TensorRow,
    TensorTuple,
    expand_rows,
    prefix_rows,
    short_spec,
)

ConfigDict = dict[str, Any]


class PublishedLayout(NamedTuple):
    """One published layout, in both directions.

    Args:
        architecture: the name of the reference's class.
        defaults: of the reference's config class. A value in config.json is of its default's type.
        default_width: the width D -> intermediate_size where config.json has none.
        fixed: options with the one value that can be represented here.
        host_config: a completed config.json -> transformers' class and the settings of its config.
        tensor_rows: a completed config.json -> the rows of all tensors, from the layout to
            transformers.
        published_config: transformers' config -> config.json, the inverse of `host_config`.
    """

    architecture: str
    defaults: ConfigDict
    default_width: Callable[[int], int]
    fixed: ConfigDict
    host_config: Callable[[ConfigDict], tuple[type[PreTrainedModel], ConfigDict]]
    tensor_rows: Callable[[ConfigDict], list[TensorRow]]
    published_config: Callable[[PreTrainedConfig], ConfigDict]


# What the layouts have in common: defaults of the reference's config classes, and options with the
# one value that can be represented here.
SHARED_DEFAULTS: ConfigDict = {
    "block_size": 2048,
    "n_layer": 32,
    "n_head": 32,
    "dim": 2560,
    "n_local_heads": -1,
    "intermediate_size": None,
    "rope_base": 10000.0,
    "use_qk_norm": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dense": True,
    "dynamic_dense": True,
    "sepln": True,
    "dense_type": "qkvr",
    "expand_last": False,
    "round64": False,
}
SHARED_FIXED: ConfigDict = {"dense_type": "qkvr", "dynamic_dense": True, "sepln": True}
_SIZES = ("dim", "n_layer", "n_head", "vocab_size", "block_size", "intermediate_size")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The reference's config class replaces it by dim / n_head, whatever config.json says.
_IGNORED = "head_dim"
_DENSE_OPTIONS = ("dense_type", "dynamic_dense", "sepln")  # ignored where dense=False
# The residual stream is r in the reference, m in the authors' JAX trainer and in crosslayer 0.1.
_DENSE_TYPE_ALIASES = {"qkvm": "qkvr"}
# A checkpoint with dense=False contains these tensors, and the reference never reads them.
IDLE_TENSORS = ("dense_bs.", "dynamic_dense.")
_DENSE_ROWS = (
    TensorRow("dense_bs.{l}", "a"),
    TensorRow("dynamic_dense.{l}.w1.weight", "W1", TRANSPOSE),
    TensorRow("dynamic_dense.{l}.w2.weight", "W2", TRANSPOSE),
)


def complete_config(given: Mapping[str, Any], layout: PublishedLayout) -> ConfigDict:
    """A config.json with the defaults of the reference's config class, checked.

    Raises:
        ValueError: a value is of the wrong type or out of range, or an option cannot be represented
            here. The message starts with "config.json".
    """
    config = dict(layout.defaults)
    config.update({name: value for name, value in given.items() if name != _IGNORED})
    _check_types(config, layout)
    for name, default in layout.defaults.items():
        if isinstance(default, float):  # transformers takes no whole number for one
            config[name] = float(config[name])
    config["dense_type"] = _DENSE_TYPE_ALIASES.get(config["dense_type"], config["dense_type"])
    if config["intermediate_size"] is None:
        check_positive(**{"config.json: dim": config["dim"]})
        config["intermediate_size"] = layout.default_width(config["dim"])
    if config["n_local_heads"] == -1:
        config["n_local_heads"] = config["n_head"]
    for name in (*_SIZES, "n_local_heads"):
        check_positive(**{f"config.json: {name}": config[name]})
    for name, value in layout.fixed.items():
        is_ignored = name in _DENSE_OPTIONS and not config["dense"]
        if config[name] != value and not is_ignored:
            raise ValueError(
                f"config.json: {name} must be {value!r} in this layout, got {config[name]!r}"
            )
    _check_shape(config)
    _check_tokens(config)
    return config


def _check_types(config: Mapping[str, Any], layout: PublishedLayout) -> None:
    for name, default in layout.defaults.items():
        kind = type(default)
        if kind in (bool, float, str):
            check_option_type(f"config.json: {name}", config[name], kind)
        if kind is float and config[name] <= 0:
            raise ValueError(f"config.json: {name} must be a positive number, got {config[name]!r}")


def _check_shape(config: Mapping[str, Any]) -> None:
    if config["n_layer"] > MAX_LAYERS:
        raise ValueError(
            f"config.json: n_layer must be at most {MAX_LAYERS:,}, got {config['n_layer']}"
        )
    if config["n_layer"] < 2:
        raise ValueError(
            f"config.json: n_layer must be at least 2, got {config['n_layer']}, because the MLPs' "
            "widths grow from the first layer to the last"
        )
    if config["dim"] % config["n_head"]:
        raise ValueError(
            f"config.json: n_head must divide dim={config['dim']}, got {config['n_head']}"
        )
    if config["n_head"] % config["n_local_heads"]:
        raise ValueError(
            f"config.json: n_local_heads must divide n_head={config['n_head']}, "
            f"got {config['n_local_heads']}"
        )
    head_dim = config["dim"] // config["n_head"]
    rotary_pct = config.get("rotary_pct", 1.0)
    rotated = int(head_dim * rotary_pct)
    if rotary_pct > 1 or rotated < 2 or rotated % 2:
        raise ValueError(
            f"config.json: an even number of a head's {head_dim} components must be rotated, "
            f"got {rotated} (rotary_pct={rotary_pct!r})"
        )


def _check_tokens(config: Mapping[str, Any]) -> None:
    for name in _TOKEN_IDS:
        value = config[name]
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < config["vocab_size"]:
            raise ValueError(
                f"config.json: {name} must be null or a token below "
                f"vocab_size={config['vocab_size']}, got {reprlib.repr(value)}"
            )


def shared_host_config(config: ConfigDict) -> ConfigDict:
    """The settings of transformers' config that every host model has."""
    settings = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["dim"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config["block_size"],
        "tie_word_embeddings": False,
        "crosslayer": str(_connection_spec(config)),
        "crosslayer_widths": mlp_widths(config),
    }
    for name in _TOKEN_IDS:
        settings[name] = config[name]
    return settings


def shared_published_config(config: PreTrainedConfig) -> ConfigDict:
    """The inverse of `shared_host_config`."""
    spec = make(config.crosslayer)
    is_dense = spec.name != "prenorm"
    published = {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "block_size": config.max_position_embeddings,
        "rope_base": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "dense": is_dense,
        "dense_type": "qkvr",
        "dynamic_dense": True,
        "sepln": is_dense,
        "round64": bool(spec.options.get("round64")),
        "expand_last": bool(spec.options.get("expand_last")),
    }
    for name in _TOKEN_IDS:
        published[name] = getattr(config, name, None)
    return published


def _connection_spec(config: ConfigDict) -> ConnectionSpec:
    """The connection of a completed config.json."""
    if not config["dense"]:
        return make("prenorm")
    return short_spec(
        "mudd",
        round64=config["round64"],
        expand_last=config["expand_last"],
        eps=config["norm_eps"],
    )


def mlp_widths(config: ConfigDict) -> list[int]:
    """F_l, the hidden width of each block's MLP."""
    F = config["intermediate_size"]
    L = config["n_layer"]
    return [round(F * (l / (L - 1) + 0.5) / 128) * 128 for l in range(L)]


def anchor_shapes(config: ConfigDict) -> dict[str, tuple[int, ...]]:
    """The shapes of two tensors that show all sizes of a completed config.json."""
    last = config["n_layer"] - 1
    return {
        "tok_embeddings.weight": (config["vocab_size"], config["dim"]),
        f"layers.{last}.feed_forward.w1.weight": (mlp_widths(config)[last], config["dim"]),
    }


def dense_rows(config: ConfigDict, backbone: str, final_norm: str) -> list[TensorRow]:
    """The rows of the dense connections.

    Args:
        config: a completed config.json.
        backbone: transformers' name of the module that has the layers.
        final_norm: transformers' name of the final norm, beneath which the readout's parameters
            are.
    """
    if not config["dense"]:
        return []
    sites = [f"{backbone}.layers.{l}.connections.0." for l in range(1, config["n_layer"])]
    sites.append(f"{final_norm}.connection.")
    rows = []
    for l, site in enumerate(sites):
        rows += prefix_rows(expand_rows(_DENSE_ROWS, l=l), "", site)
    return rows


def split_matrix_rows(*sizes: int) -> TensorChange:
    """One matrix as several, which have `sizes` of its rows."""

    def split_matrix(fused: Tensor) -> TensorTuple:
        return tuple(part.clone() for part in fused.split(sizes))

    def join_matrices(*parts: Tensor) -> TensorTuple:
        return (torch.cat(parts),)

    return TensorChange(split_matrix, join_matrices)
