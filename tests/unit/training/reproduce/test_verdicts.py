"""Verdicts: functions of kept numbers alone, right for every way in which the numbers can fall."""

import json
from pathlib import Path

import numpy as np
import pytest

from oversmooth.training.reproduce.claims import CLAIMS, FAMILY
from oversmooth.training.reproduce.experiments import DEEP, DIGITS, FOLDED, FOLDS, MINI_BERT, TENTH
from oversmooth.training.reproduce.judging import judged
from oversmooth.training.reproduce.statistics import paired_effect
from oversmooth.training.reproduce.survey_verdicts import advantages, correlations

BY_NAME = {claim.name: claim for claim in CLAIMS}
EQUAL = "no difference larger than the margin"
UNITS = {each.name: each.units for each in (DIGITS, TENTH, DEEP, *MINI_BERT)}


def verdict(name: str, observed):
    return judged([BY_NAME[name]], {name: observed}, FAMILY)[name].verdict


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
        ({"smooth": -0.1, "sharpen": 0.1}, "undecided"),  # one of them is worse than vanilla
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


def test_what_a_claim_comes_to_does_not_depend_on_which_others_are_looked_at():
    observed = {name: runs(name, {"sharpen": 0.02}, 0.01) for name in ("parametrization", "vision", "language")}
    for name, found in observed.items():
        claim = BY_NAME[name]
        alone, together = judged([claim], {name: found}, FAMILY)[name], judged(CLAIMS, observed, FAMILY)[name]
        pairs = list(zip(alone.compared, together.compared, strict=True))
        assert all(one["p"] >= many["p"] for one, many in pairs), "as if all others had come to nothing, at worst"
        smallest = min(row["p"] for row in alone.compared if row["counts"] == "primary")
        raw = judged([claim], {name: found}, sum(each.is_primary for each in claim.compares))[name]
        assert smallest > min(row["p"] for row in raw.compared if row["counts"] == "primary")


def test_the_family_has_every_primary_comparison_and_test_once():
    everything = {name: runs(name, {}) for name in ("parametrization", "vision", "language", "baselines")}
    found = judged(CLAIMS, everything | {"eigenvalue": layers(6, 0.5)}, FAMILY)
    primary = [row for finding in found.values() for row in finding.compared if row["counts"] == "primary"]
    assert len(primary) + 2 == FAMILY, "and the sign flips of claim 2 and the margin of claim 8"


def test_the_margin_of_claim_8_is_corrected_as_all_others():
    """A one-sided p of 0.006 is clear as one of five, and not as one of all."""
    alone, one_of_all = (
        judged([BY_NAME["baselines"]], {"baselines": runs("baselines", {}, 0.004)}, family)["baselines"].verdict
        for family in (5, FAMILY)
    )
    assert alone.judgement == "confirmed"
    assert one_of_all.judgement == "undecided"


def without_differences(source) -> dict:
    """Runs of claims 5 to 7 in which variants differ by chance alone; folds have a fifth of it in common."""
    found = {}
    for name in ("parametrization", "vision", "language"):
        observed = runs(name, {}, 0.0)
        common = {}
        for row in observed["runs"]:
            key = (row["setting"], row["variant"])
            shared = 1 / FOLDS if row["setting"] in FOLDED else 0.0
            both = common.setdefault(key, source.normal()) * shared**0.5 + source.normal() * (1 - shared) ** 0.5
            for metric in ("accuracy", "corruption_accuracy", "loss", "attention"):
                row[metric] = 0.1 * both
        found[name] = observed
    return found


def test_where_nothing_differs_at_most_five_of_a_hundred_reproductions_find_a_clear_difference():
    """The whole way from numbers to verdicts, over all claims about training together."""
    source, studies = np.random.default_rng(0), 300
    clear = 0
    for _ in range(studies):
        findings = judged(CLAIMS, without_differences(source), FAMILY)
        rows = [row for finding in findings.values() for row in finding.compared if row["counts"] == "primary"]
        clear += any(row["outcome"] in ("higher", "lower") for row in rows)
        judgements = {finding.verdict.judgement for finding in findings.values()}
        assert judgements <= {"undecided", "refuted", "confirmed", EQUAL}
    assert clear / studies <= 0.05 + 1.64 * (0.05 * 0.95 / studies) ** 0.5


def test_folds_are_judged_with_the_correction_and_seeds_without():
    observed = runs("parametrization", {"sharpen": 1.0}, 0.5)
    found = judged([BY_NAME["parametrization"]], {"parametrization": observed}, FAMILY)["parametrization"]
    widths = {}
    for row in found.compared:
        low, high = (float(end) for end in row["interval"].strip("[]").split(", "))
        widths[row["comparison"]] = high - low
    for compare in BY_NAME["parametrization"].compares:
        values = {
            variant: [
                r["attention"] for r in observed["runs"] if (r["setting"], r["variant"]) == (compare.setting, variant)
            ]
            for variant in (compare.of, compare.against)
        }
        plain = paired_effect(values[compare.of], values[compare.against])
        larger = 1.5 if compare.setting == DEEP.name else 1.0  # sqrt((1/5 + 1/4) / (1/5))
        assert widths[compare.words] == pytest.approx(larger * (plain.high - plain.low), abs=3e-4)


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
    [(12, 1.0, "confirmed"), (12, 0.0, "refuted"), (12, 0.5, "undecided"), (6, 1.0, "undecided")],
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
        (("smoothing", "neutral"), "refuted"),
        (("smoothing", "undecided"), "undecided"),
        (("smoothing", "mixed"), "undecided"),
        ((), "not run"),
    ],
)
def test_the_skip_is_a_theorem_that_is_only_checked(regimes, judgement):
    computed = [{"model": "m", "kind": "pretrained", "regime": regime} for regime in regimes]
    observed = {"computed": computed, "passes": passes(0.9)}
    found = verdict("skip", observed)
    assert found.judgement == judgement
    assert "without the attention skips in 1 of 1 models" in found.because


def test_features_that_are_gone_without_skips_count_as_nothing():
    computed = [{"model": "m", "kind": "trained", "regime": "smoothing"}]
    observed = {"computed": computed, "passes": passes(None)}
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
    again = judged(claims, {name: found["observed"] for name, found in kept.items()}, FAMILY)
    for name, found in kept.items():
        assert found["judgement"] == again[name].verdict.judgement
        assert found["because"] == again[name].verdict.because
        assert found["compared"] == list(again[name].compared)
        assert found["protocol"] == BY_NAME[name].protocol
