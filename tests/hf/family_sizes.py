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
_COMPASS_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_COMPASS_TEXT = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"sliding_attention": _COMPASS_ROPE, "full_attention": _COMPASS_ROPE},
}
_GEMMA4_TEXT = {"num_kv_shared_layers": 0, "per_layer_config": None}
_QWEN4_TEXT = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}  # fmt: skip
_MROPE = {"rope_parameters": {"mrope_section": [2, 1, 1]}}  # of half a head
# By family: other values, or None to leave a key at its default. Dicts are merged.
ROWS: dict[str, dict[str, Any]] = {
    # language
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4},
    },
    "cohere_compass_text": _COMPASS_TEXT,
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": {"per_layer_config": None, "num_key_value_heads": 4}},
    "dots3_note_text": {
        "per_layer_config": None, "num_key_value_heads": 4, "num_hidden_layers": 4,
    },
    "gemma4": {"text_config": _GEMMA4_TEXT, "mm_tokens_per_image": 4},
    "gemma4_assistant": {"text_config": {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 0}},
    "gemma4_unified": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified_assistant": {
        "text_config": {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 0},
    },
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "qwen4_exp_text": _QWEN4_TEXT,
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 4},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 4, "num_decoder_layers": 4},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xlnet": {"max_position_embeddings": None, "d_inner": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attn_layer_period": None, "attn_layer_offset": None,
        "layer_types": ["mamba", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    # vision
    "audio-spectrogram-transformer": {
        "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4,
    },
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_groups": 4},
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "dinov3_convnext": {"image_size": 64},
    "donut-swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "efficientnet": {
        "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "image_size": 64,
    },
    "focalnet": {"embed_dim": 16},
    "hiera": {
        "image_size": [16, 16], "patch_size": None, "patch_stride": [2, 2], "patch_padding": [3, 3],
        "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "masked_unit_size": [4, 4],
        "num_query_pool": 1,
    },
    "levit": {"image_size": 64, "patch_size": 16, "num_attention_heads": [2, 4, 4]},
    "mobilevitv2": {"image_size": 128},
    "perceiver": {
        "num_latents": 8, "d_latents": 32, "d_model": None, "num_self_attends_per_block": 4,
        "num_self_attention_heads": 4,
    },
    "pvt": {"image_size": 64, "num_attention_heads": [1, 2, 4, 8]},
    "pvt_v2": {"image_size": 64, "num_attention_heads": [1, 2, 4, 8]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
    "segformer": {"image_size": 64, "num_attention_heads": [1, 2, 4, 8]},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 5, "no_token_index": 6},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "vjepa2": {
        "crop_size": 16, "frames_per_clip": 2, "pred_hidden_size": 32,
        "pred_num_attention_heads": 4, "pred_num_hidden_layers": 2,
    },
    "yolos": {"image_size": [16, 16]},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0, 1]},
    # multi-modal
    "diffusion_gemma": {"text_config": _GEMMA4_TEXT},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [2], "downsample_rate": "1/2",
        "image_grid_pinpoints": [[16, 16]], "vision_config": {"hidden_size": 64},
    },
    "glm5_next": {
        "text_config": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    },
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8}},
    "molmo2": {
        "vision_config": {"image_size": [16, 16]},
        "adapter_config": {"vision_feature_layer": [2, 1]},
    },
    "muse_spark": {"audio_config": {"out_hidden_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cohere_compass": {"text_config": _COMPASS_TEXT},
    "cosmos3_edge": {"text_config": _MROPE},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [16, 16]}},
    "florence2": {"vision_config": {"patch_size": None}},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm46v": {"text_config": _MROPE},
    "glm4v": {"text_config": _MROPE},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    "glm_ocr": {"text_config": _MROPE},
    "glmga": {"text_config": _MROPE},
    "hunyuan_vl": {"text_config": _MROPE},
    "kimi_k25": {"text_config": {"head_dim": 4}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
    },
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "paddleocr_vl": {"text_config": _MROPE},
    "qwen2_5_omni_thinker": {"text_config": _MROPE},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "vipllava": {"vision_feature_layers": [-2, -1]},
}  # fmt: skip
