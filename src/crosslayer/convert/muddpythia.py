"""MUDDPythia-1.4B's and 2.8B's layout: GPT-NeoX with an RMSNorm per head on q and k.

Reference: the authors' modelling and config code published with the weights. LayerNorms with bias,
erf-GELU, biases in every linear map of a block, RoPE on the first `rotary_pct` of a head with
component j paired with j + n/2, attention and MLP in parallel:
X_{l+1} = S_r + MHA(…) + FFN(n(S_r)). The dense connections are those of the reference's 2.8B
MUDDFormer. `norm_eps`, 1e-5 in both checkpoints, is the eps of every norm, the generator's too. The
reference rounds RoPE's table to float16: `rope="float16"`.
"""

import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel

from .layout import (
    SHARED_DEFAULTS,
    SHARED_FIXED,
    ConfigDict,
    PublishedLayout,
    dense_rows,
    shared_host_config,
    shared_published_config,
)
from .rows import TensorChange, TensorRow, TensorTuple, expand_rows, prefix_rows

_MODEL_ROWS = (
    TensorRow("tok_embeddings.weight", "gpt_neox.embed_in.weight"),
    TensorRow("norm.weight", "gpt_neox.final_layer_norm.weight"),
    TensorRow("norm.bias", "gpt_neox.final_layer_norm.bias"),
    TensorRow("output.weight", "lm_head.weight"),
)
# {p} is weight and bias
_LAYER_ROWS = (
    TensorRow("attention.wo.{p}", "attention.dense.{p}"),
    TensorRow("ffn_norm.{p}", "post_attention_layernorm.{p}"),
    TensorRow("feed_forward.w1.{p}", "mlp.dense_h_to_4h.{p}"),
    TensorRow("feed_forward.w2.{p}", "mlp.dense_4h_to_h.{p}"),
)
_SEPARATE_QKV = TensorRow(
    "attention.wq.{p} attention.wk.{p} attention.wv.{p}", "attention.query_key_value.{p}"
)
_FUSED_QKV = TensorRow("attention.wqkv.{p}", "attention.query_key_value.{p}")
_QK_NORM = (
    TensorRow("attention.q_norm.weight", "attention.query_key_value.q_norm.weight"),
    TensorRow("attention.k_norm.weight", "attention.query_key_value.k_norm.weight"),
)
_ONE_NORM = (TensorRow("attention_norm.{p}", "input_layernorm.{p}"),)
_THREE_NORMS = (  # of q, k and v
    TensorRow("attention_norms.0.{p}", "input_layernorm.{p}"),
    TensorRow("attention_norms.1.{p}", "connections.0.norms.1.{p}"),
    TensorRow("attention_norms.2.{p}", "connections.0.norms.2.{p}"),
)

# Options that this layout alone has, with the one value of each that can be represented here.
_OWN_FIXED: ConfigDict = {"use_linear_bias": True, "window_size": None, "window_type": None}


def _interleave_heads(heads: int) -> TensorChange:
    """q, k and v as GPT-NeoX's one map, whose rows are (head, q | k | v, channel)."""

    def interleave(*qkv: Tensor) -> TensorTuple:
        by_head = [part.unflatten(0, (heads, -1)) for part in qkv]
        return (torch.stack(by_head, 1).flatten(0, 2),)

    def separate(fused: Tensor) -> TensorTuple:
        qkv = fused.unflatten(0, (heads, 3, -1)).unbind(1)
        return tuple(part.flatten(0, 1) for part in qkv)

    return TensorChange(interleave, separate)


def _interleave_fused_heads(heads: int) -> TensorChange:
    """The same where q, k and v are one matrix, one after the other."""
    separate_heads = _interleave_heads(heads)

    def interleave(fused: Tensor) -> TensorTuple:
        return separate_heads.apply(*fused.chunk(3))

    def concatenate(fused: Tensor) -> TensorTuple:
        return (torch.cat(separate_heads.revert(fused)),)

    return TensorChange(interleave, concatenate)


def _host_config(config: ConfigDict) -> tuple[type[PreTrainedModel], ConfigDict]:
    if config["n_local_heads"] != config["n_head"]:
        raise ValueError(
            f"config.json: n_local_heads must be n_head={config['n_head']} in this layout, "
            f"got {config['n_local_heads']}"
        )
    settings = shared_host_config(config) | {
        "hidden_act": "gelu",
        "layer_norm_eps": config["norm_eps"],
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_parallel_residual": config["use_parallel_residual"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config["rope_base"],
            "partial_rotary_factor": config["rotary_pct"],
        },
        "crosslayer_qk_norm": config["use_qk_norm"],
    }
    return GPTNeoXForCausalLM, settings


def _tensor_rows(config: ConfigDict) -> list[TensorRow]:
    heads = config["n_head"]
    if config["dense"]:
        qkv = _SEPARATE_QKV._replace(change=_interleave_heads(heads))
    else:
        qkv = _FUSED_QKV._replace(change=_interleave_fused_heads(heads))
    rows = [*_MODEL_ROWS, *dense_rows(config, "gpt_neox", "gpt_neox.final_layer_norm")]
    for l in range(config["n_layer"]):
        has_three_norms = config["dense"] and l > 0  # block 0 reads the embedding alone
        norms = _THREE_NORMS if has_three_norms else _ONE_NORM
        layer = []
        for p in ("weight", "bias"):
            layer += expand_rows((*_LAYER_ROWS, qkv, *norms), p=p)
        if config["use_qk_norm"]:
            layer += _QK_NORM
        rows += prefix_rows(layer, f"layers.{l}.", f"gpt_neox.layers.{l}.")
    return rows


def _published_config(config: PreTrainedConfig) -> ConfigDict:
    return shared_published_config(config) | {
        "n_local_heads": config.num_attention_heads,
        "norm_eps": config.layer_norm_eps,
        "use_qk_norm": getattr(config, "crosslayer_qk_norm", False),
        "use_parallel_residual": config.use_parallel_residual,
        "rotary_pct": config.rope_parameters["partial_rotary_factor"],
        "use_linear_bias": True,
        "stack_hidden": False,
    }


def _default_width(dim: int) -> int:
    return 4 * dim


LAYOUT = PublishedLayout(
    architecture="MUDDPythia",
    defaults=SHARED_DEFAULTS
    | {
        "vocab_size": 32000,
        "norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
    }
    | _OWN_FIXED,
    default_width=_default_width,
    fixed=SHARED_FIXED | _OWN_FIXED,
    host_config=_host_config,
    tensor_rows=_tensor_rows,
    published_config=_published_config,
)
