"""The page of a model with few or many layers, on wide and narrow screens and on paper: nothing overlaps, nothing is cut."""

import pytest
import torch

import oversmooth as osm
from oversmooth.output.page import page_of
from oversmooth.output.render import write_page
from tests.browser import opened
from tests.contract.tiny_models import tiny_model
from tests.end_to_end.test_report import CUT, OPEN_ALL, SHOWN, SIDEWAYS, SLOW, deep


@pytest.fixture(scope="module")
def analysis():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    return osm.analyze(model, [{"pixel_values": images}], what_ifs=())


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
TOUCHING = """() => [...document.querySelectorAll('svg.chart')].filter(svg => svg.getClientRects().length).flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    const found = [];
    for (const [k, [one, a]] of boxes.entries()) for (const [other, b] of boxes.slice(k + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
            found.push(one + ' / ' + other);
    return found;
})"""


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        pytest.param(layers, width, marks=[] if (layers, width) == (30, 1200) else SLOW)
        for layers in (2, 6, 12, 30, 80)
        for width in (1200, 800, 400, 320)
    ],
)
def test_nothing_overlaps_and_nothing_is_cut(analysis, layers, width, tmp_path):
    path = tmp_path / "page.html"
    write_page(page_of(deep(analysis, layers, heads=12)), path)
    with opened(path, width=width) as seen:
        seen.page.evaluate(OPEN_ALL)
        assert seen.page.evaluate(OVERLAPS) == []
        assert seen.page.evaluate(TOUCHING) == []
        assert seen.page.evaluate(CUT) == []
        assert set(seen.page.evaluate(SHOWN)) == {1}
        assert seen.page.evaluate(SIDEWAYS) <= 0
        assert seen.errors == []


def test_paper_is_white_and_has_every_part_and_whole_charts(analysis, tmp_path):
    path = tmp_path / "page.html"
    write_page(page_of(deep(analysis, 12, heads=12)), path)
    ink = "getComputedStyle(document.querySelector('#depth .mid .f-ink')).fill"
    with opened(path, width=688, dark=True) as seen:  # what A4 leaves between its margins
        in_the_dark = seen.page.evaluate(ink)
        seen.page.emulate_media(media="print")
        seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert seen.page.locator("details:not([open])").count() == 0
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert seen.page.evaluate(ink) != in_the_dark
        assert seen.page.evaluate(SIDEWAYS) <= 0
        assert seen.page.evaluate(CUT) == []
        assert set(seen.page.evaluate(SHOWN)) == {1}
        seen.page.emulate_media(media="screen")
        seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert seen.page.locator("details[open]").count() == 0
        assert seen.page.evaluate(ink) == in_the_dark
        assert seen.errors == []
