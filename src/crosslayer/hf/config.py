"""Configs of transformers from a few sizes."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..validation import check_positive, did_you_mean
from .families import FAMILIES

_MLP_MULTIPLE = 32  # the hidden width of a gated MLP is rounded up to a multiple of it


def make_config(
    family: str = "llama",
    layers: int = 24,
    dim: int = 2048,
    heads: int = 16,
    vocab: int = 32000,
    overrides: dict[str, Any] | None = None,
) -> Any:
    """The transformers config of a language model, from its sizes.

    Args:
        family: a language model that `connect` knows, for example llama, qwen3, gpt_neox or arcee.
        layers: number of layers.
        dim: width of the stream.
        heads: number of attention heads.
        vocab: size of the vocabulary; embedding and head are not tied.
        overrides: other keys of the family's config. They override what follows from the sizes.

    Raises:
        ValueError: the family or a key is unknown, or the sizes do not fit together.
    """
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"unknown family {family!r}{did_you_mean(family, FAMILIES)}; known: {known}"
        )
    check_positive(layers=layers, dim=dim, heads=heads, vocab=vocab)
    if dim % (2 * heads):
        raise ValueError(
            f"dim must be a multiple of twice the heads, got dim {dim} and {heads} heads"
        )
    # A gated MLP has three matrices where a plain one has two: 8 D² parameters either way.
    is_gated = any("gate" in name for name in FAMILIES[family].mlp.up_projections)
    mlp_width = 4 * dim
    if is_gated:
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


def _build_config(
    family: str, sizes: dict[str, Any], overrides: dict[str, Any]
) -> PreTrainedConfig:
    """A family's config. `sizes` may have keys that the family does not know, `overrides` not."""
    keys = sizes | overrides
    try:
        plain = AutoConfig.for_model(family, bos_token_id=None, eos_token_id=None)
        config = AutoConfig.for_model(family, **keys)
    except Exception as error:  # transformers raises classes of every kind
        reason = " ".join(str(error).split())
        raise ValueError(f"the config of {family} refuses these values: {reason}") from error
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
