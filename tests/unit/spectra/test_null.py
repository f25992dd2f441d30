"""Excess and positivity: what chance gives, by closed form and by rotations, against maps drawn here."""

import math

import pytest
import torch

from oversmooth.results.inspection import Inspection, LayerInspection, Null, StackFacts
from oversmooth.results.wording import weights_words
from oversmooth.spectra import null as module
from oversmooth.spectra.null import null_of
from oversmooth.spectra.spectrum import spectrum
from oversmooth.spectra.value_map import ValueMap, value_norm_and_asymmetry
from tests.unit.results.test_results import PROVENANCE


def drawn(d=96, channels=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = {"generator": generator, "dtype": torch.float64}
    left = torch.randn(d, channels, **shape) / math.sqrt(channels)
    return ValueMap(left=left, right=torch.randn(channels, d, **shape) / math.sqrt(d))


def rotated(value_map, seed):
    """The map with a random orthogonal matrix of the model's width between writing and reading."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(value_map.size, value_map.size, generator=generator, dtype=torch.float64))
    return ValueMap(left=(q * r.diagonal().sign()) @ value_map.left, right=value_map.right)


def of(value_map, *, is_rim_only=False):
    found = spectrum(value_map, full=True, only_extremes=False)
    norm = None if is_rim_only else value_norm_and_asymmetry(value_map)[0]
    return null_of(value_map, found, norm, seed=0)


@pytest.mark.parametrize("channels", [192, 96, 48])
def test_the_closed_form_is_what_rotations_give_on_average(channels):
    value_map = drawn(d=192, channels=channels)
    found = of(value_map)
    assert found.how == "closed form"
    rotations = [spectrum(rotated(value_map, seed), full=True, only_extremes=False) for seed in range(12)]
    sampled = torch.tensor([math.log(one.rho_dc) for one in rotations])
    assert math.log(found.rho_dc) == pytest.approx(sampled.mean().item(), abs=found.excess_spread)
    assert 0.4 < found.excess_spread / sampled.std().item() < 2.5


def test_the_norm_of_a_wide_map_is_estimated_to_a_few_per_cent():
    value_map = drawn(d=192, channels=96)
    exact, close = of(value_map), of(value_map, is_rim_only=True)
    assert close.how == "closed form"
    assert close.excess == pytest.approx(exact.excess, abs=0.05)


def test_sampled_rotations_without_the_full_matrix_are_those_with_it(monkeypatch):
    value_map = drawn(channels=24)
    monkeypatch.setattr(module, "STABLE_RANK", math.inf)
    monkeypatch.setattr(module, "ROTATIONS", 32)
    found = of(value_map)
    assert found.how == "32 rotations"
    sampled = [
        math.log(spectrum(rotated(value_map, seed), full=True, only_extremes=False).rho_dc) for seed in range(32)
    ]
    mean, spread = torch.tensor(sampled).mean().item(), torch.tensor(sampled).std().item()
    assert math.log(found.rho_dc) == pytest.approx(mean, abs=4 * spread / math.sqrt(32))
    assert found.excess_spread == pytest.approx(spread, rel=0.5)


def test_the_spread_of_positivity_is_that_of_rotations():
    value_map = drawn()
    found = of(value_map)
    traces = torch.tensor([rotated(value_map, seed).core.trace().item() for seed in range(200)])
    total = sum(math.hypot(*value) for value in spectrum(value_map, full=True, only_extremes=False).eigenvalues)
    assert found.positivity_spread == pytest.approx(traces.std().item() / total, rel=0.2)
    assert abs(traces.mean().item() / total) < 4 * found.positivity_spread / math.sqrt(200)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_positivity_is_one_for_maps_that_do_one_thing_only(sign):
    w = drawn(channels=96).left
    found = of(ValueMap(left=sign * w, right=w.T.contiguous()))
    assert found.positivity == pytest.approx(sign)
    assert found.positivity_spread < 0.3


def test_a_random_map_is_within_chance_and_a_copying_one_is_not():
    found = of(drawn())
    assert abs(found.excess) < 3 * found.excess_spread
    assert abs(found.positivity) < 4 * found.positivity_spread
    copying = drawn().left
    assert of(ValueMap(left=copying, right=copying.T.contiguous())).excess > 0.3


def test_turning_the_model_s_basis_changes_nothing():
    value_map = drawn(d=192, channels=96)
    q = torch.linalg.qr(torch.randn(192, 192, dtype=torch.float64)).Q
    turned = ValueMap(left=q @ value_map.left, right=value_map.right @ q.T)
    first, second = of(value_map), of(turned)
    torch.testing.assert_close((first.excess, first.positivity), (second.excess, second.positivity))


def test_what_has_no_value_has_a_reason():
    zero = of(ValueMap(left=torch.zeros(8, 4), right=torch.randn(4, 8)))
    assert (zero.excess, zero.positivity) == (None, None)
    assert zero.why_no_excess == zero.why_no_positivity == "H is zero"
    wide = drawn(d=300, channels=300)
    wide.left[:, 0] *= 1000  # one direction outweighs all others
    low_rank = of(wide, is_rim_only=True)
    assert low_rank.excess is None
    assert "stable rank" in low_rank.why_no_excess
    assert of(drawn(channels=3), is_rim_only=True).how == "4 rotations"  # a small core costs no more than its extremes
    only_rim = spectrum(drawn(d=400, channels=400), full=False, only_extremes=True)
    assert null_of(drawn(d=400, channels=400), only_rim, None, seed=0).why_no_positivity


def inspection(*positivities, is_causal=False):
    sizes = {"d_model": 8, "n_heads": 1, "n_kv": 1, "d_head": 8, "blocks": 2, "blocks_in_model": 2}
    stack = StackFacts(name="", family="x", residual="pre", norm="layer", is_causal=is_causal, **sizes)
    layers = tuple(
        LayerInspection(stack="", layer=k, passes=(k,), null=Null(positivity=value, positivity_spread=0.01))
        for k, value in enumerate(positivities)
    )
    return Inspection(provenance=PROVENANCE, stacks=(stack,), layers=layers)


@pytest.mark.parametrize(
    ("positivities", "is_causal", "expected"),
    [
        ((0.3, -0.2, 0.02), False, "Of 3 value maps, 1 prefer smoothing, 1 sharpening, 1 neither."),
        ((-1.0, -0.97), True, "All 2 value maps prefer sharpening (positivity -0.97 or below). In a causal model"),
        ((1.0, 0.95), False, "All 2 value maps prefer smoothing (positivity +0.95 or above)."),
        ((None,), False, "Positivity needs all eigenvalues"),
    ],
)
def test_the_last_line_says_what_value_maps_prefer_and_promises_nothing(positivities, is_causal, expected):
    assert weights_words(inspection(*positivities, is_causal=is_causal)).startswith(expected)
