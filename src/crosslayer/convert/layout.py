"""What the layouts of published MUDD checkpoints share: gpt-fast's names for the sizes, and the
dense connections'.

dense_bs.{l}                  a [C, l+2] of the depth aggregation after block l; here a parameter of
                              the site that opens block l + 1
dynamic_dense.{l}.w1.weight   W1ᵀ [K, D];   dynamic_dense.{l}.w2.weight   W2ᵀ [C(l+2), K]
F_l = round(F(l/(L−1) + 0.5)/128)·128, l = 0..L−1: the hidden width of block l's MLP
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..spec import ConnectionSpec, make
from ..validation import LARGEST_SIZE, MAX_LAYERS, did_you_mean
from .rows import TRANSPOSE, TensorChange, TensorRow, Tensors, prefix_rows

ConfigDict = dict[str, Any]


class Layout(NamedTuple):
    """One published layout, in both directions.

    Args:
        architecture: the name of the reference's class.
        defaults: of the reference's config class, as far as they are public.
        fixed: options with the one value that can be represented here.
        required: keys that config.json must have in addition to `REQUIRED`, unless they have a
            default.
        host_config: a completed config.json -> transformers' class and the settings of its config.
        tensor_rows: a completed config.json -> the rows of all tensors, from the layout to
            transformers.
        published_config: transformers' config -> config.json, the inverse of `host_config`.
    """

    architecture: str
    defaults: ConfigDict
    fixed: ConfigDict
    required: tuple[str, ...]
    host_config: Callable[[ConfigDict], tuple[type[PreTrainedModel], ConfigDict]]
    tensor_rows: Callable[[ConfigDict], list[TensorRow]]
    published_config: Callable[[PreTrainedConfig], ConfigDict]


SIZES = ("dim", "n_layer", "n_head", "vocab_size", "block_size", "intermediate_size")
REQUIRED = ("dense", "use_qk_norm", "rope_base", *SIZES)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The reference's config class replaces it by dim / n_head, whatever config.json says.
IGNORED = "head_dim"
DENSE_OPTIONS = ("dense_type", "dynamic_dense", "sepln")  # ignored where dense=False
# A checkpoint with dense=False contains these tensors, and the reference never reads them.
IDLE_TENSORS = ("dense_bs.", "dynamic_dense.")
DENSE_ROWS = (
    TensorRow("dense_bs.{l}", "a"),
    TensorRow("dynamic_dense.{l}.w1.weight", "W1", TRANSPOSE),
    TensorRow("dynamic_dense.{l}.w2.weight", "W2", TRANSPOSE),
)


def complete_config(given: Mapping[str, Any], layout: Layout) -> ConfigDict:
    """A config.json with the defaults of the reference's config class, checked.

    Raises:
        ValueError: a size is missing or no whole number, or an option cannot be represented here.
    """
    config = dict(layout.defaults)
    config.update({name: value for name, value in given.items() if name != IGNORED})
    missing = sorted({*REQUIRED, *layout.fixed, *layout.required} - config.keys())
    if missing:
        raise ValueError(f"config.json lacks {missing[0]!r}{did_you_mean(missing[0], given)}")
    if config["intermediate_size"] is None and "intermediate_size" in layout.defaults:
        # the reference's width of a gated MLP: 8/3 of D, rounded up to a multiple of 256
        _check_size(config, "dim")
        config["intermediate_size"] = -(-int(8 * config["dim"] / 3) // 256) * 256
    for name in SIZES:
        _check_size(config, name)
    if not isinstance(config["rope_base"], int | float) or config["rope_base"] <= 0:
        raise ValueError(
            f"config.json: rope_base must be a positive number, got {config['rope_base']!r}"
        )
    for name, value in layout.fixed.items():
        is_ignored = name in DENSE_OPTIONS and not config["dense"]
        if config[name] != value and not is_ignored:
            raise ValueError(
                f"config.json: {name} must be {value!r} in this layout, got {config[name]!r}"
            )
    if config.get("n_local_heads", -1) == -1:
        config["n_local_heads"] = config["n_head"]
    _check_size(config, "n_local_heads")
    _check_shape(config)
    return config


def _check_shape(config: Mapping[str, Any]) -> None:
    if config["n_layer"] < 2:
        raise ValueError(
            "config.json: n_layer must be at least 2, because the MLPs' widths grow from the first "
            "layer to the last"
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


def _check_size(config: Mapping[str, Any], name: str) -> None:
    bound = MAX_LAYERS if name == "n_layer" else LARGEST_SIZE
    value = config[name]
    if type(value) is not int or not 1 <= value <= bound:
        raise ValueError(f"config.json: {name} must be from 1 to {bound:,}, got {value!r}")


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
        "crosslayer": str(connection_spec(config)),
        "crosslayer_widths": mlp_widths(config),
    }
    for name in TOKEN_IDS:
        settings[name] = config.get(name)
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
        "dynamic_dense": True,
        "sepln": is_dense,
        "round64": bool(spec.options.get("round64")),
        "expand_last": bool(spec.options.get("expand_last")),
    }
    for name in TOKEN_IDS:
        published[name] = getattr(config, name, None)
    return published


def connection_spec(config: ConfigDict) -> ConnectionSpec:
    """The connection of a completed config.json."""
    if not config["dense"]:
        return make("prenorm")
    return make("mudd", **{name: True for name in ("round64", "expand_last") if config[name]})


def mlp_widths(config: ConfigDict) -> list[int]:
    """F_l, the hidden width of each block's MLP."""
    L = config["n_layer"]
    F = config["intermediate_size"]
    return [round(F * (l / (L - 1) + 0.5) / 128) * 128 for l in range(L)]


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
        of_block = [row._replace(source=row.source.format(l=l)) for row in DENSE_ROWS]
        rows += prefix_rows(of_block, "", site)
    return rows


def split_rows(*sizes: int) -> TensorChange:
    """One matrix as several, which have `sizes` of its rows."""

    def split_matrix(fused: Tensor) -> Tensors:
        return tuple(part.clone() for part in fused.split(sizes))

    def join_matrices(*parts: Tensor) -> Tensors:
        return (torch.cat(parts),)

    return TensorChange(split_matrix, join_matrices)
