"""One tiny random model per declared model type: registering a family here is testing it."""

import copy
import random
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from oversmooth.errors import AdapterMismatch
from oversmooth.models.inputs import examples
from oversmooth.models.live import register_own_models
from oversmooth.models.stores.module import describe
from oversmooth.results import Verification

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_ff": 48, "vocab_size": 99}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
AUDIO = {
    **TEXT,
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
FALCON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}

TINY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("bert", TEXT),
    "roberta": ("roberta", TEXT),
    "xlm-roberta": ("xlm-roberta", TEXT),
    "camembert": ("camembert", TEXT),
    "electra": ("electra", {**TEXT, "embedding_size": 16}),
    "ernie": ("ernie", TEXT),
    "data2vec-text": ("data2vec-text", TEXT),
    "distilbert": ("distilbert", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99}),
    "albert": ("albert", {**TEXT, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2}),
    "mpnet": ("mpnet", TEXT),
    "deberta-v2": ("deberta-v2", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("modernbert", {**TEXT, "global_attn_every_n_layers": 2}),
    "crammed-bert": ("crammed-bert", TEXT),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_bigcode-multi-head": ("gpt_bigcode", {**GPT, "multi_query": False}),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 99,
            "max_position_embeddings": 64,
        },
    ),
    "gpt_neox": ("gpt_neox", TEXT),
    "gpt_neox-sequential": ("gpt_neox", {**TEXT, "use_parallel_residual": False}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "opt": ("opt", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-post-norm": ("opt", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99}),
    "falcon-multi-query": ("falcon", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon-grouped": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-multi-head": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True}),
    "llama": ("llama", GROUPED),
    "llama-with-biases": ("llama", {**GROUPED, "attention_bias": True}),
    "mistral": ("mistral", GROUPED),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 2}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2_moe": ("qwen2_moe", {**GROUPED, **MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", GROUPED),
    "qwen3_moe": ("qwen3_moe", {**GROUPED, **MOE}),
    "smollm3": ("smollm3", GROUPED),
    "phi3": ("phi3", GROUPED),
    "stablelm": ("stablelm", GROUPED),
    "starcoder2": ("starcoder2", GROUPED),
    "granite": ("granite", {**GROUPED, "residual_multiplier": 0.3}),
    "granitemoe": ("granitemoe", {**GROUPED, "residual_multiplier": 0.3, "num_local_experts": 2}),
    "gemma": ("gemma", {**GROUPED, "head_dim": 16}),  # more value channels than the width
    "gemma2": ("gemma2", GROUPED),
    "gemma3": ("gemma3_text", GROUPED),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", GROUPED),
    "cohere": ("cohere", GROUPED),
    "cohere2": ("cohere2", GROUPED),
    "phi": ("phi", {**TEXT, "num_key_value_heads": 4}),
    "jamba": (
        "jamba",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "t5": ("t5", T5),
    "mt5": ("mt5", T5),
    "umt5": ("umt5", T5),
    "bart": ("bart", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "marian": ("marian", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "whisper": (
        "whisper",
        {**SEQ2SEQ, "max_source_positions": 16, "max_target_positions": 20, "num_mel_bins": 8},
    ),
    "vit": ("vit", IMAGE),
    "vit_mae": ("vit_mae", {**IMAGE, "mask_ratio": 0.0}),
    "deit": ("deit", IMAGE),
    "beit": ("beit", IMAGE),
    "data2vec-vision": ("data2vec-vision", IMAGE),
    "dinov2": ("dinov2", {key: value for key, value in IMAGE.items() if key != "intermediate_size"}),
    "dinov2-registers": (
        "dinov2_with_registers",
        {**{key: value for key, value in IMAGE.items() if key != "intermediate_size"}, "num_register_tokens": 2},
    ),
    "clip": ("clip", {"text_config": TEXT, "vision_config": {**IMAGE, "num_attention_heads": 2}}),
    "siglip": ("siglip", {"text_config": TEXT, "vision_config": {**IMAGE, "num_attention_heads": 2}}),
    "gemma3-multimodal": (
        "gemma3",
        {
            "text_config": GROUPED,
            "vision_config": {**IMAGE, "image_size": 16},
            "mm_tokens_per_image": 4,
            "image_token_index": 98,
        },
    ),
    "wav2vec2": ("wav2vec2", AUDIO),
    "wav2vec2-stable": ("wav2vec2", {**AUDIO, "do_stable_layer_norm": True}),
    "hubert": ("hubert", AUDIO),
}
"""Name of the case to transformers' model type and config."""

TIMM: Mapping[str, Mapping[str, Any]] = {
    "timm-vit": {},
    "timm-deit-distilled": {"architecture": "deit_tiny_distilled_patch16_224"},
    "timm-layer-scale": {"init_values": 0.3},
    "timm-registers": {"reg_tokens": 3, "class_token": True},
}

TORCH = ("torch-encoder", "torch-encoder-pre-norm", "torch-encoder-sequence-first", "torch-attention-stack")

ALL = (*TINY, *TIMM, *TORCH)

REPEATS: Mapping[str, str] = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text"), "bert"),
    **dict.fromkeys(("mistral", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"), "llama"),
    **dict.fromkeys(("mt5", "umt5"), "t5"),
    **dict.fromkeys(("timm-deit-distilled", "timm-registers"), "timm-vit"),
    "starcoder2": "stablelm",
    "granitemoe": "granite",
    "gemma3": "gemma2",
    "olmo3": "olmo2",
    "cohere2": "cohere",
    "marian": "bart",
    "vit_mae": "vit",
    "data2vec-vision": "beit",
    "dinov2-registers": "dinov2",
    "hubert": "wav2vec2",
}
"""Cases of the same declaration and storage as another one: what is about weights alone need not run on both."""

EVERY_RUN = {"bert", "gpt2", "llama", "gemma2", "t5", "bart", "clip", "dinov2", "timm-vit", "torch-encoder"}
EVERY_RUN |= set(random.Random(0).sample(sorted(set(ALL) - set(REPEATS) - EVERY_RUN), 8))
"""One case for every way in which weights are stored, and a seeded sample of the others."""


def marked(cases: Iterable[str], every_run: Collection[str] = EVERY_RUN) -> list[Any]:
    """The cases for a test that takes long: those outside `every_run` run with `make test-slow` only."""
    return [case if case in every_run else pytest.param(case, marks=pytest.mark.slow) for case in cases]


EACH_FAMILY = marked(ALL)


def tiny_model(case: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of one's own in eval mode with every parameter away from its start value, and inputs that it accepts."""
    found = copy.deepcopy(_prototype(case, seed))  # ten times as fast as building it again
    torch.manual_seed(seed)
    return found


@cache
def _prototype(case: str, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = _build(case).eval()
    randomise(model, seed)
    return model, next(examples(model, describe(model), seed))  # of gemma3-multimodal its text stack alone


def _build(case: str) -> nn.Module:
    if case in TINY:
        from transformers import AutoConfig, AutoModel

        register_own_models()
        model_type, config = TINY[case]
        return AutoModel.from_config(AutoConfig.for_model(model_type, **config))
    if case in TIMM:
        import timm

        sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
        options = dict(TIMM[case])
        return timm.create_model(options.pop("architecture", "vit_tiny_patch16_224"), **sizes, **options)
    if case == "torch-attention-stack":
        return AttentionStack()
    layer = nn.TransformerEncoderLayer(
        32, 4, 48, batch_first="sequence" not in case, norm_first="pre-norm" in case, dropout=0.0
    )
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class AttentionStack(nn.Module):
    """A user's own model: bare attention modules with a skip connection, under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict({f"m{i}": nn.MultiheadAttention(32, 4, batch_first=True) for i in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mixer in self.mixers.values():
            x = x + mixer(x, x, x)[0]
        return x


def randomise(model: nn.Module, seed: int) -> None:
    """Moves every norm, gain and bias away from 1 and 0, and makes matrices large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * noise)


def require_fit(verification: Verification) -> None:
    """Raises `AdapterMismatch` where the equal-token identity fails, with the worst layer."""
    worst = max(verification.layers, key=lambda layer: layer.error)
    if not verification.passed:
        found = f"a deviation of {worst.error:.3g} in layer {worst.layer}"
        expected = f"the equal-token identity to {verification.tolerance:g}"
        raise AdapterMismatch(", ".join(verification.provenance.families), expected, found)
