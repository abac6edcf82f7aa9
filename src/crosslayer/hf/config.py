"""Configs of transformers from a few sizes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
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

from ..validation import MAX_LAYERS, check_plain, check_positive, did_you_mean
from .attach import find_backbone

MAX_WIDTH = 2**24  # of a stream, a hidden layer or a vocabulary
_MLP_MULTIPLE = 32  # the hidden width of a gated MLP is rounded up to a multiple of it


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
        ValueError: the family or a key is unknown, or the sizes do not fit together.
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
    # A gated MLP has three matrices where a plain one has two: 8 D² parameters either way.
    mlp_width = 4 * dim
    if _has_gated_mlp(family):
        multiples = -(-dim * 8 // 3 // _MLP_MULTIPLE)
        mlp_width = multiples * _MLP_MULTIPLE
    sizes = {
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": mlp_width,
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
    return _build_config(family, sizes, overrides or {})


@functools.cache
def _has_gated_mlp(family: str) -> bool:
    """Whether the MLP of a family's first layer has a gate.

    Raises:
        ValueError: `connect` cannot connect the family, or it needs a padding token.
    """
    with host_refusals(f"unknown family {family!r}"):
        config = AutoConfig.for_model(
            family, num_hidden_layers=1, bos_token_id=None, eos_token_id=None
        )
        is_language_model = type(config) in AutoModelForCausalLM._model_mapping
        auto_class = AutoModelForCausalLM if is_language_model else AutoModel
        with torch.device("meta"):
            model = auto_class.from_config(config)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(
            f"{family} counts positions from a padding token, which is not set here; build such a "
            "model with transformers, then connect it"
        )
    try:
        _, wiring = find_backbone(model)
    except ValueError as error:
        reason = str(error).split(". ")[0]
        raise ValueError(f"unknown family {family!r}: {reason}") from None
    return any("gate" in name for part in wiring.sublayers for name in part.up_projections)


def _build_config(
    family: str, sizes: dict[str, Any], overrides: dict[str, Any]
) -> PreTrainedConfig:
    """A family's config. `sizes` may have keys that the family does not know, `overrides` not."""
    if overrides.get("model_type", family) != family:
        raise ValueError("model_config has no model_type; the option family names it")
    if overrides.get("return_dict", True) is not True:
        raise ValueError("model_config: return_dict must be true, as losses read outputs by name")
    keys = {**sizes, **overrides, "model_type": family}
    with host_refusals(f"the config of {family} refuses these values"):
        plain = AutoConfig.for_model(family, bos_token_id=None, eos_token_id=None)
        if hasattr(plain, "attention_multiplier") and hasattr(plain, "embedding_multiplier"):
            keys = _granite_factors(plain, keys) | keys
        config = AutoConfig.for_model(**keys)
    check_sizes(config)
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


def _granite_factors(plain: PreTrainedConfig, keys: dict[str, Any]) -> dict[str, float]:
    """Factors of a family like Granite whose default is 1, which no trained model of it has."""
    factors = {
        "attention_multiplier": keys["head_dim"] ** -0.5,
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


def check_sizes(config: Any) -> None:
    """Raise a ValueError for a config of which no model can be built in any time or memory."""
    bounds = {
        "num_hidden_layers": MAX_LAYERS,
        "hidden_size": MAX_WIDTH,
        "intermediate_size": MAX_WIDTH,
        "vocab_size": MAX_WIDTH,
        "num_attention_heads": MAX_WIDTH,
        "num_key_value_heads": MAX_WIDTH,
        "head_dim": MAX_WIDTH,
    }
    of_layers = getattr(config, "per_layer_attributes", None) or ()
    for name, bound in bounds.items():
        # A config raises an error where it is asked for a size that its layers differ in.
        for part in config.per_layer_config if name in of_layers else [config]:
            size = getattr(part, name, None)
            if isinstance(size, int) and not 1 <= size <= bound:
                raise ValueError(f"{name} must be from 1 to {bound:,}, got {size}")


def _check_heads(config: Any) -> None:
    """Raise a ValueError where query heads cannot be divided between key and value heads.

    Other people's configs are not checked: DeepSeek-V3 does not use its num_key_value_heads.
    """
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
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
        raise ValueError(f"{problem}: {type(error).__name__} {error}") from error
