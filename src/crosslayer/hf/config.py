"""Configs of transformers from a few sizes."""

import copy
import functools
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..errors import error_with_class
from ..validation import MAX_LAYERS, check_plain, check_positive, did_you_mean
from .attach import find_backbone

_MAX_WIDTH = 2**24  # of a stream, a hidden layer or a vocabulary
_MLP_MULTIPLE = 32  # the hidden width of a gated MLP is rounded up to a multiple of it
# Left out where a config has no such key.
_OPTIONAL_SIZES = ("head_dim", "num_key_value_heads", "ffn_dim", "dff")


def make_config(
    family: str = "llama",
    layers: int = 24,
    dim: int = 2048,
    heads: int = 16,
    vocab: int = 32000,
    overrides: dict[str, Any] | None = None,
) -> Any:
    """The config of a model of transformers, from its sizes.

    Granite is Llama with constant factors. Those that transformers leaves at 1 are set here:
    attention is scaled as in Llama, and embeddings are multiplied so that they start at a standard
    deviation of 1.

    Args:
        family: a model type whose layers `connect` recognises, like llama, qwen3 or gpt_neox.
        layers: number of layers.
        dim: width of the stream.
        heads: number of attention heads.
        vocab: size of the vocabulary; embedding and head are not tied.
        overrides: other keys of the family's config. They override what follows from the sizes.

    Raises:
        ValueError: the family or a key is unknown, the sizes do not fit together, or the family's
            config does not take them.
    """
    if family not in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"unknown family {family!r}{did_you_mean(family, CONFIG_MAPPING_NAMES)}; "
            "known: the models of transformers that connect recognises, like llama, qwen3 and "
            "gpt_neox"
        )
    check_plain("model_config", overrides)
    check_positive(layers=layers, dim=dim, heads=heads, vocab=vocab)
    if dim % (2 * heads):
        raise ValueError(
            f"dim must be a multiple of twice the heads, got dim {dim} and {heads} heads"
        )
    # A copy, as callers may change it.
    return copy.deepcopy(_cached_config(family, layers, dim, heads, vocab, json.dumps(overrides)))


@functools.lru_cache(maxsize=64)  # The arms of a comparison mostly have one config.
def _cached_config(
    family: str, layers: int, dim: int, heads: int, vocab: int, overrides_json: str
) -> PreTrainedConfig:
    overrides = json.loads(overrides_json) or {}
    sizes = {
        "vocab_size": vocab,
        "hidden_size": dim,
        **_mlp_widths(4 * dim),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim // heads,
        "tie_word_embeddings": False,
        # A family's default special tokens need not exist in this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = _build_config(family, sizes, overrides)
    matrices = _count_mlp_matrices(config, 4 * dim)
    if matrices != 2:
        # A gated MLP has three matrices where a plain one has two: 8 D² parameters either way.
        multiples = math.ceil(8 * dim / matrices / _MLP_MULTIPLE)
        sizes |= _mlp_widths(multiples * _MLP_MULTIPLE)
        config = _build_config(family, sizes, overrides)
    _check_sizes_are_taken(config, sizes, overrides)
    return config


def _mlp_widths(width: int) -> dict[str, int]:
    """The hidden width of an MLP, under each name that configs have for it."""
    return {"intermediate_size": width, "ffn_dim": width, "dff": width}


def _count_mlp_matrices(config: PreTrainedConfig, width: int) -> Fraction:
    """The number of matrices of dim × `width` in the first MLP whose projections `connect` knows.

    Where it knows those of no MLP, as in a mixture of experts, this is 2.

    Raises:
        ValueError: `connect` cannot connect the family, or it needs a padding token.
    """
    family = config.model_type
    is_language_model = type(config) in AutoModelForCausalLM._model_mapping
    auto_class = AutoModelForCausalLM if is_language_model else AutoModel
    with host_refusals(f"no {family} can be built of this config"), torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config))
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(
            f"{family} counts positions from a padding token, which is not set here; build such a "
            "model with transformers, then connect it"
        )
    try:
        backbone, wiring = find_backbone(model)
    except ValueError as error:
        reason = str(error).split(". ")[0]
        raise ValueError(f"unknown family {family!r}: {reason}") from None
    for layer, layer_wiring in wiring.wired_layers(backbone):
        for sublayer in layer_wiring.sublayers:
            if sublayer.port == "mlp" and sublayer.up_projections:
                mlp = layer.get_submodule(sublayer.module)
                weights = sum(p.numel() for p in mlp.parameters() if p.dim() == 2)
                if weights:
                    return Fraction(weights, wiring.dim * width)
    return Fraction(2)


