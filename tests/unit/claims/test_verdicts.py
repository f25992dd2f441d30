"""Verdicts: functions of kept numbers alone, right for every way in which the numbers can fall."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oversmooth.claims.claim import paired_effect
from oversmooth.claims.experiments import DEEP, DIGITS, FOLDED, FOLDS, MINI_BERT, TENTH
from oversmooth.claims.pretrained import advantages, correlations
from oversmooth.claims.reproduce import CLAIMS, FAMILY, judged

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
                row |= {"last_cosine": 0.5, "worst_layer": -0.1, "smoothing_layers": 2.0}
                rows.append(row | dict.fromkeys(metrics, value))
    return {"runs": rows, "chosen": [{"variant": "smooth"}]}


@pytest.mark.parametrize(
    ("levels", "judgement"),
    [
        ({"sharpen": 1.0, "smooth": -1.0}, "confirmed"),
        ({"sharpen": -1.0, "smooth": 1.0}, "refuted"),
        ({"sharpen": 1.0, "smooth": 1.0}, "refuted"),
        ({"sharpen": 1.0}, "undecided"),
        ({"sharpen": 1.0, "smooth": -1.0, "free": -2.0}, "undecided"),  # both signs, but free signs smooth even more
    ],
)
def test_the_parametrization_has_to_have_both_signs_and_the_order(levels, judgement):
    assert verdict("parametrization", runs("parametrization", levels)).judgement == judgement


def test_the_parametrization_tells_signs_from_differences_and_names_what_is_not_clear():
    found = verdict("parametrization", runs("parametrization", {"sharpen": 1.0, "smooth": -1.0, "free": -2.0}))
    assert found.brief == "4 of 4 signs are clearly as claimed; of 4 differences from free signs, 2 are clear"
    unclear = found.because.partition("; not clear: ")[2]
    assert unclear.count("attention of smooth minus free") == 2, "on digits and on text"
    assert "sharpen" not in unclear
    assert "not clear" not in verdict("parametrization", runs("parametrization", {"sharpen": 1, "smooth": -1})).because


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


def test_one_condition_is_enough_to_refute_vision_and_not_to_confirm_it():
    observed = runs("vision", {})
    for sign, judgement in ((1, "undecided"), (-1, "refuted")):
        rows = [
            row | {"accuracy": row["accuracy"] + 0.1 * sign * (row["variant"] in ("sharpen", "smooth"))}
            if row["setting"] == TENTH.name
            else row
            for row in observed["runs"]
        ]
        assert verdict("vision", {"runs": rows}).judgement == judgement


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
        ({"smooth": -0.01}, 0.001, "confirmed"),  # clearly worse, and by clearly less than the margin
    ],
)
def test_the_variant_that_validation_chose_must_not_be_inferior(levels, noise, judgement):
    assert verdict("baselines", runs("baselines", levels, noise)).judgement == judgement


@pytest.mark.parametrize("name", ["parametrization", "vision", "language", "baselines"])
def test_what_was_not_run_is_not_judged(name):
    assert verdict(name, {"runs": []}).judgement == "not run"


def test_what_was_run_in_part_is_undecided():
    observed = runs("vision", {"smooth": 0.5})
    rows = [row for row in observed["runs"] if row["setting"] != TENTH.name]
    found = verdict("vision", {"runs": rows})
    assert found.judgement == "undecided"
    assert "waits for runs: 60 of 80 pairs are there" in found.because


@pytest.mark.parametrize("name", ["parametrization", "vision", "language", "baselines"])
def test_a_verdict_waits_for_every_unit_that_was_planned(name):
    """Otherwise a run of `reproduce` could be stopped when its numbers look well."""
    observed = runs(name, {"sharpen": 1.0, "smooth": -1.0})
    last = max(row["unit"] for row in observed["runs"])
    part = observed | {"runs": [row for row in observed["runs"] if row["unit"] != last]}
    found = verdict(name, part)
    assert found.judgement == "undecided"
    assert found.brief.startswith("waits for runs: ")
    assert found.because.startswith("waits for runs: ")


def test_without_a_variant_that_validation_chose_no_baseline_is_judged():
    observed = runs("baselines", {"smooth": 0.3, "sharpen": 0.3}) | {"chosen": []}
    assert verdict("baselines", observed).judgement == "not run"


def test_only_the_variant_that_validation_chose_counts_as_what_decides():
    found = judged([BY_NAME["baselines"]], {"baselines": runs("baselines", {})}, FAMILY)["baselines"]
    counts = {(row["comparison"].split()[2], row["counts"]) for row in found.compared}
    assert counts == {("smooth", "primary"), ("sharpen", "beside it")}


def test_a_verdict_is_corrected_for_the_tests_of_all_claims_whichever_are_looked_at():
    observed = runs("baselines", {}, 0.005)  # p = 0.013 by itself
    alone, one_of_all = (
        judged([BY_NAME["baselines"]], {"baselines": observed}, family)["baselines"].verdict.judgement
        for family in (2, FAMILY)
    )
    assert (alone, one_of_all) == ("confirmed", "undecided")
    everything = {name: runs(name, {}, 0.2) for name in ("parametrization", "vision", "language")}
    together = judged(CLAIMS, {**everything, "baselines": observed}, FAMILY)["baselines"].verdict
    assert together == judged([BY_NAME["baselines"]], {"baselines": observed}, FAMILY)["baselines"].verdict


def test_the_family_has_both_tests_of_every_claim_that_has_some():
    everything = {name: runs(name, {}) for name in ("parametrization", "vision", "language", "baselines")}
    everything["eigenvalue"] = layers(6, 0.5)
    made = [
        verdict
        for name, observed in everything.items()
        for verdict in BY_NAME[name].tests(observed, compared_of(name, observed))
    ]
    assert len(made) == FAMILY


def compared_of(name, observed):
    seen = []
    claim = replace(BY_NAME[name], tests=lambda _, compared: seen.extend(compared) or {})
    judged([claim], {name: observed}, FAMILY)
    return seen


def without_differences(source) -> dict:
    """Runs of claims 5 to 8 in which variants differ by chance alone; folds have a fifth of it in common."""
    found = {}
    for name in ("parametrization", "vision", "language", "baselines"):
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


def test_where_nothing_differs_at_most_five_of_a_hundred_reproductions_come_to_a_verdict():
    """The whole way from numbers to verdicts, over all claims about training together, and over sign flips of claim 2."""
    source, studies = np.random.default_rng(0), 300
    wrong = 0
    for _ in range(studies):
        rows = [
            {"model": str(model), "kind": "pretrained", "measured": float(sign), "rung_0": float(source.normal())}
            for model in range(8)
            for sign in (-1, 1)
            for _ in range(6)
        ]
        findings = judged(CLAIMS, without_differences(source) | {"eigenvalue": {"layers": rows}}, FAMILY)
        judgements = [finding.verdict.judgement for finding in findings.values()]
        wrong += "confirmed" in judgements or "refuted" in judgements
    assert wrong / studies <= 0.05 + 1.64 * (0.05 * 0.95 / studies) ** 0.5


def test_folds_are_judged_with_the_correction_and_seeds_without():
    observed = runs("parametrization", {"sharpen": 1.0}, 0.5)
    found = judged([BY_NAME["parametrization"]], {"parametrization": observed}, FAMILY)["parametrization"]
    widths = {row["comparison"]: row["high"] - row["low"] for row in found.compared}
    for compare in BY_NAME["parametrization"].compares:
        values = {
            variant: [
                r["attention"] for r in observed["runs"] if (r["setting"], r["variant"]) == (compare.setting, variant)
            ]
            for variant in (compare.of, compare.against)
        }
        plain = paired_effect(values[compare.of], values[compare.against] or [0.0] * len(values[compare.of]))
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


ENOUGH = {f"model{number}": 0.2 for number in range(29)}


@pytest.mark.parametrize(
    ("changes", "judgement"),
    [
        ({"a": 0.2, "b": -0.2}, "confirmed"),
        (ENOUGH, "refuted"),
        ({name: ENOUGH[name] for name in list(ENOUGH)[1:]}, "undecided"),  # 28 leave room for more than one in ten
        (ENOUGH | {"model0": 0.0}, "undecided"),
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


def test_models_of_one_kind_of_layers_are_no_units():
    one_kind = [{"model": "all smooth", "kind": "pretrained", "measured": -1.0, "rung_0": -1.0}] * 4
    found = layers(12, 1.0)
    both = verdict("eigenvalue", {"layers": found["layers"] + one_kind})
    assert "12 pretrained models with layers of both kinds" in both.because
    alone = verdict("eigenvalue", {"layers": one_kind})
    assert alone.judgement == "undecided"
    assert "no pretrained model with layers that smooth and layers that sharpen" in alone.because


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
    ],
)
def test_the_skip_is_a_theorem_that_is_only_checked(regimes, judgement):
    computed = [{"model": "m", "kind": "pretrained", "regime": regime} for regime in regimes]
    observed = {"computed": computed, "passes": passes(0.9)}
    found = verdict("skip", observed)
    assert found.judgement == judgement
    assert "without the attention skips in 1 of 1 models" in found.because


def test_a_theorem_is_not_called_checked_while_models_that_were_planned_are_missing():
    observed = {"computed": [{"model": "m", "kind": "pretrained", "regime": "smoothing"}], "passes": passes(0.9)}
    found = verdict("skip", observed | {"missing": [{"run": "runs/a"}, {"run": "runs/b"}]})
    assert found.judgement == "undecided"
    assert "2 models that were to be trained here are missing" in found.brief
    assert verdict("skip", {"computed": [], "passes": []}).judgement == "not run"


def test_features_that_are_gone_without_skips_count_as_nothing():
    computed = [{"model": "m", "kind": "trained", "regime": "smoothing"}]
    observed = {"computed": computed, "passes": passes(None)}
    assert "without the attention skips in 0 of 1 models" in verdict("skip", observed).because


@pytest.mark.parametrize(
    ("share", "exponent", "regime", "judgement"),
    [
        (0.1, -0.4, "sharpening", "confirmed"),
        (0.1, -0.4, "smoothing", "undecided"),
        (0.1, -0.4, "undecided", "undecided"),  # what could not be told is no change
        (0.1, -0.501, "smoothing", "refuted"),
        (0.0, -0.4, "sharpening", "undecided"),
    ],
)
def test_only_negative_weights_that_are_there_count(share, exponent, regime, judgement):
    row = norm_row(share, exponent, regime)
    assert verdict("norm-signs", {"layers": [row] * 29}).judgement == judgement


def test_few_layers_that_do_not_move_refute_nothing():
    row = norm_row(0.1, -0.501, "smoothing")
    assert verdict("norm-signs", {"layers": [row] * 28}).judgement == "undecided"
    assert verdict("norm-signs", {"layers": []}).judgement == "not run"


def norm_row(share: float, exponent: float, regime: str) -> dict:
    return {
        "model": "a",
        "kind": "pretrained",
        "layer": "0",
        "negative_share": share,
        "exponent": -0.5,
        "exponent_positive": exponent,
        "regime": "smoothing",
        "regime_positive": regime,
    }


# --- kept numbers ---------------------------------------------------------------------------------------------------

KEPT = Path(__file__).parents[3] / "benchmarks" / "results" / "claims" / "claims.json"


def test_every_kept_verdict_follows_again_from_the_kept_numbers():
    kept = json.loads(KEPT.read_text())
    claims = [BY_NAME[name] for name in kept]
    again = judged(claims, {name: found["observed"] for name, found in kept.items()}, FAMILY)
    for name, found in kept.items():
        assert found["judgement"] == again[name].verdict.judgement
        assert found["brief"] == again[name].verdict.brief
        assert found["because"] == again[name].verdict.because
        assert found["compared"] == list(again[name].compared)
        assert found["protocol"] == BY_NAME[name].protocol


def test_a_model_without_errors_would_not_have_confirmed_vision_as_its_limits_say():
    """The least gain over vanilla that the test of being confirmed needs on digits leads beyond an accuracy of one."""
    assert "could not have been confirmed" in BY_NAME["vision"].does_not_show
    rows = json.loads(KEPT.read_text())["vision"]["observed"]["runs"]
    accuracy = {
        variant: [row["accuracy"] for row in rows if (row["setting"], row["variant"]) == (DIGITS.name, variant)]
        for variant in ("vanilla", "sharpen", "smooth")
    }
    for variant in ("sharpen", "smooth"):
        effect = paired_effect(accuracy[variant], accuracy["vanilla"], 1 / FOLDS)
        assert np.mean(accuracy["vanilla"]) + effect.clear_from(0.05 / FAMILY / 2) > 1
