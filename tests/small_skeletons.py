"""Small random models of every type of transformers, from their default configs: for tests, and for `make families`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from oversmooth.models.discovery.skeleton import (
    BREADTHS,
    DEPTH,
    DEPTHS,
    HEADS,
    built,
    each_named,
    fit_rotary_sections,
    layer_lists,
    model_of,
    shrunk,
)

WIDTHS = {
    **each_named(
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim decoder_hidden_size "
        "encoder_hidden_size embed_size d_embed projection_dim text_embed_dim word_embed_proj_dim "
        "hidden_size_per_layer_input projection_hidden_size out_hidden_size text_hidden_size "
        "vision_hidden_size rnn_hidden_dim mask_feature_size fpn_hidden_size feature_size "
        "decoder_hidden_dim encoder_hidden_dim attention_hidden_size",
        32,
    ),
    **dict.fromkeys(HEADS, 4),
    **each_named("num_key_value_heads num_kv_heads n_head_kv multi_query_group_num swa_num_key_value_heads", 2),
    **each_named("head_dim d_kv attention_head_dim attention_head_size global_head_dim swa_head_dim", 8),
    **each_named("q_lora_rank kv_lora_rank", 16),
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    **each_named("mamba_d_state ssm_state_size state_size mamba_d_ssm mamba_head_dim mamba_headdim", 8),
    **each_named("mamba_n_heads mamba_d_head mamba_num_heads", 8),
}
"""Widths and heads."""
FIXED = (*(name for name, value in WIDTHS.items() if value in (8, 16)), "qk_rope_head_dim")
"""Sizes inside a head, and ranks."""
LENGTHS = {
    **each_named(
        "max_position_embeddings n_positions max_source_positions max_target_positions "
        "max_sequence_length max_seq_len seq_length n_ctx max_seqlen",
        128,
    ),
    **each_named("image_size img_size input_size", 32),
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
SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1]}
OPEN: Mapping[str, Any] = {
    **each_named("n_routed_experts num_experts num_local_experts", 4),
    **each_named("num_experts_per_tok top_k_experts num_key_value_heads", 2),
    **each_named("n_group topk_group n_shared_experts", 1),
    **each_named("moe_intermediate_size vocab_size", 64),
    "mlp_layer_types": ["sparse"] * DEPTH,
    "head_dim": 8,
    "pad_token_id": 0,
    "deepstack_layer_map": [[0, 0]],
}
"""Fields that some default configs leave at `None` although their models need them."""
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


def small_skeletons(model_type: str) -> Iterator[Callable[[], nn.Module]]:
    """Ways to build a small random model of a type of transformers from its default config, to try in turn."""
    from transformers import CONFIG_MAPPING

    def config() -> Any:
        return CONFIG_MAPPING[model_type](**WORKING.get(model_type, {}))

    if model_type in WHOLE:
        yield lambda: built(CONFIG_MAPPING[model_type](**WHOLE[model_type]))
    yield lambda: built(shrunk(with_short_sides(config(), TINY), TINY))
    yield lambda: built(constructed(config(), TINY))
    yield lambda: built(shrunk(with_short_sides(filled(config()), TINY), TINY))
    yield lambda: built(_that_fits(scaled(shrunk(with_short_sides(config(), FEW), FEW))))
    yield lambda: built(_that_fits(shrunk(with_short_sides(config(), FEW), FEW)))


def with_short_sides(config: Any, table: Mapping[str, Any]) -> Any:
    """The config with short lists of lengths, such as height and width; `shrunk` lowers single numbers."""
    for name, part in list(vars(config).items()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            with_short_sides(part, table)
        elif name in LENGTHS and name in table and isinstance(part, list | tuple):
            setattr(
                config, name, type(part)(min(table[name], side) if isinstance(side, int) else side for side in part)
            )
    return config


def constructed(config: Any, table: Mapping[str, Any]) -> Any:
    """A new config of the same class from the table's values, so that what it derives from its fields fits them."""
    given = {}
    for name, part in vars(config).items():
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            given[name] = constructed(part, table)
        elif name in table and isinstance(part, int) and not isinstance(part, bool):
            given[name] = min(table[name], part)
    new = type(config)(**given, **layer_lists(config, given.get("num_hidden_layers", DEPTH)))
    fit_rotary_sections(new)
    return new


def filled(config: Any) -> Any:
    """The config with numbers where its defaults leave open what a model cannot be built without."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            filled(part)
    for name, value in OPEN.items():
        if getattr(config, name, ...) is None:
            setattr(config, name, value)
    rotary, kinds = getattr(config, "rope_parameters", None), getattr(config, "layer_types", None)
    if isinstance(rotary, dict) and "rope_type" in rotary and kinds:
        config.rope_parameters = {**rotary, **{kind: dict(rotary) for kind in kinds}}
    return config


def scaled(config: Any) -> Any:
    """Fewer heads of the same size: what has to fit the size of a head still does."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            scaled(part)
    heads = [name for name in HEADS if isinstance(getattr(config, name, None), int)]
    if not heads:
        return config
    most = max(getattr(config, name) for name in heads)
    factor = next((most // few for few in (4, 3, 2, 1) if most % few == 0), 1)
    widths = [name for name in WIDTHS if name not in FIXED and isinstance(getattr(config, name, None), int)]
    if any(getattr(config, name) % factor for name in widths):
        return config
    for name in widths:
        setattr(config, name, max(1, getattr(config, name) // factor))
    return config


def _that_fits(config: Any) -> Any:
    """A config whose model, counted without memory for it, is small."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_of(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its smallest model has {parameters / 1e6:.0f} million parameters")
    return config
