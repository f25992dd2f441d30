"""The rules of judgement: each says "clearly" in at most 5 of 100 studies in which nothing is there to be seen."""

import numpy as np
import pytest
from scipy import stats

from oversmooth.claims.claim import (
    FEWEST_INPUTS,
    LEVEL,
    Effect,
    all_of,
    direction,
    holm,
    is_equivalent,
    one_of,
    outcome,
    paired_effect,
    sign_flip_p,
)
from oversmooth.claims.pretrained import directions
from oversmooth.measurement.statistics import rank_correlation

STUDIES = 1000
SLACK = 1.64 * (LEVEL * (1 - LEVEL) / STUDIES) ** 0.5
"""Of a share of exactly 5% that is simulated."""


def null(units: int, seed: int = 0) -> np.ndarray:
    """Paired differences without a mean: what pairs share is drawn too, and taken off again by pairing."""
    source = np.random.default_rng(seed)
    shared = source.normal(0, 3, (STUDIES, units, 1))
    pairs = shared + source.normal(0, 1, (STUDIES, units, 2))
    return pairs[..., 0] - pairs[..., 1]


def effect_of(differences: np.ndarray) -> Effect:
    return paired_effect(differences.tolist(), [0.0] * len(differences))


# --- under the null -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [3, 5])
def test_a_family_of_comparisons_is_clear_somewhere_in_at_most_five_of_a_hundred_studies(units):
    studies = np.stack([null(units, seed) for seed in range(6)])
    clear = 0
    for study in studies.transpose(1, 0, 2)[:600]:
        effects = [effect_of(found) for found in study]
        adjusted = holm([effect.p for effect in effects])
        words = {outcome(effect, p, 1e-9) for effect, p in zip(effects, adjusted, strict=True)}
        clear += bool(words & {"higher", "lower"})
    assert clear / 600 <= LEVEL + 1.64 * (LEVEL * (1 - LEVEL) / 600) ** 0.5


def test_without_holm_the_family_would_be_clear_far_too_often():
    """The guard above can fail."""
    studies = np.stack([null(5, seed) for seed in range(6)])
    p = stats.ttest_1samp(studies, 0, axis=2).pvalue
    assert (p.min(0) <= LEVEL).mean() > 0.2


@pytest.mark.parametrize("units", [3, 5, 8])
def test_a_difference_of_the_margin_is_called_smaller_in_at_most_five_of_a_hundred(units):
    margin = 1.0
    studies = margin + 0.2 * null(units)
    wrong = sum(is_equivalent(effect_of(found), margin) for found in studies)
    assert wrong / STUDIES <= LEVEL + SLACK
    alike = 0.05 * null(units)
    assert sum(is_equivalent(effect_of(found), margin) for found in alike) > 0.9 * STUDIES


def test_what_is_worse_by_the_margin_is_called_good_enough_in_at_most_five_of_a_hundred():
    studies = -1.0 + 0.2 * null(5)
    wrong = sum(effect_of(found).above(-1.0) <= LEVEL for found in studies)
    assert wrong / STUDIES <= LEVEL + SLACK
    alike = 0.05 * null(5)
    assert sum(effect_of(found).above(-1.0) <= LEVEL for found in alike) > 0.9 * STUDIES


def test_what_has_to_hold_together_is_clear_in_at_most_five_of_a_hundred_where_one_part_does_not():
    there, absent = 20 + null(5, 0), null(5, 1)
    wrong = sum(
        all_of((effect_of(a).above(), effect_of(b).above())) <= LEVEL for a, b in zip(there, absent, strict=True)
    )
    assert wrong / STUDIES <= LEVEL + SLACK


def test_one_of_several_is_clear_in_at_most_five_of_a_hundred_where_none_is_there():
    studies = np.stack([null(5, seed) for seed in range(4)]).transpose(1, 0, 2)
    p_values = [[effect_of(found).above() for found in study] for study in studies]
    assert sum(one_of(found) <= LEVEL for found in p_values) / STUDIES <= LEVEL + SLACK
    assert sum(min(found) <= LEVEL for found in p_values) / STUDIES > 0.1, "without the factor it would be too often"


@pytest.mark.parametrize("units", [5, 8])
def test_sign_flips_are_clear_in_at_most_five_of_a_hundred(units):
    studies = null(units)
    assert sum(sign_flip_p(found.tolist()) <= LEVEL for found in studies) / STUDIES <= LEVEL + SLACK


def folds(correlation: float, units: int = 5) -> np.ndarray:
    """Differences of folds without a mean: what their training images have in common moves all of them alike."""
    source = np.random.default_rng(3)
    common, own = source.normal(0, 1, (STUDIES, 1)), source.normal(0, 1, (STUDIES, units))
    return correlation**0.5 * common + (1 - correlation) ** 0.5 * own


def test_folds_that_share_training_images_are_clear_in_at_most_five_of_a_hundred_studies():
    studies = folds(1 / 5)
    zeros = [0.0] * 5
    corrected = sum(paired_effect(found.tolist(), zeros, 1 / 5).p <= LEVEL for found in studies) / STUDIES
    plain = sum(paired_effect(found.tolist(), zeros).p <= LEVEL for found in studies) / STUDIES
    assert corrected <= LEVEL + SLACK < plain, "without the correction it would be too often"
    at_margin = 1.0 + 0.2 * studies
    wrong = sum(is_equivalent(paired_effect(found.tolist(), zeros, 1 / 5), 1.0) for found in at_margin)
    assert wrong / STUDIES <= LEVEL + SLACK


