"""Verdicts: functions of kept numbers alone, right for every way in which the numbers can fall."""

import json
from pathlib import Path

import numpy as np
import pytest

from oversmooth.training.reproduce.claims import CLAIMS
from oversmooth.training.reproduce.experiments import DEEP, DIGITS, MINI_BERT, TENTH
from oversmooth.training.reproduce.judging import judged
from oversmooth.training.reproduce.survey_verdicts import advantages, correlations

BY_NAME = {claim.name: claim for claim in CLAIMS}
EQUAL = "no difference larger than the margin"
UNITS = {each.name: each.units for each in (DIGITS, TENTH, DEEP, *MINI_BERT)}


def verdict(name: str, observed):
    return judged([BY_NAME[name]], {name: observed})[name].verdict


def runs(claim: str, levels: dict[str, float], noise: float = 0.001) -> dict:
    """Runs of a claim in which every metric of a variant has one level, but for a little noise."""
    source = np.random.default_rng(0)
    rows = []
    for experiment, variants in BY_NAME[claim].needs:
        for variant in variants:
            for unit in range(UNITS[experiment.name]):
                value = levels.get(variant, 0.0) + noise * source.normal()
                metrics = ("accuracy", "corruption_accuracy", "early_accuracy", "loss", "attention")
                row = {"setting": experiment.name, "variant": variant, "unit": unit}
                rows.append(row | dict.fromkeys(metrics, value))
    return {"runs": rows, "chosen": [{"variant": "smooth"}]}


@pytest.mark.parametrize(
    ("levels", "judgement"),
    [
        ({"sharpen": 1.0, "smooth": -1.0}, "confirmed"),
        ({"sharpen": -1.0, "smooth": 1.0}, "refuted"),
        ({"sharpen": 1.0, "smooth": 1.0}, "refuted"),
        ({"sharpen": 1.0}, "undecided"),
    ],
)
def test_the_parametrization_has_to_move_attention_both_ways(levels, judgement):
    assert verdict("parametrization", runs("parametrization", levels)).judgement == judgement


@pytest.mark.parametrize(
    ("levels", "judgement"),
    [
        ({"smooth": 0.1}, "confirmed"),
        ({"smooth": 0.1, "free": 0.1}, "undecided"),  # better than vanilla, but so is the form without a sign
        ({"smooth": -0.1, "sharpen": -0.1}, "refuted"),
        ({}, EQUAL),
        ({"smooth": -0.1}, "undecided"),
    ],
)
def test_vision_has_to_beat_vanilla_and_the_free_form(levels, judgement):
    assert verdict("vision", runs("vision", levels)).judgement == judgement


@pytest.mark.parametrize(
    ("levels", "judgement"),
    [
        ({"smooth": 0.5, "sharpen": 0.5}, "confirmed"),
        ({"smooth": -0.5, "sharpen": 0.5}, "refuted"),
        ({"smooth": -0.5, "free": -0.5}, "undecided"),  # the form helps, not the sign
        ({}, EQUAL),
    ],
)
def test_a_loss_that_the_sign_lowers_refutes(levels, judgement):
    assert verdict("language", runs("language", levels)).judgement == judgement


@pytest.mark.parametrize(
    ("levels", "noise", "judgement"),
    [
        ({}, 0.001, "confirmed"),
        ({"attnscale": 0.1}, 0.001, "refuted"),
        ({}, 0.2, "undecided"),
        ({"smooth": -0.1, "sharpen": 0.3}, 0.001, "refuted"),  # the variant was fixed before
    ],
)
def test_the_variant_that_validation_chose_must_not_be_inferior(levels, noise, judgement):
    assert verdict("baselines", runs("baselines", levels, noise)).judgement == judgement


@pytest.mark.parametrize("name", ["parametrization", "vision", "language", "baselines"])
def test_what_was_not_run_is_not_judged(name):
    assert verdict(name, {"runs": []}).judgement == "not run"


def test_comparisons_of_all_claims_share_one_correction():
    """Three units that would be clear alone are not clear among many comparisons."""
    observed = {name: runs(name, {"sharpen": 0.02}, 0.01) for name in ("parametrization", "vision", "language")}
    alone = judged([BY_NAME["language"]], {"language": observed["language"]})["language"]
    together = judged(CLAIMS, observed)["language"]
    for one, many in zip(alone.compared, together.compared, strict=True):
        assert one["p"] <= many["p"]


# --- the survey -----------------------------------------------------------------------------------------------------


def inputs(**changes: float) -> dict:
    source = np.random.default_rng(0)
    return {
        "inputs": [
            {"model": model, "cosine_embedding": 0.3, "cosine_last": 0.3 + change + 0.01 * source.normal()}
            for model, change in changes.items()
            for _ in range(16)
        ]
    }


