"""Numbers at the bars of the ladder: none is struck out by the line of the measurement."""

import pytest

from oversmooth.output.theory_sections import _label_side

SPAN = 2.0  # of which a number takes up 0.18


@pytest.mark.parametrize(
    ("value", "measured", "side"),
    [
        (-0.86, -0.97, "inside"),  # the line runs where the number would stand
        (0.86, 0.97, "inside"),
        (-1.03, -0.97, "outside"),  # the line runs through the bar
        (-0.97, -0.97, "outside"),  # it ends the bar
        (-0.5, -0.97, "outside"),  # it is far behind the number
        (-0.86, 0.97, "outside"),
        (-0.1, -0.2, "outside"),  # too short to hold a number
        (-0.86, None, "outside"),
    ],
)
def test_a_number_stands_behind_its_bar_unless_the_line_runs_there(value, measured, side):
    assert _label_side(value, measured, SPAN) == side
