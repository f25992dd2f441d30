"""Every family: the attention maps and the canonical weights together give back what the model's own layer did."""

import math

import pytest
import torch

import oversmooth as osm
from oversmooth import predict
from oversmooth.models.identify import declared_for
from oversmooth.models.open import open_source
from oversmooth.prediction.ladder import RUNGS
from tests.contract.tiny_models import EACH_FAMILY, TINY, marked, tiny_model

TOLERANCE = 1e-3


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_rung_5_is_what_the_layer_did(case):
    model, inputs = tiny_model(case)
    found = predict(model, [inputs], solve=1)
    ran = {layer.stack for layer in found.layers}  # a vision tower does not run on text alone
    stacks = [stack for stack in open_source(model).stacks() if stack.label in ran]
    passes = [(stack.label, depth + 1) for stack in stacks for group in stack.passes for depth in group]
    assert sorted((layer.stack, layer.depth) for layer in found.layers) == sorted(passes)
    for layer in found.layers:
        assert layer.identity_error < TOLERANCE, f"layer {layer.layer} of {layer.stack}"
        assert layer.measured is not None
        assert [rung.name for rung in layer.rungs] == list(RUNGS[:6])  # plain attention has no gains
        assert all(rung.mean is not None for rung in layer.rungs)
        assert layer.regime in ("smoothing", "sharpening", "neutral", "undecided")
    assert found.agreements[-1].sign_agreement == 1.0
    assert type(found).from_dict(found.to_dict()) == found


@pytest.mark.parametrize("case", ["bert", "gemma2", "t5", "gpt_neox", "timm-layer-scale", "torch-encoder-pre-norm"])
def test_the_measurement_beside_the_ladder_is_that_of_measure(case):
    model, inputs = tiny_model(case)
    found, measured = predict(model, [inputs], solve=1), osm.measure(model, [inputs])
    changes = {
        (part.stack, part.depth): part.change
        for item in measured.raw_attributions
        for part in item.parts
        if part.place == "attn_sum"
    }
    for layer in found.layers:
        assert layer.measured == pytest.approx(changes[layer.stack, layer.depth], abs=1e-4)


PADDED = marked(case for case, (kind, _) in TINY.items() if (found := declared_for(kind)) and found[0].kind == "text")


@pytest.mark.parametrize("case", PADDED)
def test_padding_changes_neither_the_rungs_nor_the_measurement(case):
    model, inputs = tiny_model(case)
    ids = inputs["input_ids"]
    other = ids.flip(1).clone()
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, -4:] = 0
    padded = {"input_ids": torch.cat([ids, other]), "attention_mask": mask}
    alone = {"input_ids": other[:, :-4], "attention_mask": mask[1:, :-4]}
    together = predict(model, [padded], solve=1, heads=False)
    apart = predict(model, [{"input_ids": ids, "attention_mask": mask[:1]}, alone], solve=1, heads=False)
    assert together.data.tokens == 2 * ids.shape[1] - 4
    for a, b in zip(together.layers, apart.layers, strict=True):
        assert a.identity_error < TOLERANCE
        assert a.measured == pytest.approx(b.measured, abs=2e-3)
        for ours, theirs in zip(a.rungs[1:], b.rungs[1:], strict=True):
            assert ours.mean == pytest.approx(theirs.mean, abs=2e-3)


def test_padding_of_torchs_own_encoder_is_left_out():
    model, inputs = tiny_model("torch-encoder")
    x = torch.cat([inputs[""], inputs[""].flip(1)])
    mask = torch.zeros(2, x.shape[1], dtype=torch.bool)
    mask[1, -3:] = True
    found = predict(model, [{"": x, "src_key_padding_mask": mask}], solve=1)
    assert found.data.tokens == 2 * x.shape[1] - 3
    assert all(layer.identity_error < TOLERANCE for layer in found.layers)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["bert", "llama", "vit"])
def test_both_implementations_of_attention_give_the_same_prediction(case, implementation):
    model, inputs = tiny_model(case)
    expected = predict(model, [inputs], solve=1)
    model.set_attn_implementation(implementation)
    found = predict(model, [inputs], solve=1)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.plain.rho_ac == pytest.approx(b.plain.rho_ac, rel=1e-4)
        assert a.rungs[-1].mean == pytest.approx(b.rungs[-1].mean, abs=1e-5)


def test_predict_leaves_the_model_as_it_was():
    model, inputs = tiny_model("bert")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    predict(model, [inputs], solve=1, what_ifs=["no_skip", "flip_norms"])
    assert model.training
    assert model.config._attn_implementation == implementation
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_wrong_norm_is_caught_by_rung_5(monkeypatch):
    """The guard can fail: without the norm's weight the branch is another one, and the layer gets no verdict."""
    from oversmooth.models import canonical as architecture

    model, inputs = tiny_model("gpt2")
    right = architecture._norm

    def without_weight(*arguments):
        norm = right(*arguments)
        return architecture.Norm(kind=norm.kind, weight=torch.ones_like(norm.weight), bias=norm.bias)

    monkeypatch.setattr(architecture, "_norm", without_weight)
    found = predict(model, [inputs], solve=1)
    assert all(layer.identity_error > TOLERANCE for layer in found.layers)
    assert {layer.regime for layer in found.layers} == {"undecided"}
    assert all("does not fit" in layer.verdict[0].text for layer in found.layers)


def test_several_sequences_have_standard_errors_and_a_share_is_solved():
    model, inputs = tiny_model("bert")
    batch = {"input_ids": torch.cat([inputs["input_ids"].roll(k, 1) for k in range(5)])}
    found = predict(model, [batch], solve=2)
    layer = found.layers[0]
    assert found.solved == layer.plain.sequences == 2
    assert layer.rungs[0].sequences == 2
    assert layer.rungs[1].sequences == found.data.sequences == 5
    assert layer.measured_standard_error is not None
    assert math.isfinite(found.depths[0].exponent)
    assert found.depths[0].layers == 3