SIX = {f"model{number}": 0.2 for number in range(6)}


@pytest.mark.parametrize(
    ("changes", "judgement"),
    [
        ({"a": 0.2, "b": -0.2}, "confirmed"),
        (SIX, "refuted"),
        ({"a": 0.2, "b": 0.2}, "undecided"),
        (SIX | {"model0": 0.0}, "undecided"),
    ],
)
def test_similarity_is_judged_over_models_and_can_be_refuted(changes, judgement):
    assert verdict("similarity", inputs(**changes)).judgement == judgement


def layers(models: int, right: float) -> dict:
    """Models of ten layers, half of which smooth; the sign of rung 0 is right in a share of them."""
    rows = []
    for model in range(models):
        for layer in range(10):
            measured = (-1.0) ** layer * (1 + layer)
            rung = measured if layer < 10 * right else -measured
            rows.append(
                {"model": f"m{model}", "kind": "pretrained", "layer": str(layer), "measured": measured, "rung_0": rung}
            )
    return {"layers": rows}


@pytest.mark.parametrize(
    ("models", "right", "judgement"),
    [(6, 1.0, "confirmed"), (6, 0.0, "refuted"), (6, 0.5, "undecided"), (4, 1.0, "undecided")],
)
def test_the_eigenvalue_has_to_beat_each_models_own_majority(models, right, judgement):
    assert verdict("eigenvalue", layers(models, right)).judgement == judgement


def test_a_model_that_only_smooths_gives_the_theorem_no_credit():
    rows = [{"model": "m", "measured": -1.0 - i, "rung_0": -1.0 - i} for i in range(6)]
    assert advantages(rows) == {"m": 0.0}
    assert correlations(rows) == {"m": pytest.approx(1.0)}


def test_trained_models_are_not_counted_among_the_pretrained():
    observed = layers(6, 1.0)
    observed["layers"] = [row | {"kind": "trained"} for row in observed["layers"]]
    assert verdict("eigenvalue", observed).judgement == "not run"


def passes(after: float | None) -> list[dict]:
    rows = [("none", 0.4), ("attention", after), ("block", after)]
    return [{"model": "m", "input": 0, "removed": removed, "cosine_last": value} for removed, value in rows]


@pytest.mark.parametrize(
    ("regimes", "judgement"),
    [
        (("smoothing", "smoothing"), "theorem, checked"),
        (("smoothing", "sharpening"), "refuted"),
        (("smoothing", "undecided"), "undecided"),
        ((), "not run"),
    ],
)
def test_the_skip_is_a_theorem_that_is_only_checked(regimes, judgement):
    observed = {"computed": [{"model": "m", "regime": regime} for regime in regimes], "passes": passes(0.9)}
    found = verdict("skip", observed)
    assert found.judgement == judgement
    assert "without the attention skips in 1 of 1 models" in found.because


def test_features_that_are_gone_without_skips_count_as_nothing():
    observed = {"computed": [{"model": "m", "regime": "smoothing"}], "passes": passes(None)}
    assert "without the attention skips in 0 of 1 models" in verdict("skip", observed).because


@pytest.mark.parametrize(
    ("share", "exponent", "regime", "judgement"),
    [
        (0.1, -0.4, "sharpening", "confirmed"),
        (0.1, -0.4, "smoothing", "undecided"),
        (0.1, -0.501, "smoothing", "refuted"),
        (0.0, -0.4, "sharpening", "undecided"),
    ],
)
def test_only_negative_weights_that_are_there_count(share, exponent, regime, judgement):
    row = {
        "model": "a",
        "kind": "pretrained",
        "layer": "0",
        "negative_share": share,
        "exponent": -0.5,
        "exponent_positive": exponent,
        "regime": "smoothing",
        "regime_positive": regime,
    }
    assert verdict("norm-signs", {"layers": [row]}).judgement == judgement


# --- kept numbers ---------------------------------------------------------------------------------------------------

KEPT = Path(__file__).parents[4] / "benchmarks" / "results" / "claims" / "claims.json"


def test_every_kept_verdict_follows_again_from_the_kept_numbers():
    kept = json.loads(KEPT.read_text())
    claims = [BY_NAME[name] for name in kept]
    again = judged(claims, {name: found["observed"] for name, found in kept.items()})
    for name, found in kept.items():
        assert found["judgement"] == again[name].verdict.judgement
        assert found["because"] == again[name].verdict.because
        assert found["compared"] == list(again[name].compared)
        assert found["protocol"] == BY_NAME[name].protocol
