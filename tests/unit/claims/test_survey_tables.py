"""What a reader is shown of the models behind claims 1 to 4 is what the verdicts were made from."""

import pytest

from oversmooth.claims.reproduce import CLAIMS, FAMILY, judged
from oversmooth.output.claims_page import markdown_of, page_of
from oversmooth.recipes.train import WHAT_IFS

BY_NAME = {claim.name: claim for claim in CLAIMS}


def shown(name, observed):
    finding = judged([BY_NAME[name]], {name: observed}, FAMILY)[name]
    assert finding.verdict.judgement in markdown_of([BY_NAME[name]], {name: finding}, False)
    assert page_of([BY_NAME[name]], {name: finding}, {}, False).sections[1].blocks
    return finding


def inputs(model, first, last, count=8):
    return [
        {"model": model, "input": i, "cosine_embedding": first, "cosine_last": last + 0.001 * i} for i in range(count)
    ]


def test_similarity_shows_both_ends_and_the_interval_that_decides():
    finding = shown("similarity", {"inputs": inputs("a", 0.1, 0.5) + inputs("b", 0.9, 0.2) + inputs("c", 0.1, 0.0965)})
    rows = {row["model"]: row for row in finding.by_model}
    assert [rows[name]["similarity"] for name in "abc"] == ["rises", "falls", "no clear change"]
    assert (rows["a"]["cosine_at_embedding"], rows["a"]["inputs"]) == (0.1, 8)
    assert rows["a"]["cosine_after_last_layer"] == pytest.approx(0.5035, abs=1e-3)
    assert finding.verdict.judgement == "confirmed"


def test_an_input_without_a_cosine_does_not_count():
    known = inputs("a", 0.1, 0.5)
    unknown = [{**known[0], "input": 8, "cosine_last": None}]
    (row,) = shown("similarity", {"inputs": known + unknown}).by_model
    assert row["inputs"] == 8


def test_the_ladder_stands_beside_the_eigenvalue():
    measured = (-0.3, -0.1, 0.2, 0.4)
    layers = [
        {"model": "a", "kind": "pretrained", "layer": str(i), "measured": m, "rung_0": -m, "rung_1": m}
        for i, m in enumerate(measured)
    ]
    (row,) = shown("eigenvalue", {"layers": layers}).by_model
    assert (row["layers"], row["smooth"]) == (4, 2)
    assert (row["rank_at_rung_0"], row["rank_at_rung_1"]) == ("-1.00", "+1.00")
    assert row["advantage_over_majority"] == "-0.50"  # no sign is right, a constant guess is in half of them


def test_skips_show_where_passes_end_without_them():
    passes = [
        {"model": "a", "input": i, "removed": removed, "cosine_last": value}
        for i in range(2)
        for removed, value in (("none", 0.2), ("attention", 0.6), ("block", None))
    ]
    (row,) = shown("skip", {"computed": [{"kind": "trained", "regime": "smoothing"}], "passes": passes}).by_model
    assert (row["last_cosine"], row["without_attention_skips"], row["without_any"]) == (0.2, 0.6, None)
    assert row["inputs"] == 2


def test_norms_show_negative_weights_and_the_largest_move():
    def layer(share, positive, regime):
        return {
            "model": "a",
            "kind": "trained",
            "layer": "0",
            "negative_share": share,
            "exponent": 0.1,
            "exponent_positive": positive,
            "regime": "sharpening",
            "regime_positive": regime,
        }

    trained = [
        {"setting": setting, "variant": "sharpen", "unit": 0, "attention": value}
        for setting, value in (("plain", 1.0), ("positive", 2.5))
    ]
    layers = [layer(0.0, 0.1, "sharpening"), layer(0.25, -0.2, "smoothing")]
    finding = shown("norm-signs", {"layers": layers, "trained": trained})
    (row,) = finding.by_model
    assert (row["with_negative_weights"], row["largest_share"], row["largest_move"]) == (1, "25.0%", "-0.300")
    assert row["regime_changes"] == 1
    assert "+1.00 in plain, +2.50 in positive" in finding.verdict.because


def test_a_trained_model_is_analysed_with_what_the_claims_look_at():
    assert set(WHAT_IFS) == {"no_skip", "positive_norms"}
