"""MUDDFormer-2.8B's layout: a Llama with or without RMSNorm on q and k, which is transformers' Qwen3 or Llama.

Reference: the authors' modelling code beside the released weights. RoPE pairs component j with j + n/2, as
transformers does, so no row is permuted. Its cos and sin are rounded to bfloat16 there, which `rope="bfloat16"` does.
With dense=False it is the paper's Transformer++ with one matrix for q, k and v, and its dense parameters are idle.
"""

from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3ForCausalLM

from .layout import Config, Layout, dense_rows, shared, shared_theirs, stacked
from .rows import Row, expand, placed

MODEL = (
    Row("tok_embeddings.weight", "model.embed_tokens.weight"),
    Row("norm.weight", "model.norm.weight"),
    Row("output.weight", "lm_head.weight"),
)
LAYER = (
    Row("attention.wo.weight", "self_attn.o_proj.weight"),
    Row("ffn_norm.weight", "post_attention_layernorm.weight"),
    Row("feed_forward.w1.weight", "mlp.gate_proj.weight"),
    Row("feed_forward.w3.weight", "mlp.up_proj.weight"),
    Row("feed_forward.w2.weight", "mlp.down_proj.weight"),
)
APART = tuple(Row(f"attention.w{p}.weight", f"self_attn.{p}_proj.weight") for p in "qkv")
FUSED = Row("attention.wqkv.weight", " ".join(f"self_attn.{p}_proj.weight" for p in "qkv"))
QK_NORM = tuple(Row(f"attention.{p}_norm.weight", f"self_attn.{p}_norm.weight") for p in "qk")
ONE_NORM = (Row("attention_norm.weight", "input_layernorm.weight"),)
THREE_NORMS = (
    Row("attention_norms.0.weight", "input_layernorm.weight"),
    Row("attention_norms.1.weight", "connections.0.norms.1.weight"),
    Row("attention_norms.2.weight", "connections.0.norms.2.weight"),
)


def host(config: Config) -> tuple[type[PreTrainedModel], Config]:
    settings = shared(config) | {
        "num_key_value_heads": config["n_local_heads"],
        "head_dim": config["dim"] // config["n_head"],
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_eps"],
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_base"]},
    }
    return (Qwen3ForCausalLM if config["use_qk_norm"] else LlamaForCausalLM), settings


def rows(config: Config) -> list[Row]:
    width, heads = (
        config["dim"] // config["n_head"],
        (config["n_head"], *[config["n_local_heads"]] * 2),
    )
    fused = FUSED._replace(change=stacked(*(n * width for n in heads)))
    every = (
        *LAYER,
        *(QK_NORM if config["use_qk_norm"] else ()),
        *(APART if config["dense"] else (fused,)),
    )
    found = [*MODEL, *dense_rows(config, "model", "model.norm")]
    for l in range(config["n_layer"]):
        norms = THREE_NORMS if config["dense"] and l else ONE_NORM
        found += placed(expand((*every, *norms)), f"layers.{l}.", f"model.layers.{l}.")
    return found


def theirs(config: PreTrainedConfig) -> Config:
    return shared_theirs(config) | {
        "n_local_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "use_qk_norm": config.model_type == "qwen3",
        "dense_type": "qkvr",
    }


LAYOUT = Layout(
    "MUDDFormer",
    defaults={
        "block_size": 2048, "vocab_size": 50432, "n_layer": 32, "n_head": 32, "dim": 2560, "n_local_heads": -1,
        "intermediate_size": None, "rope_base": 10000, "norm_eps": 1e-6, "use_qk_norm": False, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2, "dense": True, "dynamic_dense": True, "sepln": True,
        "dense_type": "qkvr", "expand_last": False, "round64": False,
    },
    fixed={"dense_type": "qkvr", "dynamic_dense": True, "sepln": True, "norm_eps": 1e-6},
    said=(),
    host=host,
    rows=rows,
    theirs=theirs,
)  # fmt: skip
