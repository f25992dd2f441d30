"""Colours of pages and charts: readable, told apart by everyone, and with one meaning each."""

import itertools
import re
from importlib.resources import files

import numpy
import pytest

from oversmooth.output.charts import PARTS as PART_TONES
from oversmooth.output.charts import TONES
from oversmooth.output.render import page_style

STRONG = ("attention", "cross", "feed-forward", "final", "other")
PALE = ("attention-norm", "cross-norm", "feed-forward-norm")
"""Norms; each is drawn with the strong colour of its part around it."""
SERIES = ("series-1", "series-2", "series-3", "series-4")
TEXT = ("ink", "soft")
SIGHT = {
    "all cones": numpy.eye(3),
    "no red cones": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green cones": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue cones": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""What is seen instead of linear red, green and blue (Machado, Oliveira and Fernandes 2009, full severity)."""


THEMES = {"light": 0, "dark": 1}


def colours_of(theme):
    return {name: both[THEMES[theme]] for name, both in TONES.items()}


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


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable_and_marks_are_seen(theme):
    colours = colours_of(theme)
    for name in TEXT:
        assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name
    for name in (*STRONG, *SERIES, "apart", "null"):
        assert contrast(colours[name], colours["paper"]) >= 3, name


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", THEMES)
def test_colours_of_one_figure_are_told_apart_by_everyone(theme, sight):
    colours = colours_of(theme)
    groups = (("attention", "feed-forward", "cross", "final"), *((pale, pale[:-5]) for pale in PALE))
    for names, least in (*((group, 18) for group in groups), (SERIES, 10), (("ink", "apart"), 18)):
        for one, other in itertools.combinations(names, 2):
            assert difference(colours[one], colours[other], sight) >= least, (one, other)


def test_a_pale_colour_belongs_to_the_norm_of_its_part():
    for part, tone in PART_TONES.items():
        if part.startswith("norm after "):
            assert tone == PART_TONES[part.removeprefix("norm after ")] + "-norm"


def test_the_measure_of_difference_can_fail():
    assert difference("#b0307f", "#00897b", "no green cones") < 10 < difference("#b0307f", "#00897b", "all cones")


def test_pages_and_charts_name_only_colours_that_there_are():
    known = {*TONES, "letters"}
    for source in files("oversmooth.output").iterdir():
        if source.name.endswith((".css", ".js", ".py")):
            named = re.findall(r"var\(--([a-z0-9-]+)\)", source.read_text(encoding="utf-8"))
            assert set(named) <= known, source.name


def test_paper_is_white_and_both_themes_are_on_the_page():
    style = page_style()
    for light, dark in TONES.values():
        assert light in style
        assert dark in style
    assert style.rstrip("}").rpartition("@media print")[2].count(TONES["paper"][0]) == 1
