"""What makes a model of a family small, as data: sizes that many families share, and rows of their
own.
"""

from typing import Any

LAYERS = 4
# Config keys by transformers' common names, and families' own names for sizes.
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "lru_width": 32, "rotary_dim": 4,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_d_ssm": 64, "ssm_state_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "attn_layer_indices": [1], "expand": 2, "num_heads": 8, "state_size": 8,
    "n_embd": 32, "n_head": 4, "n_inner": 64, "d_model": 32, "n_heads": 4,
    "ffn_hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 32,
    "decoder_layers": LAYERS, "encoder_layers": LAYERS, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "residual_multiplier": 0.22, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    # of images
    "image_size": 16, "patch_size": 4, "num_labels": 5,
    "image_token_id": 90, "image_token_index": 90, "video_token_id": 91, "video_token_index": 91,
    "audio_token_id": 92, "audio_token_index": 92, "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}  # fmt: skip
# Of the configs within a config, by their keys.
NESTED_SIZES: dict[str, dict[str, Any]] = {
    "vision_config": {
        "num_heads": 4, "depth": LAYERS, "embed_dim": 32, "out_hidden_size": 32,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
# Keys that a config refuses or that its model does not run with: tried without them, in this order.
DROPPED = (
    (), ("layer_types",), ("head_dim",), ("head_dim", "layer_types"), ("num_key_value_heads",),
    ("q_lora_rank",), ("head_dim", "q_lora_rank"), ("v_head_dim",), ("num_heads",),
)  # fmt: skip
# Vision and text towers that classify no images.
TOWERS = (
    "aimv2_vision_model", "chinese_clip_vision_model", "clip_text_model", "clip_vision_model",
    "dinov3_convnext", "dinov3_vit", "mlcd_vision_model", "pixtral", "sam_vision_model",
    "siglip2_vision_model", "siglip_vision_model", "timesformer",
    "tipsv2_vision_model", "videomae", "vit_mae", "vitdet", "vivit", "vjepa2", "yolos",
    "audio-spectrogram-transformer", "dpt", "glm4v_vision", "idefics3_vision", "internvl_vision",
    "qwen2_5_vl_vision", "qwen3_vl_vision", "smolvlm_vision",
)  # fmt: skip
# By family: other values, or None to leave a key at its default. Dicts are merged.
ROWS: dict[str, dict[str, Any]] = {
}  # fmt: skip
