"""Where each family of transformers models keeps its parts: one row of data a family."""

from typing import NamedTuple


class Sublayer(NamedTuple):
    module: str
    norm: str  # before it
    dropout: str | None = None  # on its output
    widens: tuple[str, ...] = ()  # an MLP's maps into its hidden width ...
    narrows: str = ""  # ... and out of it


class Family(NamedTuple):
    attn: Sublayer
    mlp: Sublayer
    qkv: tuple[str, ...]  # the attention's projections of q, k and v, or the one that is all three
    layers: str  # the body's list of layers ...
    final: str  # ... and its final norm
    parallel: str | None = None  # the config's switch for attention and MLP side by side


LLAMA = Family(
    Sublayer("self_attn", "input_layernorm"),
    Sublayer("mlp", "post_attention_layernorm", widens=("gate_proj", "up_proj"), narrows="down_proj"),
    ("q_proj", "k_proj", "v_proj"),
    layers="layers",
    final="norm",
)

FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt_neox": Family(
        Sublayer("attention", "input_layernorm", "post_attention_dropout"),
        Sublayer("mlp", "post_attention_layernorm", "post_mlp_dropout", ("dense_h_to_4h",), "dense_4h_to_h"),
        ("query_key_value",),
        layers="layers",
        final="final_layer_norm",
        parallel="use_parallel_residual",
    ),
}
