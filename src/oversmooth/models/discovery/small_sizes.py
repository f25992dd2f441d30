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
}
"""Fields without which a default config of a type is not whole."""
