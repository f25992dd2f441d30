"""Every declaration against every tiny model: the equal-token identity, live and reopened from disk."""

from dataclasses import replace

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import AdapterMismatch, ConfigMismatch
from oversmooth.models import source as source_module
from oversmooth.models.families import ARCHITECTURES
from oversmooth.models.identify import declared_for
from oversmooth.models.open import open_source
from oversmooth.models.source import Stack
from tests.contract.tiny_models import ALL, REPEATS, TIMM, TINY, require_fit, tiny_model
from tests.contract.todays_models import TODAY

TOLERANCE = 2e-5


@pytest.mark.parametrize("case", ALL)
def test_equal_tokens_leave_attention_as_the_value_map(case):
    model, inputs = tiny_model(case)
    checked = osm.verify(model, inputs=inputs, tolerance=TOLERANCE)
    require_fit(checked)
    assert checked.layers


@pytest.mark.parametrize("case", TINY)
def test_a_model_saved_and_reopened_has_the_same_weights_as_the_live_one(case, tmp_path):
    model, _ = tiny_model(case)
    model.save_pretrained(tmp_path)
    _assert_same_weights(open_source(model), open_source(tmp_path))


@pytest.mark.parametrize("case", TIMM)
def test_a_timm_model_saved_and_reopened_has_the_same_weights_as_the_live_one(case, tmp_path):
    from safetensors.torch import save_model

    model, _ = tiny_model(case)
    save_model(model, str(tmp_path / "model.safetensors"))
    reopened = open_source(tmp_path, model_type="timm_vit", n_heads=4)
    _assert_same_weights(open_source(model), reopened)


def _assert_same_weights(live, disk):
    live_stacks, disk_stacks = live.stacks(), disk.stacks()
    assert [stack.arch for stack in live_stacks] == [stack.arch for stack in disk_stacks]
    assert [stack.passes for stack in live_stacks] == [stack.passes for stack in disk_stacks]
    for ours, theirs in zip(live_stacks, disk_stacks, strict=True):
        assert len(ours.names.blocks) == len(theirs.names.blocks)
        for position in range(len(ours.names.blocks)):
            a, b = ours.weights(position, live.store.read), theirs.weights(position, disk.store.read)
            assert a.norms.keys() == b.norms.keys()
            pairs = [(a.w_v, b.w_v), (a.w_o, b.w_o), (a.b_v, b.b_v), (a.b_o, b.b_o), (a.gain, b.gain)]
            pairs += [(a.norms[role].weight, b.norms[role].weight) for role in a.norms]
            pairs += [(a.norms[role].bias, b.norms[role].bias) for role in a.norms]
            for mine, other in pairs:
                assert (mine is None) == (other is None)
                if mine is not None:
                    torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("case", ALL)
def test_every_norm_and_gain_that_is_declared_is_found_in_the_model(case):
    model, _ = tiny_model(case)
    for stack in open_source(model).stacks():
        declared = {role for role in ("attn_norm", "attn_branch_norm") if getattr(stack.arch.paths, role)}
        found = {role for block in stack.names.blocks for role in block.norms}
        assert declared <= found
        if stack.arch.paths.attn_gain and "timm" not in case:
            assert all(block.gain for block in stack.names.blocks)


def test_every_declared_model_type_has_a_tiny_model():
    own = {"timm_vit", "torch_encoder"}
    tested = {model_type for model_type, _ in TINY.values()} | own
    tested |= {model_type for model_type, _ in TODAY.values() if declared_for(model_type)}
    tested |= {"kimi_k2"}  # code on the hub: DeepSeek's, under another name
    tested |= {f"{tower}_{part}_model" for tower in ("clip", "siglip") for part in ("text", "vision")}
    declared = {model_type for arch in ARCHITECTURES.values() for model_type in arch.model_types}
    assert declared == tested - {"clip", "siglip", "gemma3"}


def test_cases_that_repeat_another_one_are_of_the_same_declaration():
    for case, other in REPEATS.items():
        types = [TINY[name][0] if name in TINY else "timm_vit" for name in (case, other)]
        assert declared_for(types[0]) == declared_for(types[1]) != []
        assert other not in REPEATS


@pytest.mark.parametrize(
    ("case", "wrong"),
    [("gpt_neox", {"fused": "stacked"}), ("phi3", {"fused": "grouped"}), ("falcon-grouped", {"fused": "stacked"})],
)
def test_the_identity_catches_a_wrong_layout(case, wrong, monkeypatch):
    model, inputs = tiny_model(case)
    arch = declared_for(TINY[case][0])[0].for_config(open_source(model).config)
    monkeypatch.setattr(source_module, "declared_for", lambda _: [replace(arch, **wrong)])
    checked = osm.verify(model, inputs=inputs)
    with pytest.raises(AdapterMismatch, match="equal-token identity"):
        require_fit(checked)


def test_shapes_catch_a_wrong_layout_before_the_identity_does(monkeypatch):
    model, inputs = tiny_model("gpt2")
    arch = declared_for("gpt2")[0].for_config(open_source(model).config)
    monkeypatch.setattr(source_module, "declared_for", lambda _: [replace(arch, stored="out_in")])
    with pytest.raises(ConfigMismatch, match="disagree about the width"):
        osm.verify(model, inputs=inputs)


@pytest.mark.parametrize("bias", ["b_v", "b_o"])
def test_the_identity_catches_a_missing_bias(bias, monkeypatch):
    model, inputs = tiny_model("gpt_neox")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.query_key_value.bias", "attention.dense.bias")):
                parameter.uniform_(0.1, 0.2, generator=torch.Generator().manual_seed(0))
    require_fit(osm.verify(model, inputs=inputs))
    read_all = Stack.weights

    def without_one(stack, position, read):
        weights = read_all(stack, position, read)
        assert getattr(weights, bias) is not None
        return replace(weights, **{bias: None})

    monkeypatch.setattr(Stack, "weights", without_one)
    checked = osm.verify(model, inputs=inputs)
    assert not checked.passed
    with pytest.raises(AdapterMismatch, match="equal-token identity"):
        require_fit(checked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_identity_holds_in_the_precision_of_the_model(dtype):
    model, inputs = tiny_model("llama")
    assert osm.verify(model.to(dtype), inputs=inputs).passed


def test_hybrids_count_the_blocks_that_have_attention():
    model, _ = tiny_model("jamba")
    (stack,) = osm.inspect(model).stacks
    assert (stack.blocks, stack.blocks_in_model) == (2, 4)


def test_shared_layers_say_at_which_depths_they_run():
    model, _ = tiny_model("albert")
    assert [layer.passes for layer in osm.inspect(model).layers] == [(0, 1), (2, 3)]


def test_verify_leaves_hooks_and_mode_as_they_were():
    model, inputs = tiny_model("bert")
    model.train()
    osm.verify(model, inputs=inputs)
    assert model.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
