"""Weights between old and new ones: nothing that fits the ranks of the heads is nearer to the mix."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import oversmooth as osm
from oversmooth.control.edit import mixed_weights, save_signed
from oversmooth.errors import BadValue, NotSupported
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model


def weights_of(case):
    source = open_source(tiny_model(case)[0])
    return source.stacks()[0].weights(1, source.store.read)


def maps(weights):
    """H of every head, by definition."""
    group = weights.n_heads // weights.n_kv
    w_v, w_o = weights.w_v.double(), weights.w_o.double()
    return torch.stack([w_o[:, head] @ w_v[head // group] for head in range(weights.n_heads)])


def other(weights):
    generator = torch.Generator().manual_seed(1)
    return replace(
        weights,
        w_v=torch.randn(weights.w_v.shape, generator=generator),
        w_o=torch.randn(weights.w_o.shape, generator=generator),
    )


@pytest.mark.parametrize("case", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_the_mix_is_cut_to_the_largest_singular_values_of_heads_that_share_values(case, strength):
    old = weights_of(case)
    new = other(old)
    mix = (1 - strength) * maps(old) + strength * maps(new)
    stacked = mix.unflatten(0, (old.n_kv, -1)).flatten(1, 2)
    u, s, v = torch.linalg.svd(stacked, full_matrices=False)
    expected = (u[..., : old.d_head] * s[:, None, : old.d_head]) @ v[:, : old.d_head]
    found = maps(mixed_weights(old, new, strength))
    torch.testing.assert_close(found.unflatten(0, (old.n_kv, -1)).flatten(1, 2), expected, rtol=1e-4, atol=1e-4)


def test_heads_as_wide_as_the_model_hold_the_whole_mix():
    old = weights_of("bert")
    sizes = {"w_v": torch.randn(1, old.d_model, old.d_model), "w_o": torch.randn(old.d_model, 1, old.d_model)}
    wide = replace(old, **sizes, b_v=None)
    new = other(wide)
    expected = 0.5 * maps(wide) + 0.5 * maps(new)
    torch.testing.assert_close(maps(mixed_weights(wide, new, 0.5)), expected, rtol=1e-3, atol=1e-4)


def test_a_gentler_edit_moves_less(tmp_path):
    model, _ = tiny_model("bert")
    model.save_pretrained(tmp_path / "whole")
    moves = []
    for strength in (0.25, 0.5, 1.0):
        result = osm.edit(
            tmp_path / "whole", tmp_path / f"{strength}", interval=(-1.0, 0.0), layers="1", strength=strength
        )
        moves.append(result.layers[0].moved)
    assert moves[0] < moves[1] < moves[2]
    assert moves[0] == pytest.approx(0.25 * moves[2], rel=0.25)  # what the ranks cut off is small


def test_half_of_a_scaling_is_a_scaling(tmp_path):
    model, _ = tiny_model("bert")
    model.save_pretrained(tmp_path / "whole")
    result = osm.edit(tmp_path / "whole", tmp_path / "out", scale_h=0.0, layers="1", strength=0.5)
    assert result.layers[0].moved == pytest.approx(0.5, rel=1e-4)
    assert "at strength 0.5" in result.change
    assert (result.low, result.high) == (None, None)


@pytest.mark.parametrize("strength", [0.0, -0.5, 1.5, float("nan")])
def test_a_strength_outside_of_its_range_is_refused(strength, tmp_path):
    with pytest.raises(BadValue, match="above 0 and at most 1"):
        osm.edit(tmp_path, tmp_path / "out", interval=(-1.0, 0.0), strength=strength)


def test_signs_are_not_flipped_in_part(tmp_path):
    with pytest.raises(NotSupported, match="a sign is flipped or it is not"):
        osm.edit(tmp_path, tmp_path / "out", flip_norm_signs=True, strength=0.5)


def test_equal_tensors_and_words_are_equal_bytes_on_disk(tmp_path):
    """The library writes the keys of the metadata in random order, and a checkpoint is known by its hash."""
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)}
    for number in range(12):
        save_signed(tensors, tmp_path / f"{number}.safetensors", "blocks 1 and 2 – removed")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "oversmooth": "blocks 1 and 2 – removed"}
    torch.testing.assert_close(load_file(tmp_path / "0.safetensors"), tensors)
