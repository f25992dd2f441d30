"""Colours of the page: readable, told apart by everyone, and with one meaning each."""

import itertools
import re
from importlib.resources import files

import numpy
import pytest

CSS = (files("oversmooth.output") / "page.css").read_text(encoding="utf-8")
HAPPENS = ("smooth", "sharpen", "neutral")
PARTS = ("attention", "feed-forward", "cross-attention", "norm", "other")
SERIES = ("series-1", "series-2", "series-3", "series-4")
TEXT = ("ink", "soft", "accent", *HAPPENS)
SIGHT = {
    "all cones": numpy.eye(3),
    "no red cones": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green cones": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue cones": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""What is seen instead of linear red, green and blue (Machado, Oliveira and Fernandes 2009, full severity)."""


def themes():
    """Variables of the light and the dark theme; the dark one is written twice, for the system's wish and the button."""
    blocks = [
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", CSS)
    ]
    light, dark, chosen = blocks[:3]
    assert dark == chosen
    return {"light": light, "dark": dark}


def linear(colour):
    channels = numpy.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return numpy.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG 2 defines it."""
    low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    x, y, z = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = [numpy.cbrt(t) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.9505, y, z / 1.089)]
    return numpy.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one, other, sight):
    """Distance in CIELAB as someone sees it; about 2 is just noticed."""
    seen = [lab(numpy.clip(numpy.array(SIGHT[sight]) @ linear(colour), 0, 1)) for colour in (one, other)]
    return numpy.linalg.norm(seen[0] - seen[1])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_and_marks_are_seen(theme):
    colours = themes()[theme]
    for name in TEXT:
        assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name
    for name in (*PARTS, *SERIES):
        assert contrast(colours[name], colours["panel"]) >= 3, name


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_of_one_figure_are_told_apart_by_everyone(theme, sight):
    colours = themes()[theme]
    for names, least in ((HAPPENS, 20), (PARTS, 20), (SERIES, 10)):  # lines have dashes too
        for one, other in itertools.combinations(names, 2):
            assert difference(colours[one], colours[other], sight) >= least, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_part_has_the_hue_of_smoothing_or_sharpening(theme):
    colours = themes()[theme]
    for part, direction in itertools.product(PARTS, ("smooth", "sharpen")):
        assert difference(colours[part], colours[direction], "all cones") >= 30, (part, direction)


def test_the_measure_of_difference_can_fail():
    assert difference("#b0307f", "#00897b", "no green cones") < 10 < difference("#b0307f", "#00897b", "all cones")


def test_figures_name_only_colours_that_the_page_has():
    known = themes()["light"]
    for source in (entry for entry in files("oversmooth.output").iterdir() if entry.name.endswith(".py")):
        for name in re.findall(r"var\(--([a-z0-9-]+)\)", source.read_text(encoding="utf-8")):
            assert name in known, (source.name, name)
