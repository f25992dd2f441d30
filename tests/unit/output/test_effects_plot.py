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
def test_every_outcome_has_a_look(outcome):
    (chart,) = effects_plot("effects-6", [row("one", 0.1, outcome)])
    assert [each.value for each in chart.rows] == [0.1]


def test_effects_stand_in_the_order_of_the_table_and_clear_ones_look_different():
    (chart,) = effects_plot("effects-6", ROWS)
    assert [(each.name, each.value, each.low, each.high) for each in chart.rows] == [
        ("first", 0.5, 0.4, 0.6),
        ("second", -0.01, pytest.approx(-0.11), 0.09000000000000001),
        ("third", -0.4, -0.5, pytest.approx(-0.3)),
    ]
    looks = [(each.tone, each.is_open) for each in chart.rows]
    assert looks[0] == looks[2] != looks[1]
    assert "3 comparisons, 2 of them clear" in chart.alt
    assert chart.x.low <= -0.5
    assert chart.x.high >= 0.6


def test_the_band_of_each_comparison_is_its_margin():
    (chart,) = effects_plot("effects-6", ROWS)
    assert [each.margin for each in chart.rows] == [0.02, 0.02, 0.05]


def test_what_was_not_run_is_not_drawn():
    (chart,) = effects_plot("effects-6", [row("first", 0.5, "higher"), row("second", None, "not run")])
    assert [each.name for each in chart.rows] == ["first"]
    assert effects_plot("effects-6", [row("first", None, "not run")]) == ()
