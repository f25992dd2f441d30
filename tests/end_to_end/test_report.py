"""The page in a real browser: drawn, quiet, usable, safe."""

import json
from dataclasses import replace

import pytest

import oversmooth as osm
from oversmooth.output.compare_page import compare_page
from oversmooth.output.page import page_of
from oversmooth.output.render import write_page
from oversmooth.results import Analysis
from tests.browser import opened
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model
from tests.real_models import minilm

MARKS = "svg .trace, svg .bars, svg .hm, svg g.point, image"
"""What Plotly draws for data, unlike the empty container."""
HOSTILE = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def analysis():
    return osm.analyze(minilm(), max_samples=6, command="oversmooth report")


@pytest.fixture(scope="module")
def page_file(analysis, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    analysis.save_html(path)
    return path


def draw_all(page):
    """Scrolls through the page so that every figure is drawn."""
    height = page.evaluate("document.body.scrollHeight")
    for top in range(0, height, 600):
        page.evaluate(f"window.scrollTo(0, {top})")
        page.wait_for_timeout(60)
    page.wait_for_timeout(300)


def until(page, condition):
    """Waits for it; Playwright's own waiting would need `eval`, which the page forbids."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never so: {condition}")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dark", "width"),
    [(False, 390), (True, 1200), pytest.param(False, 1200, marks=SLOW), pytest.param(True, 390, marks=SLOW)],
)
def test_every_plot_is_drawn_without_errors_or_requests(page_file, width, dark, tmp_path):
    with opened(page_file, width=width, dark=dark) as seen:
        draw_all(seen.page)
        plots = seen.page.locator(".plot").count()
        drawn = seen.page.evaluate(
            f"[...document.querySelectorAll('.plot')].filter(p => p.querySelector('{MARKS}')).length"
        )
        overflow = seen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert plots >= 6
        assert drawn == plots
        assert overflow <= 0, "nothing sticks out sideways"
        assert seen.errors == []
        assert seen.requests == [page_file.absolute().as_uri()]


def test_the_verdict_and_the_curves_are_on_the_first_screen(page_file):
    with opened(page_file) as seen:
        for selector in ("h1", ".findings", "#cosine", "#waterfall", ".strip"):
            box = seen.page.locator(selector).first.bounding_box()
            assert box["y"] + min(box["height"], 60) < 900


def test_the_slider_changes_the_layer_by_keyboard(page_file):
    with opened(page_file) as seen:
        slider = seen.page.locator("#eigenvalues-slider")
        slider.scroll_into_view_if_needed()
        until(seen.page, "(document.getElementById('eigenvalues').data || []).length > 1")
        before = seen.page.evaluate("document.getElementById('eigenvalues').data[1].x.slice(0, 5)")
        slider.focus()
        seen.page.keyboard.press("ArrowRight")
        until(seen.page, "document.getElementById('eigenvalues-label').textContent.includes('layer 1')")
        after = seen.page.evaluate("document.getElementById('eigenvalues').data[1].x.slice(0, 5)")
        assert before != after
        assert "layer 1" in seen.page.locator("#eigenvalues-label").inner_text()
        assert "layer 1" in slider.get_attribute("aria-valuetext")


def test_tables_sort_by_number_both_ways(page_file):
    with opened(page_file) as seen:
        head = seen.page.locator("#layers th button", has_text="ρ dc").first
        cells = "[...document.querySelectorAll('#layers tbody tr')].map(r => Number(r.cells[1].dataset.value))"
        head.click()
        until(seen.page, "document.querySelector('#layers th[aria-sort=ascending]') !== null")
        rising = seen.page.evaluate(cells)
        head.click()
        until(seen.page, "document.querySelector('#layers th[aria-sort=descending]') !== null")
        falling = seen.page.evaluate(cells)
        assert rising == sorted(rising)
        assert falling == sorted(rising, reverse=True)


@pytest.mark.parametrize("width", [pytest.param(1200, marks=SLOW), 390])
def test_nothing_moves_when_plots_are_drawn(page_file, width):
    with opened(page_file, width=width) as seen:
        before = seen.page.evaluate("document.body.scrollHeight")
        draw_all(seen.page)
        assert seen.page.evaluate("document.body.scrollHeight") == pytest.approx(before, abs=4)


def test_tables_and_plots_can_be_saved(page_file):
    with opened(page_file) as seen:
        draw_all(seen.page)
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-csv='layers']").click()
        text = download.value.path().read_text()
        assert text.count("\n") == 7
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-save='svg'][data-of='cosine']").click()
        assert "<svg" in download.value.path().read_text()[:200]
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-save='png'][data-of='cosine']").click()
        assert download.value.path().read_bytes()[:4] == b"\x89PNG"
        assert seen.errors == []


def test_the_theme_can_be_switched(page_file):
    with opened(page_file) as seen:
        colour = "getComputedStyle(document.body).backgroundColor"
        light = seen.page.evaluate(colour)
        seen.page.locator("#theme").click()
        assert seen.page.evaluate(colour) != light


def test_every_plot_has_words_for_those_who_cannot_see_it(page_file):
    with opened(page_file) as seen:
        for plot in seen.page.locator(".plot").all():
            assert len(plot.get_attribute("aria-label")) > 20
            assert plot.get_attribute("role") == "img"


def hostile(analysis):
    """The same analysis with markup in every name that comes from a file."""
    inspection = analysis.inspection
    provenance = replace(inspection.provenance, target=HOSTILE, model_type=HOSTILE)
    layers = tuple(replace(layer, stack=HOSTILE) for layer in inspection.layers)
    measurement = analysis.measurement
    measurement = replace(
        measurement,
        values=tuple(replace(value, stack=HOSTILE) for value in measurement.values),
        attributions=tuple(replace(item, stack=HOSTILE) for item in measurement.attributions),
        data=replace(measurement.data, description=HOSTILE),
        definitions=((*measurement.definitions, (HOSTILE, HOSTILE))),
    )
    return replace(
        analysis,
        inspection=replace(inspection, provenance=provenance, layers=layers),
        measurement=measurement,
        command=HOSTILE,
    )


def test_names_from_files_are_escaped(analysis, tmp_path):
    path = tmp_path / "hostile.html"
    write_page(page_of(hostile(analysis)), path)
    with opened(path) as seen:
        alerts = []
        seen.page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        draw_all(seen.page)
        assert alerts == []
        assert seen.page.locator("img[src='x']").count() == 0
        assert seen.errors == []
        assert seen.requests == [path.absolute().as_uri()]
        assert HOSTILE in seen.page.locator(".eyebrow").inner_text()


def test_the_file_is_small_enough(page_file):
    assert page_file.stat().st_size < 6_000_000


def test_a_saved_analysis_reopens_to_the_identical_page(analysis, page_file, tmp_path):
    saved, again = tmp_path / "a.json", tmp_path / "again.html"
    saved.write_text(analysis.to_json())
    done = oversmooth("report", saved, "-o", again)
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == page_file.read_bytes()


def test_a_newer_schema_is_refused_politely(analysis, tmp_path):
    saved = tmp_path / "newer.json"
    saved.write_text(json.dumps({**analysis.to_dict(), "schema": 99}))
    done = oversmooth("report", saved, "-o", tmp_path / "x.html")
    assert done.returncode == 2
    assert "written by a newer oversmooth" in done.stderr
    assert not (tmp_path / "x.html").exists()


def deep(analysis, layers=48, heads=32):
    """An analysis of a much larger model, made from a real one."""
    inspection, measurement = analysis.inspection, analysis.measurement
    first = inspection.layers[0]
    many_heads = tuple(replace(first.heads[k % len(first.heads)], head=k) for k in range(heads))
    rows = tuple(
        replace(inspection.layers[k % len(inspection.layers)], layer=k, passes=(k,), heads=many_heads)
        for k in range(layers)
    )
    values = tuple(
        replace(value, depth=depth)
        for depth in range(layers + 1)
        for value in measurement.values
        if value.depth == (0 if depth == 0 else 1 + (depth - 1) % len(inspection.layers))
    )
    attributions = [_deeper(found[0], layers) for found in (measurement.attributions, measurement.unit_attributions)]
    prediction = analysis.prediction
    predicted = tuple(
        replace(prediction.layers[k % len(prediction.layers)], layer=k, depth=k + 1) for k in range(layers)
    )
    return replace(
        analysis,
        inspection=replace(inspection, layers=rows),
        measurement=replace(
            measurement, values=values, attributions=(attributions[0],), unit_attributions=(attributions[1],)
        ),
        prediction=replace(prediction, layers=predicted),
    )


def _deeper(attribution, layers):
    depths = sorted({part.depth for part in attribution.parts})
    parts = tuple(
        replace(part, depth=depth)
        for depth in range(1, layers + 1)
        for part in attribution.parts
        if part.depth == depths[depth % len(depths)]
    )
    return replace(attribution, parts=parts)


SQUARE_ROOTS = """() => {
    const began = performance.now();
    let sum = 0;
    for (let k = 0; k < 2e7; k++) sum += Math.sqrt(k);
    return sum > 0 ? performance.now() - began : 0;
}"""


def slowness(page):
    """How much longer than on an idle core the browser takes for fixed work, at least 1: limits grow with it."""
    return max(1.0, page.evaluate(SQUARE_ROOTS) / 40)


@pytest.mark.slow
def test_a_48_layer_32_head_model_opens_and_scrolls(analysis, tmp_path):
    path = tmp_path / "deep.html"
    write_page(page_of(deep(analysis)), path)
    with opened(path) as seen:
        loaded = seen.page.evaluate("performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")
        draw_all(seen.page)
        assert loaded < 5000 * slowness(seen.page)
        assert seen.errors == []
        slider = seen.page.locator("#eigenvalues-slider")
        assert slider.get_attribute("max") == "47"
        steps = """async () => {
            const s = document.getElementById('eigenvalues-slider');
            const began = performance.now();
            for (let k = 1; k <= 10; k++) { s.value = k; s.dispatchEvent(new Event('input')); }
            return (performance.now() - began) / 10;
        }"""
        spent = min(seen.page.evaluate(steps) / slowness(seen.page) for _ in range(3))
        assert spent < 300, "milliseconds per step of the slider, at its best and on an idle core"


def test_weights_only_targets_say_what_is_missing(tmp_path):
    from safetensors.torch import save_model

    model, _ = tiny_model("distilbert")
    save_model(model, str(tmp_path / "weights.safetensors"))
    done = oversmooth("report", tmp_path / "weights.safetensors", "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    with opened(tmp_path / "r.html") as seen:
        text = seen.page.locator("main").inner_text()
        assert "Missing here: measurement" in text
        assert "unverified" in seen.page.locator("header").inner_text()
        draw_all(seen.page)
        assert seen.errors == []


def test_comparison_is_drawn_and_quiet(analysis, tmp_path):
    path = tmp_path / "compare.html"
    write_page(compare_page([analysis, replace(analysis, command="again")]), path)
    with opened(path) as seen:
        draw_all(seen.page)
        assert seen.page.locator(".plot svg .trace").count() >= 6
        assert "changes about as much as" in seen.page.locator("h1").inner_text()
        assert seen.errors == []


def test_figures_for_papers_are_written_in_three_formats_and_are_reproducible(analysis, tmp_path):
    from oversmooth.output.figures import write_figures

    first, second = write_figures(analysis, tmp_path / "a"), write_figures(analysis, tmp_path / "b")
    assert {path.suffix for path in first} == {".pdf", ".png", ".svg"}
    assert {path.stem for path in first} == {"eigenvalues", "cosine", "hfc_lfc", "attribution"}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_the_analysis_round_trips(analysis):
    assert Analysis.from_dict(json.loads(analysis.to_json())) == analysis


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["compare", "one"], ("at least 2",)),
        (["report", "nowhere"], ("Nothing was found",)),
        (["report", "-o", "no/such/folder/r.html"], ("no folder",)),
        (["report", "absent.jsonl"], ("JSONL file written by the monitor",)),
        (["report", "one", "two", "--save", "both.json"], ("--save must be given with one model", "several models")),
        (["report", "one", "two", "--figures", "both"], ("--figures must be given with one model",)),
    ],
)
def test_bad_input_gives_a_message_and_exit_code_2(arguments, pieces):
    done = oversmooth(*arguments)
    assert done.returncode == 2
    for piece in pieces:
        assert piece in done.stderr