@pytest.mark.parametrize("draw", ["normal", "exponential"])
@pytest.mark.parametrize("models", [1, 6])
def test_similarity_clearly_changes_in_some_model_in_at_most_five_of_a_hundred_studies_in_which_it_does_not(
    draw, models
):
    """By the very rule of claim 1, on 16 inputs of each model."""
    source, count = np.random.default_rng(0), 200
    shape = (count, models, 16)
    studies = source.normal(0, 1, shape) if draw == "normal" else source.exponential(1, shape) - 1
    clear = 0
    for study in studies:
        rows = [
            {"model": str(model), "cosine_embedding": 0.0, "cosine_last": float(value)}
            for model, values in enumerate(study)
            for value in values
        ]
        clear += any(way != 0 for way, _, _ in directions({"inputs": rows}).values())
    assert clear / count <= LEVEL + 1.64 * (LEVEL * (1 - LEVEL) / count) ** 0.5


def test_inputs_that_all_change_alike_leave_no_spread_to_judge_by():
    rows = [{"model": "m", "cosine_embedding": 0.0, "cosine_last": 0.5} for _ in range(16)]
    assert directions({"inputs": rows}) == {"m": (0, 0.5, 0.5)}


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_a_paired_effect_is_students_t():
    a, b = [0.9, 0.8, 0.95, 0.7], [0.85, 0.82, 0.9, 0.66]
    effect = paired_effect(a, b)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    np.testing.assert_allclose([effect.p, effect.low, effect.high], [expected.pvalue, interval.low, interval.high])
    assert effect.units == 4
    assert str(effect).startswith("+0.030 [")


def test_differences_without_spread_are_never_clear():
    assert paired_effect([1.0, 2.0], [0.5, 1.5]).p == 1.0


def test_being_worse_by_the_margin_is_tested_by_students_t():
    a, b = [0.9, 0.8, 0.95, 0.7], [0.85, 0.82, 0.9, 0.66]
    expected = stats.ttest_1samp(np.subtract(a, b), -0.02, alternative="greater")
    effect = paired_effect(a, b)
    assert effect.above(-0.02) == pytest.approx(expected.pvalue)
    assert effect.below(-0.02) == pytest.approx(1 - expected.pvalue)
    flat = paired_effect([1.0, 2.0], [0.5, 1.5])
    assert flat.above() == flat.below() == 1.0, "no spread to judge by"


@pytest.mark.parametrize("level", [LEVEL, LEVEL / 10])
def test_a_difference_is_clear_from_where_it_says(level):
    noise = np.array([-0.1, 0.3, 0.0, -0.2, 0.0])
    clear_from = effect_of(noise).clear_from(level)
    short, far = (effect_of(noise + factor * clear_from) for factor in (0.999, 1.001))
    assert short.above() > level > far.above()


def test_holms_correction_is_that_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.01, 0.04], family=5) == pytest.approx([0.05, 0.16]), "as if the others had come to nothing"


def test_a_large_difference_is_clear_a_small_one_is_no_difference_and_a_vague_one_is_undecided():
    source = np.random.default_rng(1)
    noise = source.normal(0, 0.002, 5)
    large, small, vague = (effect_of(values) for values in (0.1 + noise, 0.001 + noise, source.normal(0, 0.1, 5)))
    assert outcome(large, large.p, 0.02) == "higher"
    assert outcome(effect_of(-0.1 - noise), large.p, 0.02) == "lower"
    assert outcome(small, small.p, 0.02) == "no difference larger than the margin"
    assert outcome(vague, vague.p, 0.02) == "undecided"


def test_sign_flips_of_few_units_are_exact_and_of_many_are_drawn():
    assert sign_flip_p([1.0, 2.0, 3.0]) == 1 / 8
    assert sign_flip_p([-1.0, -2.0]) == 1.0
    assert sign_flip_p([1.0] * 20) < 0.001
    assert sign_flip_p([1.0, -1.0] * 10) > 0.3


def test_rank_correlations_are_spearmans():
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 25.0, 90.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize("images", [1, 8])
def test_differences_that_agree_but_for_rounding_are_no_spread_to_judge_by(images):
    """Folds of 359 and 360 images, one and the same number of images apart in each."""
    sizes = (360, 360, 359, 359, 359)
    a = [round(300 / size, 6) for size in sizes]
    b = [round((300 - images) / size, 6) for size in sizes]
    effect = paired_effect(a, b)
    assert effect.above() == effect.below() == effect.p == 1.0


def test_few_inputs_have_no_direction():
    few = [0.1 + 0.001 * k for k in range(FEWEST_INPUTS)]
    assert direction(few, 0.005)[0] == 1
    assert direction(few[:-1], 0.005)[0] == 0
    assert direction([0.1 + 1e-9 * k for k in range(16)], 0.005)[0] == 0, "no spread"
