"""Settings of a config that speak of blocks by their numbers follow the blocks that stay, or are refused by name."""

import json

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import CannotControl, NotReadBack
from oversmooth.worth import prune as pruning
from tests.contract.tiny_models import GPT, GROUPED, MOE, TEXT, randomise

FEW = [{"input_ids": torch.arange(3, 15)[None] + shift} for shift in range(4)]
SIX = {**GROUPED, "num_hidden_layers": 6}
CASES = {
    "gpt2": ("gpt2", {**GPT, "n_layer": 6}, {}),
    "qwen3_moe dense layers": (
        "qwen3_moe",
        {**SIX, **MOE, "mlp_only_layers": [0, 3]},
        {"mlp_only_layers": [0, 2]},
    ),
    "qwen3_moe steps": (
        "qwen3_moe",
        {**SIX, **MOE, "decoder_sparse_step": 2},
        {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "gemma3 kinds of layers": (
        "gemma3_text",
        {**SIX, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]},
    ),
    "llama4 steps": (
        "llama4_text",
        {
            **SIX,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 64,
        },
        {"moe_layers": [1, 2, 3]},
    ),
    "gpt_neo kinds": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 6,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 3]],
            "window_size": 4,
            "vocab_size": 99,
            "max_position_embeddings": 64,
        },
        {"attention_types": [[["global", "local", "local", "local"], 1]]},
    ),
    "smollm3 positions": ("smollm3", {**SIX, "no_rope_layers": [1, 1, 0, 1, 1, 0]}, {"no_rope_layers": [1, 1, 1, 0]}),
    "qwen2 windows": ("qwen2", {**SIX, "use_sliding_window": True, "max_window_layers": 3, "sliding_window": 4}, {}),
}
"""Model type, config, and what the config has to say of the blocks 0, 1, 3 and 5."""


def causal(model_type: str, sizes, folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    randomise(model, 0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_loss_that_is_stated_is_the_loss_on_disk(case, tmp_path):
    from transformers import AutoModelForCausalLM

    model_type, sizes, expected = CASES[case]
    removed = "2,4"
    result = osm.prune(causal(model_type, sizes, tmp_path / "whole"), tmp_path / "out", FEW, blocks=removed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in expected} == expected
    assert result.read_back is not None
    assert result.read_back.largest_difference <= 1e-5
    assert (result.read_back.inputs, result.read_back.not_checked) == (2, "")
    model, facts = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not facts["missing_keys"]
    with torch.no_grad():
        losses = [model.eval()(**batch, labels=batch["input_ids"]).loss for batch in FEW]
    torch.testing.assert_close(torch.stack(losses).mean().item(), result.after.loss, rtol=1e-5, atol=1e-5)


def test_blocks_that_compute_with_their_own_number_may_only_be_removed_at_the_end(tmp_path):
    sizes = {**GPT, "n_layer": 6, "scale_attn_by_inverse_layer_idx": True}
    folder = causal("gpt2", sizes, tmp_path / "whole")
    with pytest.raises(CannotControl, match=r"scale_attn_by_inverse_layer_idx.*\n?.*only the last"):
        osm.prune(folder, tmp_path / "out", FEW, blocks="2")
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}
    result = osm.prune(folder, tmp_path / "out", FEW, blocks="4-5")
    assert result.read_back.loss == pytest.approx(result.after.loss, rel=1e-5)


def test_what_nobody_thought_of_is_found_by_reading_it_back(tmp_path, monkeypatch):
    """The guard behind the table of settings: without the table the folder is another model, and is not written."""
    monkeypatch.setattr(pruning, "NUMBERED", ())
    sizes = {**GPT, "n_layer": 6, "scale_attn_by_inverse_layer_idx": True}
    folder = causal("gpt2", sizes, tmp_path / "whole")
    with pytest.raises(NotReadBack, match=r"gives outputs that differ|has the loss"):
        osm.prune(folder, tmp_path / "out", FEW, blocks="2")
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}


def test_weights_that_would_be_random_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(pruning, "_of_kept", lambda key, value, kept: {})  # as it was: lists of indices stay
    folder = causal("qwen3_moe", {**SIX, **MOE, "mlp_only_layers": [3]}, tmp_path / "whole")
    with pytest.raises(NotReadBack, match=r"(?s)random numbers.*mlp_only_layers"):
        osm.prune(folder, tmp_path / "out", FEW, blocks="2")
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_the_first_dense_blocks_are_counted_anew(model_type, tmp_path):
    sizes = {
        **TEXT,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
    }
    folder = causal(model_type, sizes, tmp_path / "whole")
    result = osm.prune(folder, tmp_path / "out", FEW, blocks="1")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["first_k_dense_replace"] == 1
    assert result.read_back.loss == pytest.approx(result.after.loss, rel=1e-5)
