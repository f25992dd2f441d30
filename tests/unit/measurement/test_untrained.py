"""The same architecture untrained: built from its config or reset in place, on the same inputs, and kept on disk."""

import json

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.measurement import untrained
from oversmooth.models import fresh
from oversmooth.models.fresh import NoFreshCopy, fresh_copy
from tests.contract.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERSMOOTH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "untrained"


def torch_encoder():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def weights(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@pytest.mark.parametrize("case", ["bert", "gpt2", "vit", "t5"])
def test_a_fresh_copy_has_the_same_tensors_with_other_numbers_and_the_model_keeps_its_own(case):
    model, _ = tiny_model(case)
    before, state = weights(model), torch.get_rng_state()
    found = fresh_copy(model, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: w.shape for name, w in weights(found).items()} == {name: w.shape for name, w in before.items()}
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(found).items())
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_a_seed_gives_the_same_weights_again():
    model = torch_encoder()
    first, again, other = (weights(fresh_copy(model, seed)) for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_model_of_timm_is_built_by_its_name():
    timm = pytest.importorskip("timm")
    found = fresh_copy(timm.create_model("test_vit", pretrained=False, num_classes=3), seed=0)
    assert found.num_classes == 3


OTHERS = [
    ("test_vit", {"depth": 2}),
    ("test_vit", {"num_heads": 4}),  # no tensor has another shape, and every attention is another
    ("test_vit3", {"depth": 2, "img_size": 80}),
    ("vit_tiny_patch16_224", {"depth": 1, "init_values": 0.1, "weight_init": "jax"}),
    ("beit_base_patch16_224", {"depth": 1, "embed_dim": 96, "num_heads": 3}),
]


@pytest.mark.parametrize(("name", "arguments"), OTHERS)
def test_a_model_of_timm_made_with_other_arguments_draws_its_weights_as_a_new_one_does(name, arguments):
    timm = pytest.importorskip("timm")
    model, new = (timm.create_model(name, pretrained=False, **arguments) for _ in range(2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(5)  # it was trained
    found = fresh_copy(model, seed=0)
    assert [type(part) for part in found.modules()] == [type(part) for part in model.modules()]
    assert found.blocks[0].attn.num_heads == model.blocks[0].attn.num_heads
    for (place, weight), expected in zip(found.named_parameters(), new.parameters(), strict=True):
        few = 8 * expected.std(correction=0).item() / expected.numel() ** 0.5
        assert weight.mean().item() == pytest.approx(expected.mean().item(), abs=few + 1e-6), place
        assert weight.std(correction=0).item() == pytest.approx(expected.std(correction=0).item(), rel=0.5, abs=1e-6), (
            place
        )


def test_heads_count_for_where_a_curve_is_kept():
    timm = pytest.importorskip("timm")
    two, four = (timm.create_model("test_vit", pretrained=False, num_heads=heads) for heads in (2, 4))
    assert fresh.recipe_of(two) != fresh.recipe_of(four)


def test_a_model_of_timm_that_only_its_constructor_can_draw_is_left_out_with_the_parameter():
    timm = pytest.importorskip("timm")
    model = timm.create_model("cait_xxs24_224", pretrained=False, depth=1)
    with pytest.raises(NoFreshCopy, match=r"only its constructor draws \w+"):
        fresh_copy(model, seed=0)


def test_a_sharpened_model_of_timm_has_no_fresh_copy():
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", pretrained=False)
    osm.sharpen(model)
    with pytest.raises(NoFreshCopy, match="another form"):
        fresh_copy(model, seed=0)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.positions = torch_encoder(), nn.Parameter(torch.ones(7, 16))

    def forward(self, x):
        return self.inner(x + self.positions)


def test_a_class_that_cannot_reset_its_parameters_is_named():
    with pytest.raises(NoFreshCopy, match=r"Positions has parameters of its own and no reset_parameters\(\)"):
        fresh_copy(Positions(), seed=0)


def test_a_changed_model_is_not_compared_with_the_unchanged_architecture():
    model, _ = tiny_model("bert")
    osm.sharpen(model)
    with pytest.raises(NoFreshCopy, match="a new one has other tensors"):
        fresh_copy(model, seed=0)


def test_a_model_that_is_too_large_is_left_out_with_its_size(monkeypatch):
    monkeypatch.setattr(fresh, "LARGEST", 10)
    with pytest.raises(NoFreshCopy, match="billion parameters"):
        fresh_copy(torch_encoder(), seed=0)


def test_measure_gives_the_untrained_curve_of_every_stack_beside_the_answer():
    model, inputs = tiny_model("t5")
    found = osm.measure(model, [inputs], null=True)
    assert [curve.stack for curve in found.untrained] == [each.stack for each in found.attributions]
    for answer in found.answers:
        assert all(point.untrained is not None for point in answer.points)
    by_hand = osm.measure(fresh_copy(model, seed=0), [inputs])
    for curve, each in zip(found.untrained, by_hand.attributions, strict=True):
        assert curve.levels[0] == pytest.approx(each.start)
        assert curve.levels[-1] == pytest.approx(each.end)


def test_it_is_kept_on_disk_by_config_and_inputs(cache, monkeypatch):
    model, inputs = tiny_model("bert")
    first = osm.measure(model, [inputs], null=True).untrained
    (kept,) = cache.iterdir()
    monkeypatch.setattr(untrained, "fresh_copy", lambda *_: pytest.fail("it is on disk"))
    assert osm.measure(model, [inputs], null=True).untrained == first
    monkeypatch.undo()
    monkeypatch.setenv("OVERSMOOTH_CACHE", str(cache.parent))
    osm.measure(model, [{name: value[:, :-1] for name, value in inputs.items()}], null=True)
    assert len(list(cache.iterdir())) == 2
    kept.write_text(json.dumps([{"stack": 3}]))  # damaged
    assert osm.measure(model, [inputs], null=True).untrained == first


def test_classes_of_the_user_are_measured_and_never_kept(cache):
    found = osm.measure(torch_encoder(), [torch.randn(4, 7, 16)], null=True)
    assert len(found.untrained[0].levels) == 4
    assert not cache.exists()


def test_why_it_is_missing_is_said():
    found = osm.measure(Positions(), [torch.randn(4, 7, 16)], null=True)
    assert found.untrained == ()
    assert found.untrained_missing.startswith("Positions has parameters")
    assert found.answer.untrained_missing == found.untrained_missing
    assert osm.measure(Positions(), [torch.randn(4, 7, 16)]).untrained_missing == ""


def test_batches_that_can_be_read_once_only_are_enough():
    model, inputs = tiny_model("bert")
    assert osm.measure(model, iter([inputs]), null=True).untrained