def _build_config(
    family: str, sizes: dict[str, Any], overrides: dict[str, Any]
) -> PreTrainedConfig:
    """A family's config. `sizes` may have keys that the family does not know, `overrides` not."""
    if overrides.get("model_type", family) != family:
        raise ValueError("model_config has no model_type; the option family names it")
    if overrides.get("return_dict", True) is not True:
        raise ValueError("model_config: return_dict must be true, as losses read outputs by name")
    with host_refusals(f"the config of {family} refuses these values"):
        plain = AutoConfig.for_model(family)
        keys = {**_known_sizes(plain, sizes, overrides), **overrides, "model_type": family}
        if hasattr(plain, "attention_multiplier") and hasattr(plain, "embedding_multiplier"):
            keys = _granite_factors(plain, keys) | keys
        config = AutoConfig.for_model(**keys)
    check_model_sizes(config)
    _check_heads(config)
    if hasattr(plain, "is_decoder") and "is_decoder" not in overrides:
        config.is_decoder = True  # BERT and its like attend to both sides otherwise.
    known = {*vars(plain), *type(plain).attribute_map}
    for key in overrides:
        # A config keeps a key that it does not know. One that it has taken in is not kept.
        if key not in known and key in vars(config):
            public = [name for name in known if not name.startswith("_")]
            raise ValueError(
                f"{family} has no config key {key!r}{did_you_mean(key, public)}; "
                f"see transformers' {type(plain).__name__}"
            )
    return config


def _known_sizes(
    plain: PreTrainedConfig, sizes: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """The sizes that a family's config takes, without those that `overrides` has by another name.

    Some families derive head_dim, like DeepSeek-V3.
    """
    aliases = plain.attribute_map
    left_out = set(_OPTIONAL_SIZES) - {*inspect.signature(type(plain)).parameters, *aliases}
    left_out |= {name for name, alias in aliases.items() if alias in overrides}
    return {name: size for name, size in sizes.items() if name not in left_out}


def _check_sizes_are_taken(
    config: PreTrainedConfig, sizes: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """Raise a ValueError where a config has another size than the one that was asked for."""
    text = config.get_text_config(decoder=True)
    remedy = "it follows from other keys of the config"
    if text is not config:
        remedy = f"its text model has a separate config; use the family {text.model_type!r}"
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if overrides.keys() & {name, config.attribute_map.get(name)}:
            continue
        for part in _config_parts(text):
            size = getattr(part, name, None)
            if size not in (None, sizes[name]):
                raise ValueError(
                    f"{config.model_type} keeps {name} {size}, got {sizes[name]}: {remedy}"
                )


def _granite_factors(plain: PreTrainedConfig, keys: dict[str, Any]) -> dict[str, float]:
    """Factors of a family like Granite whose default is 1, which no trained model of it has."""
    head_dim = keys["hidden_size"] // keys["num_attention_heads"]
    factors = {
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": 1 / keys.get("initializer_range", plain.initializer_range),
    }
    return {name: factor for name, factor in factors.items() if getattr(plain, name) == 1}


def make_language_model(config: Any, **options: Any) -> PreTrainedModel:
    """A causal language model of transformers with random weights.

    Args:
        config: of transformers.
        options: keyword arguments of `from_config`, like dtype.

    Raises:
        ValueError: the config is not a language model's, or transformers refuses its values.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{config.model_type!r} is no family of language models")
    with host_refusals(f"no {config.model_type} can be built of this config"):
        return AutoModelForCausalLM.from_config(config, **options)


def check_model_sizes(config: Any) -> None:
    """Raise a ValueError for a config of which no model can be built in any time or memory."""
    bounds = {
        "num_hidden_layers": MAX_LAYERS,
        "hidden_size": _MAX_WIDTH,
        "intermediate_size": _MAX_WIDTH,
        "vocab_size": _MAX_WIDTH,
        "num_attention_heads": _MAX_WIDTH,
        "num_key_value_heads": _MAX_WIDTH,
        "head_dim": _MAX_WIDTH,
    }
    for name, bound in bounds.items():
        for part in _config_parts(config):
            size = getattr(part, name, None)
            if isinstance(size, int) and not 1 <= size <= bound:
                raise ValueError(f"{name} must be from 1 to {bound:,}, got {size}")


def _config_parts(config: Any) -> Sequence[Any]:
    """The config itself, or one config for each layer where layers differ in a size."""
    # A config raises an error where it is asked for a size that its layers differ in.
    return config.per_layer_config if getattr(config, "per_layer_attributes", None) else [config]


def _check_heads(config: Any) -> None:
    """Raise a ValueError where query heads cannot be divided between key and value heads.

    Other people's configs are not checked: DeepSeek-V3 does not use its num_key_value_heads.
    """
    for part in _config_parts(config):
        heads = getattr(part, "num_attention_heads", None)
        kv_heads = getattr(part, "num_key_value_heads", None)
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
                f"{kv_heads}"
            )


@contextmanager
def host_refusals(problem: str) -> Iterator[None]:
    """Errors of the host library, from values that a user gave, as a ValueError of one line.

    Configs and constructors of transformers raise errors of any class for a value they do not know:
    a KeyError for an unknown activation function, a ZeroDivisionError for no heads.

    Args:
        problem: what the message begins with.
    """
    try:
        yield
    except (ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{problem}: {error_with_class(error)}") from error
