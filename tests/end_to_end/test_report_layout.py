"""The page of a model with few or many layers, on wide and narrow screens: nothing overlaps and nobody stands alone."""

import pytest
import torch

import oversmooth as osm
from oversmooth.output.blocks import columns_for
from oversmooth.output.page import page_of
from oversmooth.output.render import write_page
from tests.browser import opened
from tests.contract.tiny_models import tiny_model
from tests.end_to_end.test_report import SLOW, deep, draw_all


@pytest.fixture(scope="module")
def analysis():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    return osm.analyze(model, [{"pixel_values": images}], what_ifs=())


ROWS_OF_CARDS = """() => {
    const rows = {};
    for (const card of document.querySelectorAll('.strip li')) {
        const top = Math.round(card.getBoundingClientRect().top);
        rows[top] = (rows[top] || 0) + 1;
    }
    return Object.keys(rows).map(Number).sort((a, b) => a - b).map(top => rows[top]);
}"""
OVERLAPS = """() => {
    const found = [];
    const name = node => node.id || node.className || node.tagName;
    for (const parent of [document.querySelector('header'), document.querySelector('main')]) {
        const nodes = [...parent.children].filter(node => node.getBoundingClientRect().height > 0);
        for (let k = 1; k < nodes.length; k++) {
            const above = nodes[k - 1].getBoundingClientRect(), below = nodes[k].getBoundingClientRect();
            const apart = below.left >= above.right || above.left >= below.right;
            if (!apart && below.top < above.bottom - 12) found.push(name(nodes[k - 1]) + ' / ' + name(nodes[k]));
        }
    }
    return found;
}"""
COVERED = """() => {
    const touches = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    const box = node => node.getBoundingClientRect();
    const found = [];
    for (const plot of document.querySelectorAll('.plot')) {
        const area = plot.querySelector('.nsewdrag'), legend = plot.querySelector('.legend');
        if (area && legend && touches(box(area), box(legend))) found.push(plot.id + ': legend over data');
        const texts = [...plot.querySelectorAll('.xtick text')]; // boxes around slanted labels touch where the labels do not
        const level = texts.filter(text => !/rotate\\((?!0[,)])/.test(text.getAttribute('transform') || ''));
        const ticks = level.map(box).sort((a, b) => a.left - b.left);
        for (let k = 1; k < ticks.length; k++)
            if (touches(ticks[k - 1], ticks[k])) { found.push(plot.id + ': tick labels'); break; }
    }
    return found;
}"""
CUT_OFF = "[...document.querySelectorAll('.strip li')].filter(card => card.scrollWidth > card.clientWidth + 1).length"
LINES = (
    "document.querySelector('h1').offsetHeight / parseFloat(getComputedStyle(document.querySelector('h1')).lineHeight)"
)


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        pytest.param(layers, width, marks=[] if (layers, width) == (30, 1200) else SLOW)
        for layers in (6, 12, 30, 80)
        for width in (1200, 400)
    ],
)
def test_nothing_overlaps_and_no_card_stands_alone(analysis, layers, width, tmp_path):
    path = tmp_path / "page.html"
    write_page(page_of(deep(analysis, layers, heads=12)), path)
    with opened(path, width=width) as seen:
        draw_all(seen.page)
        seen.page.evaluate("window.scrollTo(0, 0)")
        assert seen.page.evaluate(OVERLAPS) == []
        assert seen.page.evaluate(COVERED) == []
        assert seen.page.evaluate(CUT_OFF) == 0
        rows = seen.page.evaluate(ROWS_OF_CARDS)
        assert sum(rows) == layers
        assert len(rows) == 1 or rows[-1] > 1, rows
        assert seen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert width < 1200 or seen.page.evaluate(LINES) < 2.5, "a headline of at most two lines"
        assert seen.errors == []


def test_paper_is_white_cuts_no_table_off_and_says_which_layer_a_figure_shows(analysis, tmp_path):
    path = tmp_path / "page.html"
    write_page(page_of(deep(analysis, 12, heads=12)), path)
    ink = "getComputedStyle(document.querySelector('#ladder .xtick text')).fill"
    with opened(path, width=720, dark=True) as seen:  # what A4 leaves between its margins
        draw_all(seen.page)
        in_the_dark = seen.page.evaluate(ink)
        seen.page.emulate_media(media="print")
        seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert seen.page.evaluate(ink) == "rgb(0, 0, 0)" != in_the_dark
        assert seen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert seen.page.evaluate("document.getElementById('ladder-label').offsetHeight") > 0
        seen.page.emulate_media(media="screen")
        seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert seen.page.evaluate(ink) == in_the_dark
        assert seen.errors == []


@pytest.mark.parametrize("most", [3, 6, 8, 12, 20])
def test_cards_fill_few_rows_and_the_last_holds_one_only_where_nothing_helps(most):
    for count in range(1, 200):
        columns = columns_for(count, most)
        assert 1 <= columns <= most
        if count > most:
            is_hopeless = all(count % each == 1 for each in range(2, most + 1))
            assert (count % columns == 1) == is_hopeless
            assert most < 12 or -(-count // columns) <= -(-count // most) + 2
