"""Configurations of transformers from a few sizes."""

from typing import Any

from transformers import AutoConfig

from ..validation import check_positive, did_you_mean
from .families import FAMILIES


def make_config(
    family: str = "llama",
    layers: int = 24,
    dim: int = 2048,
    heads: int = 16,
    vocab: int = 32000,
    body: dict[str, Any] | None = None,
) -> Any:
    """A body's configuration, of transformers, from its sizes.

    Args:
        family: a language model's of transformers that `connect` knows, like llama, qwen3, gpt_neox or arcee.
        layers: of the body.
        dim: width of the stream.
        heads: of the attention.
        vocab: size of the vocabulary; embedding and head are not tied.
        body: any other keys of the family's configuration, which come before what the sizes give.
    """
    if family not in FAMILIES:
        raise ValueError(
            f"unknown family {family!r}{did_you_mean(family, FAMILIES)}; known: {', '.join(FAMILIES)}"
        )
    check_positive(layers=layers, dim=dim, heads=heads, vocab=vocab)
    if dim % (2 * heads):
        raise ValueError(
            f"dim must be a multiple of twice the heads, got dim {dim} and {heads} heads"
        )
    # a gated MLP has three matrices for the plain one's two: 8 D² parameters either way
    gated = any("gate" in name for name in FAMILIES[family].mlp.widens)
    width = -(-dim * 8 // 3 // 32) * 32 if gated else 4 * dim
    sizes = {
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim // heads,
        "tie_word_embeddings": False,
        **dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id")
        ),  # a family's own are no tokens of this one
    }
    return AutoConfig.for_model(family, **{**sizes, **(body or {})})
