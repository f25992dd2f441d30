"""Tiny random models of the attention of today: latent values, gates, sinks, norms on heads, differential, hybrids."""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.tiny_models import randomise

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "head_dim": 4,  # what rotates
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_expand": 2}

TODAY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, **EXPERTS, "topk_method": "greedy", "first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v32": (
        "deepseek_v32",
        {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8},
    ),
    "minicpm3": ("minicpm3", LATENT),
    "mistral4": ("mistral4", {**LATENT, **EXPERTS, "head_dim": 8, "first_k_dense_replace": 1}),
    "youtu": ("youtu", LATENT),
    "gpt_oss": ("gpt_oss", {**TEXT, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}),
    "granite_swa": ("granite_swa", {**TEXT, "sliding_window": 4}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **TEXT,
            **EXPERTS,
            "v_head_dim": 6,
            "attention_value_scale": 0.7,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
    "qwen3_next": ("qwen3_next", {**TEXT, **LINEAR, "num_experts": 2, "num_experts_per_tok": 1}),
    "qwen3_5": ("qwen3_5_text", {**TEXT, **LINEAR}),
    "diffllama": ("diffllama", {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
    "kosmos-2": ("kosmos-2", {}),
    "bitnet": ("bitnet", TEXT),
    "jamba": (
        "jamba",
        {
            **TEXT,
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **TEXT,
            **MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "residual_multiplier": 0.6,
            "shared_intermediate_size": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "bamba": ("bamba", {**TEXT, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "lfm2": ("lfm2", {**TEXT, "layer_types": ["conv", "full_attention"]}),
}
KOSMOS = {
    "text_config": {
        "vocab_size": 67,
        "embed_dim": 32,
        "layers": 2,
        "ffn_dim": 48,
        "attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    },
    "latent_query_num": 4,
}
GAINED = ("gpt_oss", "granite_swa", "mimo_v2_flash", "qwen3_next", "qwen3_5", "diffllama", "kosmos-2", "bitnet")
"""Cases whose tokens are written with gains of their own."""


def todays_model(case: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of one's own in eval mode with every parameter away from its start value, and inputs that it accepts."""
    model, inputs = copy.deepcopy(_prototype(case))
    return model.to(dtype), inputs


@cache
def _prototype(case: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import AutoConfig, AutoModel

    model_type, settings = TODAY[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(KOSMOS if case == "kosmos-2" else settings))
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = AutoModel.from_config(config).eval()
    if case == "kosmos-2":
        model = model.text_model  # its vision tower is a plain one
    randomise(model, 0)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids}


def with_exact_norms(model: nn.Module, patch: Callable[[nn.Module, str, Any], None]) -> None:
    """RMS norms in the precision of the model: transformers rounds every one of them to float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
            offset = 1.0 if "Qwen3_5" in type(module).__name__ or "Qwen3Next" in type(module).__name__ else 0.0
            epsilon = next(getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name))

            def forward(x: Tensor, module: Any = module, offset: float = offset, epsilon: float = epsilon) -> Tensor:
                return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * (offset + module.weight)

            patch(module, "forward", forward)
