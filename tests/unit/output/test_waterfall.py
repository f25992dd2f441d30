"""Who smooths, as bars: each starts where the last one ended, and its colour is what the sentences say of it."""

import pytest

from oversmooth.output.measured_sections import _waterfall
from oversmooth.results.measurement import Attribution, KindChange, Part

CHANGES = {"attention": (-1.0, "smoothing"), "feed-forward": (0.4, "sharpening"), "norm": (-0.1, "no clear change")}


def attribution(kinds=True, direction="smoothing"):
    def changed(cls, kind, **more):
        change, found = CHANGES[kind]
        return cls(part=kind, change=change, standard_error=0.1, interval=None, direction=found, **more)

    return Attribution(
        stack="",
        total=-0.7,
        standard_error=0.1,
        sequences=4,
        attention=-1.0,
        cross_attention=0.0,
        feed_forward=0.4,
        norms=-0.1,
        other=0.0,
        parts=tuple(changed(Part, kind, stack="", depth=1, place="") for kind in CHANGES),
        direction=direction,
        kinds=tuple(changed(KindChange, kind) for kind in CHANGES) if kinds else (),
    )


def test_bars_start_where_the_last_one_ended_and_the_total_starts_at_zero():
    (trace,) = _waterfall(attribution())["traces"]
    assert trace["x"] == ["attention", "feed-forward", "norm", "total"]
    assert trace["base"] == pytest.approx([0.0, -1.0, -0.6, 0.0])
    assert trace["y"] == pytest.approx([-1.0, 0.4, -0.1, -0.7])


def test_what_makes_no_clear_change_is_neither_blue_nor_orange():
    (trace,) = _waterfall(attribution())["traces"]
    assert trace["marker"]["color"] == ["var(--smooth)", "var(--sharpen)", "var(--neutral)", "var(--smooth)"]


def test_results_without_directions_are_coloured_by_sign():
    (trace,) = _waterfall(attribution(kinds=False, direction=""))["traces"]
    assert trace["marker"]["color"] == ["var(--smooth)", "var(--sharpen)", "var(--smooth)", "var(--smooth)"]
