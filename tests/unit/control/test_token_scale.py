"""`scale="measured"`: the interval follows the token scale while a model trains, and stays where it was afterwards."""

import copy

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.control.eigenbasis import MOMENTUM, QUANTILE, Eigenbasis, TokenScale
from oversmooth.errors import CannotControl, UnknownName
from oversmooth.models.canonical import token_scales
from tests.contract.tiny_models import tiny_model

PRE_NORM = ("llama", "gpt2", "gemma", "timm-vit", "torch-encoder-pre-norm")


def scales_of(model: nn.Module) -> list[TokenScale]:
    return [part for part in dict.fromkeys(model.modules()) if isinstance(part, TokenScale)]


def eigenbases(model: nn.Module) -> list[Eigenbasis]:
    return [part for part in dict.fromkeys(model.modules()) if isinstance(part, Eigenbasis)]


def layer(scale: float = 1.0, width: int = 16) -> tuple[nn.Module, torch.Tensor]:
    """One pre-norm layer and tokens of a known scale."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False).train()
    x = torch.randn(4, 25, width)
    return model, scale * (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


def test_token_scales_are_what_the_norms_divide_by():
    x = 3 * torch.randn(2, 5, 8) + 1
    scales = token_scales(x, "layer", 1e-5)
    torch.testing.assert_close(nn.functional.layer_norm(x, (8,)), (x - x.mean(-1, keepdim=True)) / scales[..., None])
    scales = token_scales(x, "rms", 1e-6)
    torch.testing.assert_close(nn.functional.rms_norm(x, (8,), eps=1e-6), x / scales[..., None])


@pytest.mark.parametrize("size", [0.1, 1.0, 7.0])
def test_the_interval_is_that_of_the_eigenvalues_over_the_token_scale(size):
    model, x = layer(size)
    osm.sharpen(model, init="fresh", scale="measured", generator=torch.Generator().manual_seed(0))
    model(x)
    (eigenbasis,) = eigenbases(model)
    values = eigenbasis.eigenvalues().detach()
    torch.testing.assert_close(values, eigenbasis.psi.detach() * size, rtol=1e-4, atol=1e-4)
    assert eigenbasis.interval() == pytest.approx((-size, 0.0), rel=1e-3)
    assert eigenbasis.contains(*eigenbasis.weights())
    with torch.no_grad():
        eigenbasis.psi.fill_(-9.0)
    torch.testing.assert_close(eigenbasis.eigenvalues(), torch.full((16,), -size), rtol=1e-3, atol=0)


def test_the_largest_norm_weight_divides_the_scale():
    model, x = layer(2.0)
    osm.smooth(model, init="fresh", scale="measured")
    with torch.no_grad():
        model.layers[0].norm1.weight[3] = -4.0
    model(x)
    torch.testing.assert_close(scales_of(model)[0].low, torch.tensor(0.5), rtol=1e-3, atol=0)


def test_two_tokens_in_a_hundred_may_lie_below():
    model, x = layer(1.0)
    x[0, :2] *= 0.01
    osm.sharpen(model, init="fresh", scale="measured")
    model(x)
    assert x[0].shape[0] * 4 * QUANTILE == 2
    assert scales_of(model)[0].low.item() < 0.02
    x[0, 1] *= 100
    model, _ = layer(1.0)
    osm.sharpen(model, init="fresh", scale="measured")
    model(x)
    assert scales_of(model)[0].low.item() == pytest.approx(1.0, rel=1e-3)


def test_the_scale_moves_slowly_with_the_batches_of_training_and_not_in_eval():
    model, x = layer(1.0)
    osm.sharpen(model, init="fresh", scale="measured")
    (scale,) = scales_of(model)
    model(x)
    model(3 * x)
    expected = 1 + MOMENTUM * 2
    assert scale.low.item() == pytest.approx(expected, rel=1e-3)
    model.eval()
    with torch.enable_grad():
        model(10 * x)
    assert scale.low.item() == pytest.approx(expected, rel=1e-3)
    assert scale.seen.item() == 2


@pytest.mark.parametrize(("size", "expected"), [(0.2, -0.2), (5.0, -0.4)])
def test_from_given_weights_eigenvalues_start_where_they_were_but_for_what_the_scale_cuts_off(size, expected):
    model, x = layer(size)
    osm.constrain(model, low=-1.0, high=0.0, init="keep", scale="measured")
    (eigenbasis,) = eigenbases(model)
    with torch.no_grad():
        eigenbasis.psi.fill_(-0.4)
    model(x)
    torch.testing.assert_close(eigenbasis.eigenvalues(), torch.full((16,), expected), rtol=1e-3, atol=0)


def test_several_passes_before_one_backward_pass_are_differentiated():
    model, x = layer(0.5)
    osm.sharpen(model, init="fresh", scale="measured")
    (model(x).square().sum() + model(2 * x).square().sum()).backward()
    assert eigenbases(model)[0].psi.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_for_gradients_moves_nothing(use_reentrant):
    found = []
    for checkpointed in (False, True):
        model, inputs = tiny_model("llama")
        osm.sharpen(model, init="fresh", scale="measured", generator=torch.Generator().manual_seed(0))
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for _ in range(2):
            model.zero_grad()
            model(**inputs).last_hidden_state.square().sum().backward()
        found.append(([scale.low for scale in scales_of(model)], [e.psi.grad for e in eigenbases(model)]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", PRE_NORM)
def test_a_checkpoint_holds_the_scale_a_copy_has_its_own_and_baking_keeps_it(case):
    model, inputs = tiny_model(case)
    osm.sharpen(model, init="fresh", scale="measured", generator=torch.Generator().manual_seed(0))
    model.train()
    run = (lambda m: m(inputs[""])) if "" in inputs else (lambda m: m(**inputs)[0])
    run(model)
    assert all(scale.seen == 1 and scale.low != 1 for scale in scales_of(model))
    twin = copy.deepcopy(model)
    run(twin)
    assert [scale.seen.item() for scale in scales_of(twin)] == [2] * len(scales_of(twin))
    assert [scale.seen.item() for scale in scales_of(model)] == [1] * len(scales_of(model))
    other, _ = tiny_model(case, seed=4)
    osm.sharpen(other, init="fresh", scale="measured", generator=torch.Generator().manual_seed(9))
    other.load_state_dict(model.state_dict())
    model.eval(), other.eval()
    with torch.no_grad():
        expected = run(model)
        torch.testing.assert_close(run(other), expected, rtol=0, atol=0)
        osm.bake(model)
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    assert not any(part._forward_pre_hooks for part in model.modules())
    ordinary, _ = tiny_model(case)
    assert list(model.state_dict()) == list(ordinary.state_dict())


def test_constraining_again_replaces_the_hook():
    model, x = layer(2.0)
    for _ in range(2):
        osm.sharpen(model, scale="measured")
    model(x)
    assert len(model.layers[0].norm1._forward_pre_hooks) == 1
    osm.sharpen(model)
    assert not model.layers[0].norm1._forward_pre_hooks


@pytest.mark.parametrize(("case", "reason"), [("bert", "no norm stands before"), ("gemma2", "a norm on its branch")])
def test_layers_without_a_norm_to_follow_are_refused_untouched(case, reason):
    model, _ = tiny_model(case)
    with pytest.raises(CannotControl, match=reason):
        osm.sharpen(model, scale="measured")
    assert not eigenbases(model)
    with pytest.raises(UnknownName, match="plain, measured"):
        osm.sharpen(model, scale="yes")


def test_a_sharpened_layer_of_small_tokens_sharpens_at_the_measured_scale_and_not_in_the_plain_form():
    """Repeated at fixed attention and scales, where the plain interval [-1, 0] reaches -5 in units of the token scale."""
    changes = {}
    for scale in ("plain", "measured"):
        model, x = layer(0.2)
        osm.sharpen(model, init="fresh", scale=scale, generator=torch.Generator().manual_seed(1))
        model(x)
        found = osm.predict(model.eval(), [x + 0.2], max_samples=4, solve=4)
        changes[scale] = [each.regime for each in found.layers]
    assert changes == {"plain": ["smoothing"], "measured": ["sharpening"]}
