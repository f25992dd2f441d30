"""A small random model of a transformers config: a few blocks, few experts, few tokens, on the CPU.

Two sizes. `layout` keeps every width, because widths, heads and their sizes make the layout of a checkpoint; it shrinks
depth, vocabulary, experts and the feed-forward. `tiny` shrinks widths too, for checks of a family as such.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

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
    "tubelet_size": 2,
}
"""How much is fed."""

OPEN: Mapping[str, Any] = {
    **_each("n_routed_experts num_experts num_local_experts", 4),
    **_each("num_experts_per_tok top_k_experts", 2),
    **_each("n_group topk_group n_shared_experts", 1),
    **_each("moe_intermediate_size vocab_size", 64),
    "mlp_layer_types": ["sparse"] * DEPTH,
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


def shrunk(config: Any, table: Mapping[str, Any]) -> Any:
    """The config with every known field, at any depth, set to the table's value; lists keep their length where it is one
    entry per layer."""
    for name, part in list(vars(config).items()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            shrunk(part, table)
        elif isinstance(part, dict) and "model_type" in part:
            continue
        elif name in table and part is not None:
            _set(config, name, table[name], part)
        elif name in PLACES_OF_ATTENTION and part is not None:
            place = PLACES_OF_ATTENTION[name]
            setattr(config, name, list(place) if isinstance(place, tuple) else place)
        elif name.endswith(MEANINGS) and isinstance(part, int) and part >= 256:
            setattr(config, name, 255 - sum(map(ord, name)) % 40)
    _per_layer(config)
    _rotary_sections(config)
    return config


def filled(config: Any) -> Any:
    """The config with numbers where its defaults leave open what a model cannot be built without."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            filled(part)
    for name, value in OPEN.items():
        if getattr(config, name, ...) is None:
            setattr(config, name, value)
    return config


def _rotary_sections(config: Any) -> None:
    """Positions in time, height and width share the channels of a head."""
    named = getattr(config, "rope_parameters", None)
    if not isinstance(named, dict):
        return
    for rotary in (named, *(part for part in named.values() if isinstance(part, dict))):
        if "mrope_section" not in (*rotary, *getattr(config, "ignore_keys_at_rope_validation", ())):
            continue
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * (rotary.get("partial_rotary_factor") or 1)) // 2
        if sum(rotary.get("mrope_section") or ()) != half:
            rotary["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _set(config: Any, name: str, value: Any, old: Any) -> None:
    if isinstance(old, bool | str | list | tuple | dict):
        return  # one entry per stage: such models are small
    if isinstance(old, int):
        value = min(value, old)
    setattr(config, name, value)


def _per_layer(config: Any) -> None:
    """Lists with an entry per layer end with the layers."""
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        return
    for name, value in list(vars(config).items()):
        is_per_layer = "layer" in name or name.endswith(("_types", "_pattern")) or name in ("block_types",)
        if is_per_layer and isinstance(value, list) and len(value) > depth and not name.startswith(("out_", "_")):
            kinds = list(dict.fromkeys(map(str, value)))
            chosen = [next(part for part in value if str(part) == kind) for kind in kinds][-depth:]
            setattr(config, name, (chosen * depth)[:depth] if len(chosen) < depth else chosen)


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


HEADS = tuple(name for name, value in WIDTHS.items() if value == 4)
FIXED = (*(name for name, value in WIDTHS.items() if value in (8, 12, 16)), "qk_rope_head_dim")
"""Sizes inside a head, and ranks."""
LARGEST = 3e7
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
}
"""Fields without which a default config of a type is not whole."""


def small_skeletons(model_type: str) -> Iterator[Callable[[], nn.Module]]:
    """Ways to build a small random model of a type of transformers from its default config, to try in turn."""
    from transformers import CONFIG_MAPPING

    def config() -> Any:
        return CONFIG_MAPPING[model_type](**WORKING.get(model_type, {}))

    yield lambda: built(shrunk(config(), TINY))
    yield lambda: built(shrunk(filled(config()), TINY))
    yield lambda: built(_that_fits(scaled(shrunk(config(), FEW))))
    yield lambda: built(_that_fits(shrunk(config(), FEW)))


def _that_fits(config: Any) -> Any:
    """A config whose model, counted without memory for it, is small."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in _model_of(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its smallest model has {parameters / 1e6:.0f} million parameters")
    return config


def layout_skeleton(config: Mapping[str, Any]) -> nn.Module:
    """A model with the widths of a config, a few blocks deep, as the class that the checkpoint was saved from."""
    import transformers

    settled = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    return built(shrunk(settled, LAYOUT), named[0] if named else None)


def built(config: Any, model_class: Any = None) -> nn.Module:
    """The model of a config with random weights, every one of them different from every other."""
    torch.manual_seed(0)
    model: nn.Module = _model_of(config) if model_class is None else model_class(config)
    randomise(model)
    return model.eval()


def _model_of(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config) if type(config) in AutoModel._model_mapping else _class_of(config)(config)


def _class_of(config: Any) -> Any:
    """The model class of a part of a composite model, which no auto class knows."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found: list[Any] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and _takes(value, type(config))
    ]
    found = [value for value in found if not value.__name__.endswith("PreTrainedModel")]
    if not found:
        raise NoModelClass(f"no model class takes a {type(config).__name__}: it is a part of other models")
    return min(found, key=lambda value: ("For" in value.__name__, len(value.__name__)))


class NoModelClass(ValueError):
    """A config without a model of its own."""


def _takes(model_class: Any, config_class: type) -> bool:
    """Whether a model is built from a config of a class, by its own word or by the annotation of its `__init__`."""
    annotated = inspect.signature(model_class.__init__).parameters.get("config")
    said = "" if annotated is None else annotated.annotation
    return getattr(model_class, "config_class", None) is config_class or said in (config_class, config_class.__name__)


def randomise(model: nn.Module) -> None:
    """Moves every norm, gain and bias away from one and zero, and gives matrices the size of trained ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(parameter[0].numel(), 1) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
