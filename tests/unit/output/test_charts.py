"""Charts: every text inside the picture and none over another, from 2 to 100 layers; equal numbers everywhere."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from oversmooth.output.card import chart_of, gauge_of, picture_of
from oversmooth.output.charts import (
    HALF,
    PARTS,
    SIZE,
    TONES,
    WIDTHS,
    Chart,
    Columns,
    EffectChart,
    EffectRow,
    HeatMap,
    Line,
    Panel,
    Points,
    numbers,
    places,
    png,
    shade,
    standalone,
    style,
    svg,
    text_width,
    thinned,
    wrapped,
)
from oversmooth.results.measurement import PART_NAMES
from tests.answers import deep, minilm

HOSTILE = "</text><script>alert('x')</script>\"&<img src=x onerror=alert(1)>"
LONG = "a model whose name is so long that nobody could write it at the end of a line, whatever its width may be"
SVG = "{http://www.w3.org/2000/svg}"


def lines_of(count):
    """As many curves, with names of all lengths."""
    x = tuple(float(k) for k in range(9))
    marks = tuple(
        Line(name=f"{'m' * (3 * k)} {k}", x=x, y=tuple(0.5 + 0.001 * k for _ in x), value="0.50") for k in range(count)
    )
    panel = Panel(title=LONG, y=numbers(0.0, 1.0), marks=marks)
    return Chart(id="lines", alt="lines", x=places([str(k) for k in range(9)], "layer"), panels=(panel,))


def heat(rows, columns):
    values = tuple(tuple((r - c) / (rows + columns) for c in range(columns)) for r in range(rows))
    names = tuple(f"decoder {k}" for k in range(rows))
    return HeatMap(
        id="heat",
        alt="heat",
        title=LONG,
        rows=names,
        columns=tuple(map(str, range(columns))),
        values=values,
        low=-1.0,
        high=1.0,
        middle=0.0,
        row_title="row",
        column_title="head",
        unit=LONG,
    )


def effects(count):
    rows = tuple(
        EffectRow(name=f"{k} {LONG}", value=0.1 * k, low=0.1 * k - 0.2, high=0.1 * k + 0.2, margin=0.05, said="+0.100")
        for k in range(count)
    )
    return EffectChart(id="effects", alt="effects", title=LONG, x=numbers(-0.5, 1.0, is_change=True), rows=rows)


FIGURES = {
    "gauge": gauge_of(minilm()),
    "gauge at its end": gauge_of(deep(80)),
    **{f"answer of {k} layers": chart_of(deep(k)) for k in (2, 3, 6, 12, 30, 80, 100)},
    "answer without a norm": chart_of(minilm()),
    "twelve lines": lines_of(12),
    "one line of a long name": replace(
        lines_of(1),
        panels=(Panel(title="", y=numbers(0.0, 1.0), marks=(Line(name=LONG, x=(0.0, 1.0), y=(0.0, 1.0)),)),),
    ),
    "heat map of long names": replace(heat(2, 2), rows=(LONG, LONG + " 1"), columns=(LONG, "d")),
    "small heat map": heat(2, 3),
    "large heat map": heat(100, 64),
    "effects": effects(5),
}


def size_of(node, usual):
    style = node.get("style") or ""
    return float(style.split("font-size:")[1].split("px")[0]) if "font-size" in style else float(usual)


def texts_of(text, width):
    """Every line of text with its box, as wide as the widest font makes it."""
    root = ElementTree.fromstring(text)
    found = []
    for node in root.iter():
        if not node.tag.endswith("text") or node.get("aria-hidden"):
            continue
        classes = (node.get("class") or "").split()
        size = size_of(node, SIZE)
        wide = text_width(node.text or "", size, bold="b" in classes)
        wide += sum(text_width(part.text, size_of(part, size)) + float(part.get("dx")) for part in node)
        x, y = float(node.get("x")), float(node.get("y"))
        left = x - wide if "e" in classes else x - wide / 2 if "c" in classes else x
        found.append(("".join(node.itertext()), left, left + wide, y - 0.75 * size, y + 0.22 * size))
    return found, [float(part) for part in root.get("viewBox").split()]


@pytest.mark.parametrize("width", sorted({*WIDTHS.values(), *HALF.values()}))
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_or_stands_over_another(name, width):
    texts, (_, _, right, bottom) = texts_of(svg(FIGURES[name], width).replace("&nbsp;", " "), width)
    assert texts
    for said, x1, x2, y1, y2 in texts:
        assert x1 >= -1, said
        assert x2 <= right + 1, said
        assert y1 >= -1, said
        assert y2 <= bottom + 1, said
    for (one, a1, a2, b1, b2), (other, c1, c2, d1, d2) in combinations(texts, 2):
        across, down = min(a2, c2) - max(a1, c1), min(b2, d2) - max(b1, d1)
        assert across <= 1 or down <= 1, (one, other)


def test_the_test_above_can_fail():
    short = svg(FIGURES["gauge"], 340.0).replace('viewBox="0 0 340', 'viewBox="0 0 100')
    texts, (_, _, right, _) = texts_of(short, 100)
    assert any(x2 > right for _, _, x2, _, _ in texts)


@pytest.mark.parametrize("name", FIGURES)
def test_page_and_file_say_the_same(name):
    page, _ = texts_of(svg(FIGURES[name], 700.0), 700)
    file, _ = texts_of(standalone(FIGURES[name], 700.0), 700)
    assert [text for text, *_ in page] == [text for text, *_ in file]


@pytest.mark.parametrize("name", FIGURES)
def test_every_colour_has_a_rule_in_both_themes_and_the_picture_has_words(name):
    text = standalone(FIGURES[name])
    root = ElementTree.fromstring(text)
    used = {part for node in root.iter() for part in (node.get("class") or "").split() if part[:2] in ("f-", "s-")}
    for theme in (0, 1, None):
        assert all(f".{part}{{" in style(theme) for part in used)
    assert 'role="img"' in svg(FIGURES[name], 700.0)
    assert FIGURES[name].alt


def test_names_from_files_are_escaped():
    line = Line(name=HOSTILE, x=(0.0, 1.0), y=(0.0, 1.0))
    points = Points(name=HOSTILE, x=(0.0,), y=(0.5,), titles=(HOSTILE,), labels=(HOSTILE,))
    panel = Panel(title=HOSTILE, y=numbers(0.0, 1.0), marks=(line, points))
    chart = Chart(
        id="x", alt=HOSTILE, x=places([HOSTILE, HOSTILE]), panels=(panel,), notes=((0.0, HOSTILE), (1.0, HOSTILE))
    )
    table = replace(heat(2, 2), rows=(HOSTILE, "b"), columns=(HOSTILE, "d"), title=HOSTILE, unit=HOSTILE, alt=HOSTILE)
    rows = replace(effects(1), rows=(replace(effects(1).rows[0], name=HOSTILE, said=HOSTILE),), title=HOSTILE)
    for figure in (chart, table, rows, gauge_of(minilm(model=HOSTILE)), chart_of(minilm(stack=HOSTILE))):
        root = ElementTree.fromstring(svg(figure, 700.0))
        assert {node.tag.rpartition("}")[2] for node in root.iter()} <= {
            "svg",
            "g",
            "path",
            "rect",
            "circle",
            "text",
            "tspan",
            "title",
        }
    ElementTree.fromstring(picture_of(minilm(model=HOSTILE, headline=HOSTILE)))


def test_columns_are_as_high_as_their_numbers_and_the_dot_is_their_sum():
    parts = (("attention", "attention", (0.3,), ""), ("feed-forward", "feed-forward", (-0.1,), ""))
    panel = Panel(title="", y=numbers(-0.5, 0.5), marks=(Columns(x=(0.0,), parts=parts),), height=100)
    root = ElementTree.fromstring(standalone(Chart(id="c", alt="c", x=places(["0"]), panels=(panel,)), 400.0))
    heights = {
        node.get("class"): float(node.get("d").split("v")[1].split("h")[0])
        for node in root.iter(f"{SVG}path")
        if "v" in node.get("d", "") and node.get("class", "").startswith("f-")
    }
    assert heights == pytest.approx({"f-attention": 30, "f-feed-forward": 10})
    dots = {float(node.get("cy")) for node in root.iter(f"{SVG}circle") if node.get("class") == "f-ink"}
    zero = 10 + 50
    assert dots == {zero - 20}


def test_a_line_stops_where_a_number_is_missing():
    line = Line(name="", x=(0.0, 1.0, 2.0, 3.0), y=(0.1, None, 0.3, 0.4))
    text = svg(
        Chart(id="c", alt="c", x=places(list("abcd")), panels=(Panel(title="", y=numbers(0.0, 1.0), marks=(line,)),)),
        700,
    )
    path = next(part for part in text.split("<path ") if "s-ink" in part)
    assert path.count("M") == 2
    assert path.count("L") == 1


@pytest.mark.parametrize(
    ("value", "level", "tone"),
    [(0.0, 0, "ink"), (1.0, 12, "ink"), (-1.0, 12, "apart"), (-0.5, 6, "apart"), (9.0, 12, "ink")],
)
def test_the_colour_of_a_cell_is_its_distance_from_the_middle(value, level, tone):
    assert shade(heat(1, 1), value) == (level, tone)
    assert shade(replace(heat(1, 1), ink_below=True), value) == (level, "apart" if value >= 0 else "ink")


def test_neighbours_of_one_colour_are_one_box():
    flat = replace(heat(1, 50), values=((1.0,) * 50,))
    assert svg(flat, 700.0).count("z") == 1


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-0.07, 0.13), (0, 1e-7), (3, 3), (-2e6, 5e6), (0.0, 0.0), (-1, 12345)]
)
def test_ticks_are_round_and_lie_inside(low, high):
    axis = numbers(float(low), float(high))
    values = [value for value, _ in axis.ticks]
    assert axis.low < axis.high
    assert 2 <= len(values) <= 12
    assert all(axis.low - 1e-9 <= value <= axis.high + 1e-9 for value in values)
    assert len({text for _, text in axis.ticks}) == len(values), "no two ticks have one name"


@pytest.mark.parametrize("layers", [2, 7, 13, 48, 100])
def test_labels_keep_the_input_and_the_norm_and_do_not_touch(layers):
    labels = ["input", *map(str, range(layers)), "norm"]
    ticks = [(300 * k / (layers + 1), label) for k, label in enumerate(labels)]
    shown = thinned(ticks)
    assert shown[0][1] == "input"
    assert shown[-1][1] == "norm"
    for (x, one), (y, other) in pairwise(shown):
        assert y - x >= (text_width(one) + text_width(other)) / 2


def test_lines_of_text_fit_and_lose_nothing():
    for room in (20.0, 80.0, 300.0):
        lines = wrapped(LONG + " " + "x" * 200, room)
        assert all(text_width(line) <= room for line in lines)
        assert "".join(lines).replace(" ", "") == (LONG + "x" * 200).replace(" ", "")


def test_every_part_has_a_colour_of_its_own():
    assert set(PARTS) == set(PART_NAMES)
    assert len(set(PARTS.values())) == len(PARTS)
    assert set(PARTS.values()) <= set(TONES)


def test_the_card_is_a_picture_of_1200_by_630_with_nothing_cut():
    for answer in (minilm(), deep(80), minilm(headline=LONG * 2, model=LONG[:40])):
        texts, (_, _, width, height) = texts_of(picture_of(answer), 1200)
        assert (width, height) == (1200, 630)
        outside = [
            text for text, left, right, top, bottom in texts if left < -1 or right > 1201 or bottom > 631 or top < -1
        ]
        assert outside == []


def test_png_is_drawn_by_resvg_and_the_same_each_time():
    pytest.importorskip("resvg_py")
    image = png(picture_of(minilm()), 1.0)
    assert image[:4] == b"\x89PNG"
    assert int.from_bytes(image[16:20], "big") == 1200
    assert int.from_bytes(image[20:24], "big") == 630
    assert image == png(picture_of(minilm()), 1.0)
