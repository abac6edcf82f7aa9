"""MUDDPythia-1.4B's and 2.8B's layout: GPT-NeoX with an RMSNorm per head on q and k.

Reference: the authors' modelling code beside the released weights. LayerNorms with bias, erf-GELU, biases in every
linear map of a block, RoPE on the first `rotary_pct` of a head with component j beside j + n/2, attention and MLP side
by side: X_{l+1} = S_r + MHA(…) + FFN(n(S_r)). The dense connections are the reference's 2.8B MUDDFormer's, always with
the last block's hidden width times four and all rounded up. RoPE's table is rounded to float16: `rope="float16"`.
Its config class is not public, so config.json must say everything but the token ids.
"""

import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel

from .layout import Config, Layout, dense_rows, shared, shared_theirs
from .rows import Change, Row, Tensors, expand, placed

MODEL = (
    Row("tok_embeddings.weight", "gpt_neox.embed_in.weight"),
    Row("norm.weight", "gpt_neox.final_layer_norm.weight"),
    Row("norm.bias", "gpt_neox.final_layer_norm.bias"),
    Row("output.weight", "lm_head.weight"),
)
# {p} is weight and bias
LAYER = (
    Row("attention.wo.{p}", "attention.dense.{p}"),
    Row("ffn_norm.{p}", "post_attention_layernorm.{p}"),
    Row("feed_forward.w1.{p}", "mlp.dense_h_to_4h.{p}"),
    Row("feed_forward.w2.{p}", "mlp.dense_4h_to_h.{p}"),
)
APART = Row("attention.wq.{p} attention.wk.{p} attention.wv.{p}", "attention.query_key_value.{p}")
FUSED = Row("attention.wqkv.{p}", "attention.query_key_value.{p}")
QK_NORM = tuple(
    Row(f"attention.{p}_norm.weight", f"attention.query_key_value.{p}_norm.weight") for p in "qk"
)
ONE_NORM = (Row("attention_norm.{p}", "input_layernorm.{p}"),)
THREE_NORMS = (
    Row("attention_norms.0.{p}", "input_layernorm.{p}"),
    Row("attention_norms.1.{p}", "connections.0.norms.1.{p}"),
    Row("attention_norms.2.{p}", "connections.0.norms.2.{p}"),
)


def by_head(heads: int) -> Change:
    """q, k and v as GPT-NeoX's one map, whose rows are (head, q | k | v, channel)."""

    def there(*qkv: Tensor) -> Tensors:
        return (torch.stack([part.unflatten(0, (heads, -1)) for part in qkv], 1).flatten(0, 2),)

    def back(fused: Tensor) -> Tensors:
        return tuple(part.flatten(0, 1) for part in fused.unflatten(0, (heads, 3, -1)).unbind(1))

    return Change(there, back)


def by_head_fused(heads: int) -> Change:
    apart = by_head(heads)
    return Change(
        lambda fused: apart.there(*fused.chunk(3)), lambda fused: (torch.cat(apart.back(fused)),)
    )


def host(config: Config) -> tuple[type[PreTrainedModel], Config]:
    if config["n_local_heads"] != config["n_head"]:
        raise ValueError(
            f"config.json: n_local_heads must be n_head={config['n_head']} in this layout, "
            f"got {config['n_local_heads']}"
        )
    settings = shared(config) | {
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


def rows(config: Config) -> list[Row]:
    heads = config["n_head"]
    qkv = (
        APART._replace(change=by_head(heads))
        if config["dense"]
        else FUSED._replace(change=by_head_fused(heads))
    )
    found = [*MODEL, *dense_rows(config, "gpt_neox", "gpt_neox.final_layer_norm")]
    for l in range(config["n_layer"]):
        norms = THREE_NORMS if config["dense"] and l else ONE_NORM
        layer = [row for p in ("weight", "bias") for row in expand((*LAYER, qkv, *norms), p=p)]
        layer += QK_NORM if config["use_qk_norm"] else ()
        found += placed(layer, f"layers.{l}.", f"gpt_neox.layers.{l}.")
    return found


def theirs(config: PreTrainedConfig) -> Config:
    return shared_theirs(config) | {
        "n_local_heads": config.num_attention_heads,
        "norm_eps": config.layer_norm_eps,
        "use_qk_norm": getattr(config, "crosslayer_qk_norm", False),
        "use_parallel_residual": config.use_parallel_residual,
        "rotary_pct": config.rope_parameters["partial_rotary_factor"],
        "dense_type": "qkvm",
        "round64": True,
        "expand_last": True,
        "use_linear_bias": True,
        "stack_hidden": False,
        "window_size": None,
        "window_type": None,
    }


LAYOUT = Layout(
    "MUDDPythia",
    defaults={"round64": True, "expand_last": True},
    fixed={
        "dense_type": "qkvm", "dynamic_dense": True, "sepln": True, "norm_eps": 1e-6, "use_linear_bias": True,
        "window_size": None, "window_type": None, "round64": True, "expand_last": True,
    },
    said=("use_parallel_residual", "rotary_pct"),
    host=host,
    rows=rows,
    theirs=theirs,
)  # fmt: skip
