"""Composite models: every tower with self-attention is a stack of its own, and cross-attention is named as left out."""

import pytest
from torch import nn

import oversmooth as osm
from oversmooth.models.discovery.watch import discovered
from oversmooth.models.stores.module import describe
from tests.small_skeletons import small_skeletons

TOWERS = {
    "qwen2_vl": {"language", "visual"},
    "internvl": {"language", "vision"},
    "idefics3": {"text", "vision"},
    "blip-2": {"vision", "qformer", "language"},
    "voxtral": {"language", "audio"},
    "t5gemma2": {"text", "vision", "decoder"},
}
KINDS = {"visual": "image", "vision": "image", "audio": "audio"}


def small_model(model_type: str) -> nn.Module:
    return next(small_skeletons(model_type))()


LARGE = "blip-2"
"""Whose config makes no small model: half a minute."""
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == LARGE else name for name in TOWERS]


@pytest.mark.parametrize("model_type", EACH)
def test_every_tower_is_found_proved_and_labelled(model_type: str) -> None:
    model = small_model(model_type)
    found = discovered(model, describe(model))
    assert {arch.stack for arch in found.archs} == TOWERS[model_type]
    assert found.largest_error < 1e-5
    for arch in found.archs:
        assert arch.kind == KINDS.get(arch.stack, "text")
    assert not [one for one in found.left_out if one.kind == "not run"]
    assert {layer.stack for layer in osm.inspect(model).layers} == TOWERS[model_type]


@pytest.mark.parametrize(
    ("model_type", "where"),
    [
        pytest.param(LARGE, "qformer.encoder.layer.0.crossattention", marks=pytest.mark.slow),
        ("t5gemma2", "decoder.layers.0"),
    ],
)
def test_cross_attention_is_named_as_left_out(model_type: str, where: str) -> None:
    model = small_model(model_type)
    left_out = discovered(model, describe(model)).left_out
    crossing = [one for one in left_out if one.kind == "cross"]
    assert crossing[0].where.startswith(where)
    assert crossing[0].where in crossing[0].reason
