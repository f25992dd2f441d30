"""Sizes of small models of transformers, by the names that configs have for them."""

from collections.abc import Mapping
from typing import Any

DEPTH = 2


def _each(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


DEPTHS = {
    **_each(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_decode_layers encoder_num_hidden_layers decoder_num_hidden_layers "
        "num_blocks text_encoder_layers vision_layers num_transformer_layers n_encoder_layers "
        "n_decoder_layers num_adapter_layers encoder_num_layers decoder_num_layers transformer_layers "
        "num_self_attends_per_block",
        DEPTH,
    ),
    "num_hidden_groups": 1,
    "num_feature_levels": 4,
    "num_kv_shared_layers": 0,
}
"""How deep."""

BREADTHS = {
    **_each(
        "vocab_size char_vocab_size text_vocab_size audio_vocab_size codebook_size "
        "vocab_size_per_layer_input vocab_size_per_layer decoder_vocab_size semantic_vocab_size "
        "input_vocab_size output_vocab_size encoder_vocab_size target_vocab_size speech_vocab_size",
        256,
    ),
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **_each("num_experts_per_tok num_experts_per_token moe_topk top_k_experts moe_k", 2),
    **_each("n_group topk_group moe_num_groups num_expert_group", 1),
    **_each(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size mlp_hidden_size dim_feedforward "
        "feed_forward_size expert_ffn_hidden_size encoder_intermediate_size decoder_intermediate_size",
        64,
    ),
}
"""What is beside the value path."""

WIDTHS = {
    **_each(
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim decoder_hidden_size "
        "encoder_hidden_size embed_size d_embed projection_dim text_embed_dim word_embed_proj_dim "
        "hidden_size_per_layer_input projection_hidden_size out_hidden_size text_hidden_size "
        "vision_hidden_size rnn_hidden_dim mask_feature_size fpn_hidden_size feature_size "
        "decoder_hidden_dim encoder_hidden_dim attention_hidden_size",
        32,
    ),
    **_each(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "decoder_num_attention_heads encoder_num_attention_heads num_encoder_attention_heads "
        "num_decoder_attention_heads attention_heads vision_attention_heads text_attention_heads "
        "num_cross_attention_heads num_self_attention_heads decoder_num_heads",
        4,
    ),
    **_each("num_key_value_heads num_kv_heads n_head_kv multi_query_group_num swa_num_key_value_heads", 2),
    **_each("head_dim d_kv attention_head_dim attention_head_size global_head_dim swa_head_dim", 8),
    **_each("q_lora_rank kv_lora_rank", 16),
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    **_each("mamba_d_state ssm_state_size state_size mamba_d_ssm mamba_head_dim mamba_headdim", 8),
    **_each("mamba_n_heads mamba_d_head mamba_num_heads", 8),
}
"""Widths and heads."""

LENGTHS = {
    **_each(
        "max_position_embeddings n_positions max_source_positions max_target_positions "
        "max_sequence_length max_seq_len seq_length n_ctx max_seqlen",
        128,
    ),
    **_each("image_size img_size input_size", 32),
    "patch_size": 8,
    "num_mel_bins": 16,
    "sliding_window": 64,
    "num_queries": 6,
    "num_object_queries": 6,
    "num_frames": 4,
    "num_keypoints": 4,
    "tubelet_size": 2,
}
"""How much is fed."""

OPEN: Mapping[str, Any] = {
    **_each("n_routed_experts num_experts num_local_experts", 4),
    **_each("num_experts_per_tok top_k_experts num_key_value_heads", 2),
    **_each("n_group topk_group n_shared_experts", 1),
    **_each("moe_intermediate_size vocab_size", 64),
    "mlp_layer_types": ["sparse"] * DEPTH,
    "head_dim": 8,
    "pad_token_id": 0,
    "deepstack_layer_map": [[0, 0]],
}
"""Fields that some default configs leave at `None` although their models need them."""

PLACES_OF_ATTENTION: Mapping[str, Any] = {
    **dict.fromkeys(("attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs", "attention_layers_idx"), (1,)),
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "full_attention_interval": 2,
}
"""Which of the two blocks of a hybrid has attention."""
MEANINGS = ("token_id", "token_index", "_id")
"""Endings of fields that name one entry of a vocabulary."""

HEADS = tuple(name for name, value in WIDTHS.items() if value == 4)
VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
FIXED = (*(name for name, value in WIDTHS.items() if value in (8, 12, 16)), "qk_rope_head_dim")
"""Sizes inside a head, and ranks."""
LARGEST = 8e7
"""Parameters of a model that counts as small."""
TINY = {**DEPTHS, **BREADTHS, **WIDTHS, **LENGTHS}
"""For a model of a family as such."""
FEW = {
    **DEPTHS,
    **BREADTHS,
    **{name: value for name, value in LENGTHS.items() if "position" in name or "length" in name},
}
"""For a model whose widths stay, or are scaled."""
LAYOUT = {**DEPTHS, **BREADTHS}
"""For a model with the layout of a checkpoint."""
SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1]}
WORKING: Mapping[str, Mapping[str, Any]] = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"expand": 1},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1]},
    "janus_vqgan": {"num_patches": 4, "base_channels": 32},  # 64 pixels, halved four times
    "mimi": {"upsample_groups": 32},
    "mimi_decoder": {"upsample_groups": 32},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 32},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_6_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "mistral_large4_text": {"num_hidden_layers": DEPTH},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "num_global_layers": 1},
    "granitemoehybrid": {"num_hidden_layers": DEPTH, "layer_types": ["linear_attention", "full_attention"]},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGAZ": 5}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|visual token 000000|>": 5, "<|extra_200|>": 6}},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "lfm2_moe": {"num_hidden_layers": DEPTH, "layer_types": ["conv", "full_attention"]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "step3p5": {"sliding_window": 64},
    "xmod": {"default_language": "en_XX"},
    "tvp": {"num_frames": 1, "visual_prompt_size": 8, "max_img_size": 64},
}
"""Fields without which a default config of a type is not whole, or not small."""
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "llama4_vision_model": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": DEPTH,
        "image_size": 32,
        "patch_size": 8,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "lightglue": {
        "descriptor_dim": 256,
        "num_hidden_layers": DEPTH,
        "depth_confidence": -1.0,
        "width_confidence": -1.0,
        "keypoint_detector_config": {
            "model_type": "superpoint",
            "keypoint_threshold": -1.0,
            "max_keypoints": 16,
            "border_removal_distance": 0,
        },
    },
    "phi4_multimodal_audio": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_blocks": DEPTH,
        "num_attention_heads": 4,
        "input_size": 80,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
    },
    "sam3_lite_text_text_model": {  # the first and the last layer have convolutions
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "projection_dim": 32,
        "max_position_embeddings": 32,
    },
    "zamba2": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "adapter_rank": 8,
        "chunk_size": 8,
    },
    "zamba": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
    },
}
"""Small configs of types whose fields depend on each other."""
CLASSES: Mapping[str, str] = {
    "lw_detr_vit": "LwDetrViTBackbone",
    "rf_detr_dinov2": "RfDetrDinov2Backbone",
    "slanet": "SLANetForTableRecognition",
    "slanext": "SLANeXtForTableRecognition",
}
"""The class that shows a type at work, where there are several and none is in an auto class."""
