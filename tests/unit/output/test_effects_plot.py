"""The picture of a claim's comparisons says what their rows say."""

from typing import get_args

import pytest

from oversmooth.claims.claim import Compared
from oversmooth.output.claims_page import effects_plot


def row(comparison: str, effect: float | None, outcome: str, half: float = 0.1, margin: float = 0.02) -> dict:
    low, high = (None, None) if effect is None else (effect - half, effect + half)
    return {
        "comparison": comparison,
        "effect": effect,
        "low": low,
        "high": high,
        "margin": margin,
        "outcome": outcome,
    }


ROWS = [row("first", 0.5, "higher"), row("second", -0.01, "undecided"), row("third", -0.4, "lower", margin=0.05)]
OUTCOMES = [outcome for kind in get_args(Compared.__annotations__["outcome"]) for outcome in get_args(kind) or (kind,)]


@pytest.mark.parametrize("outcome", [each for each in OUTCOMES if each != "not run"])
def test_every_outcome_has_a_marker(outcome):
    (plot,) = effects_plot("effects-6", [row("one", 0.1, outcome)])
    assert [trace["x"] for trace in plot.figure["traces"]] == [[0.1]]


def test_effects_stand_at_the_height_of_their_words_and_clear_ones_are_apart():
    (plot,) = effects_plot("effects-6", ROWS)
    clear, unclear = plot.figure["traces"]
    assert (clear["x"], clear["y"]) == ([0.5, -0.4], [3, 1])
    assert (unclear["x"], unclear["y"]) == ([-0.01], [2])
    assert clear["error_x"]["array"] == pytest.approx([0.1, 0.1])
    heights = {each["text"]: each["y"] for each in plot.figure["layout"]["annotations"]}
    assert heights == {"first": 3, "second": 2, "third": 1}
    assert "3 comparisons, 2 of them clear" in plot.alt


def test_the_band_of_each_comparison_is_its_margin():
    (plot,) = effects_plot("effects-6", ROWS)
    bands = [(band["x0"], band["x1"]) for band in plot.figure["layout"]["shapes"]]
    assert bands == [(-0.02, 0.02), (-0.02, 0.02), (-0.05, 0.05)]


def test_what_was_not_run_is_not_drawn():
    (plot,) = effects_plot("effects-6", [row("first", 0.5, "higher"), row("second", None, "not run")])
    assert [each["text"] for each in plot.figure["layout"]["annotations"]] == ["first"]
    assert effects_plot("effects-6", [row("first", None, "not run")]) == ()
