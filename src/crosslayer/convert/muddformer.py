"""MUDDFormer-2.8B's layout: a Llama, or with RMSNorm on q and k a Qwen3, of transformers.

Reference: the authors' modelling code published with the weights. RoPE pairs component j with j +
n/2, as transformers does, so no row is permuted. The reference rounds cos and sin to bfloat16:
`rope="bfloat16"`. With dense=False it is the paper's Transformer++ with one matrix for q, k and v,
and never reads its dense parameters.
"""

from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3ForCausalLM

from .layout import (
    SHARED_DEFAULTS,
    SHARED_FIXED,
    ConfigDict,
    PublishedLayout,
    dense_rows,
    shared_host_config,
    shared_published_config,
    split_matrix_rows,
)
from .rows import TensorRow, prefix_rows

_MODEL_ROWS = (
    TensorRow("tok_embeddings.weight", "model.embed_tokens.weight"),
    TensorRow("norm.weight", "model.norm.weight"),
    TensorRow("output.weight", "lm_head.weight"),
)
_LAYER_ROWS = (
    TensorRow("attention.wo.weight", "self_attn.o_proj.weight"),
    TensorRow("ffn_norm.weight", "post_attention_layernorm.weight"),
    TensorRow("feed_forward.w1.weight", "mlp.gate_proj.weight"),
    TensorRow("feed_forward.w3.weight", "mlp.up_proj.weight"),
    TensorRow("feed_forward.w2.weight", "mlp.down_proj.weight"),
)
_SEPARATE_QKV = (
    TensorRow("attention.wq.weight", "self_attn.q_proj.weight"),
    TensorRow("attention.wk.weight", "self_attn.k_proj.weight"),
    TensorRow("attention.wv.weight", "self_attn.v_proj.weight"),
)
_FUSED_QKV = TensorRow(
    "attention.wqkv.weight",
    "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
)
_QK_NORM = (
    TensorRow("attention.q_norm.weight", "self_attn.q_norm.weight"),
    TensorRow("attention.k_norm.weight", "self_attn.k_norm.weight"),
)
_ONE_NORM = (TensorRow("attention_norm.weight", "input_layernorm.weight"),)
_THREE_NORMS = (  # of q, k and v
    TensorRow("attention_norms.0.weight", "input_layernorm.weight"),
    TensorRow("attention_norms.1.weight", "connections.0.norms.1.weight"),
    TensorRow("attention_norms.2.weight", "connections.0.norms.2.weight"),
)


def _host_config(config: ConfigDict) -> tuple[type[PreTrainedModel], ConfigDict]:
    settings = shared_host_config(config) | {
        "num_key_value_heads": config["n_local_heads"],
        "head_dim": config["dim"] // config["n_head"],
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_base"]},
    }
    if config["use_qk_norm"]:
        return Qwen3ForCausalLM, settings | {"use_sliding_window": False}
    return LlamaForCausalLM, settings


def _tensor_rows(config: ConfigDict) -> list[TensorRow]:
    head_dim = config["dim"] // config["n_head"]
    q_size = config["n_head"] * head_dim
    kv_size = config["n_local_heads"] * head_dim
    layer = list(_LAYER_ROWS)
    if config["dense"]:
        layer += _SEPARATE_QKV
    else:
        layer.append(_FUSED_QKV._replace(change=split_matrix_rows(q_size, kv_size, kv_size)))
    if config["use_qk_norm"]:
        layer += _QK_NORM
    rows = [*_MODEL_ROWS, *dense_rows(config, "model", "model.norm")]
    for l in range(config["n_layer"]):
        has_three_norms = config["dense"] and l > 0  # block 0 reads the embedding alone
        norms = _THREE_NORMS if has_three_norms else _ONE_NORM
        rows += prefix_rows([*layer, *norms], f"layers.{l}.", f"model.layers.{l}.")
    return rows


def _published_config(config: PreTrainedConfig) -> ConfigDict:
    return shared_published_config(config) | {
        "n_local_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "use_qk_norm": config.model_type == "qwen3",
    }


def _default_width(dim: int) -> int:
    """The width of a gated MLP: 8/3 of D, rounded up to a multiple of 256."""
    return -(-int(8 * dim / 3) // 256) * 256


LAYOUT = PublishedLayout(
    architecture="MUDDFormer",
    defaults=SHARED_DEFAULTS | {"vocab_size": 50432, "norm_eps": 1e-6},
    default_width=_default_width,
    fixed=SHARED_FIXED,
    host_config=_host_config,
    tensor_rows=_tensor_rows,
    published_config=_published_config,
)
