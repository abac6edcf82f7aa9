"""Where each family of models keeps its parts: one row of data a family, and no forward of its own.

The key is the config's `model_type`, or the class's name where a model has no such config. A family that is not here is
added the same way, from anywhere: `FAMILIES["mine"] = Family(…)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Sublayer(NamedTuple):
    module: str
    norm: str | None  # before it; None where the family norms outputs alone
    after: tuple[str, ...] = ()  # what its output passes on the way to the stream: dropout, a norm
    widens: tuple[str, ...] = ()  # an MLP's maps into its hidden width ...
    narrows: str = ""  # ... and out of it


class Fused(NamedTuple):
    """How the outputs of one projection are divided: `groups` times so many of q, then of k, then of v."""

    groups: int
    sizes: tuple[int, int, int]


class Modulation(NamedTuple):
    """What conditioning does to a sub-layer: gate · F(x · (1 + scale) + shift), a [B 1 D] each."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Family(NamedTuple):
    attn: Sublayer
    mlp: Sublayer
    qkv: tuple[str, ...]  # the attention's projections of q, k and v, or the one that is all three
    layers: str = "layers"  # the body's list of layers ...
    final: str = "norm"  # ... and its final norm
    parallel: str | None = None  # the config's switch for attention and MLP side by side
    fused: Callable[[Any], Fused] | None = (
        None  # given the config, where one projection is q, k and v
    )
    width: str = "config.hidden_size"  # of the stream, from the body
    # given the layer, the body's dtype and the layer's arguments: what is left of these for the attention, and the
    # modulation of the attention and of the MLP
    condition: (
        Callable[[nn.Module, torch.dtype, dict[str, Any]], tuple[dict[str, Any], list[Modulation]]]
        | None
    ) = None


def per_head(config: Any) -> Fused:
    size = config.hidden_size // config.num_attention_heads
    return Fused(config.num_attention_heads, (size, size, size))


def one_after_another(config: Any) -> Fused:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return Fused(1, (config.num_attention_heads * size, shared * size, shared * size))


def ada_zero(
    layer: Any, dtype: torch.dtype, arguments: dict[str, Any]
) -> tuple[dict[str, Any], list[Modulation]]:
    """adaLN-Zero (DiT, arXiv 2212.09748): six vectors from the timestep and the class, three a sub-layer."""
    emb = layer.norm1.emb(arguments["timestep"], arguments["class_labels"], hidden_dtype=dtype)
    parts = layer.norm1.linear(layer.norm1.silu(emb))[:, None].chunk(6, -1)
    rest = {
        "attention_mask": arguments["attention_mask"],
        **(arguments["cross_attention_kwargs"] or {}),
    }
    return rest, [Modulation(*parts[:3]), Modulation(*parts[3:])]


GATED = ("gate_proj", "up_proj")
QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = Sublayer("self_attn", "input_layernorm")
LLAMA = Family(ATTENTION, Sublayer("mlp", "post_attention_layernorm", (), GATED, "down_proj"), QKV)
MOE = Family(ATTENTION, Sublayer("mlp", "post_attention_layernorm"), QKV)
# norms before and after each sub-layer
SANDWICH = Family(
    Sublayer("self_attn", "input_layernorm", ("post_attention_layernorm",)),
    Sublayer(
        "mlp", "pre_feedforward_layernorm", ("post_feedforward_layernorm",), GATED, "down_proj"
    ),
    QKV,
)

FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "arcee": LLAMA._replace(
        mlp=Sublayer("mlp", "post_attention_layernorm", (), ("up_proj",), "down_proj")
    ),
    "olmo": LLAMA,
    "mixtral": MOE,
    "olmoe": MOE,
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "olmo2": Family(
        Sublayer("self_attn", None, ("post_attention_layernorm",)),
        Sublayer("mlp", None, ("post_feedforward_layernorm",), GATED, "down_proj"),
        QKV,
    ),
    "phi3": Family(
        Sublayer("self_attn", "input_layernorm", ("resid_attn_dropout",)),
        Sublayer(
            "mlp",
            "post_attention_layernorm",
            ("resid_mlp_dropout",),
            ("gate_up_proj",),
            "down_proj",
        ),
        ("qkv_proj",),
        fused=one_after_another,
    ),
    "gpt2": Family(
        Sublayer("attn", "ln_1"),
        Sublayer("mlp", "ln_2", (), ("c_fc",), "c_proj"),
        ("c_attn",),
        layers="h",
        final="ln_f",
        fused=one_after_another,
    ),
    "gpt_neox": Family(
        Sublayer("attention", "input_layernorm", ("post_attention_dropout",)),
        Sublayer(
            "mlp",
            "post_attention_layernorm",
            ("post_mlp_dropout",),
            ("dense_h_to_4h",),
            "dense_4h_to_h",
        ),
        ("query_key_value",),
        final="final_layer_norm",
        parallel="use_parallel_residual",
        fused=per_head,
    ),
    "vit": Family(
        Sublayer("attention", "layernorm_before", ("dropout",)),
        Sublayer("mlp", "layernorm_after", ("dropout",), ("fc1",), "fc2"),
        QKV,
        final="layernorm",
    ),
    "DiTTransformer2DModel": Family(
        Sublayer("attn1", "norm1.norm"),
        Sublayer("ff", "norm3"),
        ("to_q", "to_k", "to_v"),
        layers="transformer_blocks",
        final="norm_out",
        width="inner_dim",
        condition=ada_zero,
    ),
}
