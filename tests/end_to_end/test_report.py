"""The page in a real browser: drawn, quiet, usable, safe."""

import html
import json
import re
from dataclasses import replace

import pytest

import oversmooth as osm
from oversmooth.commands.report import saved_analysis
from oversmooth.errors import BrokenFile
from oversmooth.models.example_model import SHIPPED
from oversmooth.output.compare_page import compare_page
from oversmooth.output.figures import write_figures
from oversmooth.output.page import page_of
from oversmooth.output.render import write_page
from oversmooth.results import Analysis
from tests.browser import opened
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model
from tests.real_models import minilm

HOSTILE = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def analysis():
    return osm.analyze(minilm(), max_samples=6, command="oversmooth report")


@pytest.fixture(scope="module")
def page_file(analysis, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    analysis.save_html(path)
    return path


OPEN_ALL = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
SIDEWAYS = "document.documentElement.scrollWidth - window.innerWidth"
SHOWN = """[...document.querySelectorAll('.drawn, .gauge')].map(
    drawn => [...drawn.querySelectorAll('svg.chart')].filter(svg => svg.getClientRects().length).length)"""
"""Of every chart, how many of its widths are shown."""
CUT = """[...document.querySelectorAll('svg.chart')].filter(svg => svg.getClientRects().length).flatMap(svg => {
    const all = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        return box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1;
    }).map(text => text.textContent);
})"""
"""Texts that stick out of their picture, as the browser draws them."""
MOST_BYTES = 400_000


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
    [(False, 320), (True, 1440), pytest.param(False, 800, marks=SLOW), pytest.param(True, 400, marks=SLOW)],
)
def test_every_chart_is_shown_at_one_width_without_errors_or_requests(page_file, width, dark):
    with opened(page_file, width=width, dark=dark) as seen:
        seen.page.evaluate(OPEN_ALL)
        shown = seen.page.evaluate(SHOWN)
        assert len(shown) >= 8
        assert set(shown) == {1}
        assert seen.page.evaluate(CUT) == []
        assert seen.page.evaluate(SIDEWAYS) <= 0, "nothing sticks out sideways"
        assert seen.errors == []
        assert seen.requests == [page_file.absolute().as_uri()]


def test_the_answer_is_on_the_first_screen(page_file, analysis):
    with opened(page_file, width=1440) as seen:
        assert seen.page.locator("h1").inner_text().replace("\n", " ") == analysis.answer.headline
        for selector in (".eyebrow", ".deck", ".gauge", ".told", ".command", "#depth"):
            box = seen.page.locator(selector).first.bounding_box()
            assert box["y"] + min(box["height"], 300) < 900, selector
        assert seen.page.locator("details[open]").count() == 0
        assert [part.inner_text() for part in seen.page.locator("summary b").all()] == ["Why", "Heads", "All numbers"]


def test_everything_can_be_read_without_script(page_file):
    text = re.sub(r"<script>.*?</script>", "", page_file.read_text(), flags=re.DOTALL)
    for found in (
        "mean of all pairs",
        "What each part adds",
        "Spectra per layer",
        "Provenance",
        "<title>layer 3: mean cosine",
    ):
        assert found in text


def test_what_is_pointed_at_is_said_by_keyboard_and_by_pointer(page_file):
    with opened(page_file) as seen:
        chart = seen.page.locator("#depth svg.chart.wide")
        chart.focus()
        for _ in range(2):
            seen.page.keyboard.press("ArrowRight")
        assert seen.page.locator("#tip").inner_text().startswith("layer 0: mean cosine")
        seen.page.keyboard.press("Escape")
        assert seen.page.locator("#tip").is_hidden()
        seen.page.evaluate(OPEN_ALL)
        heat = seen.page.locator("#head-map svg.chart.wide")
        heat.scroll_into_view_if_needed()
        box = heat.bounding_box()
        seen.page.mouse.move(box["x"] + 90, box["y"] + box["height"] / 2)
        assert "head 0:" in seen.page.locator("#tip").inner_text()


def test_commands_are_copied_with_a_button(page_file):
    with opened(page_file) as seen:
        button = seen.page.locator("[data-copy]").first
        button.click()
        until(seen.page, "document.querySelector('[data-copy]').textContent === 'Copied'")


def test_tables_sort_by_number_both_ways(page_file):
    with opened(page_file) as seen:
        seen.page.evaluate(OPEN_ALL)
        names = seen.page.locator("#layers th button").all_inner_texts()
        head = seen.page.locator("#layers th button", has_text="rho dc").first
        column = names.index("rho dc")
        cells = f"[...document.querySelectorAll('#layers tbody tr')].map(r => Number(r.cells[{column}].textContent))"
        head.click()
        until(seen.page, "document.querySelector('#layers th[aria-sort=ascending]') !== null")
        rising = seen.page.evaluate(cells)
        head.click()
        until(seen.page, "document.querySelector('#layers th[aria-sort=descending]') !== null")
        falling = seen.page.evaluate(cells)
        assert rising == sorted(rising)
        assert falling == sorted(rising, reverse=True)


def test_tables_charts_and_the_card_can_be_saved(page_file):
    with opened(page_file) as seen:
        seen.page.evaluate(OPEN_ALL)
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-csv='layers']").click()
        text = download.value.path().read_text()
        assert text.count("\n") == 7
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-save='svg'][data-of='depth']").click()
        assert "<svg" in download.value.path().read_text()[:200]
        with seen.page.expect_download() as download:
            seen.page.locator("button[data-save='png'][data-of='depth']").click()
        assert download.value.path().read_bytes()[:4] == b"\x89PNG"
        with seen.page.expect_download() as download:
            seen.page.locator("#card").click()
        image = download.value.path().read_bytes()
        assert image[:4] == b"\x89PNG"
        assert int.from_bytes(image[16:20], "big") == 2400, "twice 1200 pixels"
        assert seen.errors == []


def test_the_theme_can_be_switched(page_file):
    with opened(page_file) as seen:
        colour = "getComputedStyle(document.body).backgroundColor"
        light = seen.page.evaluate(colour)
        seen.page.locator("#theme").click()
        assert seen.page.evaluate(colour) != light


def test_every_chart_has_words_for_those_who_cannot_see_it(page_file):
    with opened(page_file) as seen:
        for chart in seen.page.locator("svg.chart.wide").all():
            assert len(chart.get_attribute("aria-label")) > 20
            assert chart.get_attribute("role") == "img"


def hostile(analysis):
    """The same analysis with markup in every name that comes from a file."""
    inspection, measurement = analysis.inspection, analysis.measurement
    provenance = replace(inspection.provenance, target=HOSTILE, model_type=HOSTILE)
    layers = tuple(replace(layer, stack=HOSTILE) for layer in inspection.layers)

    def renamed(attributions):
        parts = [tuple(replace(part, stack=HOSTILE) for part in item.parts) for item in attributions]
        return tuple(replace(item, stack=HOSTILE, parts=p) for item, p in zip(attributions, parts, strict=True))

    measurement = replace(
        measurement,
        provenance=provenance,
        values=tuple(replace(value, stack=HOSTILE) for value in measurement.values),
        attributions=renamed(measurement.attributions),
        unit_attributions=renamed(measurement.unit_attributions),
        heads=tuple(replace(head, stack=HOSTILE) for head in measurement.heads),
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
        seen.page.evaluate(OPEN_ALL)
        assert alerts == []
        assert seen.page.locator("img[src='x']").count() == 0
        assert seen.errors == []
        assert seen.requests == [path.absolute().as_uri()]
        assert HOSTILE in seen.page.locator("#provenance-facts").inner_text()


def test_the_file_is_small_enough(page_file):
    assert page_file.stat().st_size <= MOST_BYTES


def test_paths_stand_in_the_provenance_and_in_commands_only(page_file, analysis):
    target = analysis.inspection.provenance.target
    assert target.startswith("/")
    with opened(page_file) as seen:
        seen.page.evaluate(OPEN_ALL)
        seen.page.evaluate("document.querySelectorAll('#provenance-facts, code').forEach(part => part.remove())")
        assert target not in seen.page.locator("body").inner_text()


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


def test_a_saved_analysis_whose_numbers_contradict_each_other_is_refused(analysis, tmp_path, monkeypatch):
    saved = tmp_path / "odd.json"
    saved.write_text(json.dumps({**analysis.to_dict(), "verification": None}))
    assert saved_analysis(saved).verification is None
    monkeypatch.setattr("oversmooth.output.page.page_of", lambda found: found.inspection.layers[99])
    with pytest.raises(BrokenFile, match="do not fit together"):
        saved_analysis(saved)


def test_a_verification_of_no_layer_is_refused(analysis, tmp_path):
    content = analysis.to_dict()
    content["verification"]["layers"] = []
    saved = tmp_path / "odd.json"
    saved.write_text(json.dumps(content))
    done = oversmooth("report", saved, "-o", tmp_path / "x.html")
    assert done.returncode == 2
    assert "do not fit together" in done.stderr
    assert not (tmp_path / "x.html").exists()


def deep(analysis, layers=48, heads=32):
    """An analysis of a much larger model, made from a real one."""
    inspection, measurement, prediction = analysis.inspection, analysis.measurement, analysis.prediction
    first = inspection.layers[0]
    many_heads = tuple(replace(first.heads[k % len(first.heads)], head=k) for k in range(heads))
    rows = tuple(
        replace(inspection.layers[k % len(inspection.layers)], layer=k, passes=(k,), heads=many_heads)
        for k in range(layers)
    )
    predicted = tuple(
        replace(prediction.layers[k % len(prediction.layers)], layer=k, depth=k + 1) for k in range(layers)
    )
    measurement = replace(
        measurement,
        values=_deeper(measurement.values, layers),
        heads=tuple(replace(head, head=k) for head in _deeper(measurement.heads, layers) for k in (head.head,)),
        pairs=_deeper(measurement.pairs, layers),
        **{
            name: tuple(replace(item, parts=_deeper(item.parts, layers)) for item in getattr(measurement, name))
            for name in ("attributions", "unit_attributions", "raw_attributions")
        },
    )
    return replace(
        analysis,
        inspection=replace(inspection, layers=rows),
        measurement=measurement,
        prediction=replace(prediction, layers=predicted),
    )


def _deeper(items, layers):
    """The same items at more depths: those of the layers in turn; the input and the final norm as they are."""

    def is_norm(item):
        return getattr(item, "place", "") == "final_norm" or getattr(item, "is_final_norm", False)

    last = max((item.depth for item in items), default=0)
    found = [item for item in items if item.depth == 0]
    for depth in range(1, layers + 1):
        same = [item for item in items if not is_norm(item) and item.depth == 1 + (depth - 1) % last]
        found += [replace(item, depth=depth) for item in same]
    return (*found, *(replace(item, depth=layers) for item in items if is_norm(item)))


def test_a_model_of_eighty_layers_makes_a_page_of_four_hundred_kilobytes_with_every_chart(analysis, tmp_path):
    path = tmp_path / "deep.html"
    page = page_of(deep(analysis, 80, 12))
    write_page(page, path)
    assert path.stat().st_size <= MOST_BYTES
    text = path.read_text()
    for figure in (page.card.chart, *page.figures):
        assert f'aria-label="{html.escape(figure.alt, quote=True)}"' in text.split("<script")[0], "there without script"


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads"), [(48, 32), (100, 16)])
def test_deep_models_open_and_stay_small(analysis, layers, heads, tmp_path):
    path = tmp_path / "deep.html"
    write_page(page_of(deep(analysis, layers, heads)), path)
    assert path.stat().st_size <= MOST_BYTES * 2.5, "of every table a row per layer, and of the charts three widths"
    with opened(path) as seen:
        seen.page.evaluate(OPEN_ALL)
        assert seen.page.evaluate(CUT) == []
        assert seen.page.evaluate(SIDEWAYS) <= 0
        assert seen.errors == []


def test_the_model_that_comes_with_the_package_is_a_model_although_it_has_a_manifest(tmp_path):
    for target in ("digits-vit", SHIPPED):
        done = oversmooth("report", target, "--max-samples", 4, "-o", tmp_path / "page.html")
        assert done.returncode == 0, done.stderr
        assert "digits-vit" in (tmp_path / "page.html").read_text(encoding="utf-8")


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
        assert "weights alone do not say" in seen.page.locator("h1").inner_text()
        assert seen.errors == []


def test_comparison_is_drawn_and_quiet(analysis, tmp_path):
    path = tmp_path / "compare.html"
    write_page(compare_page([analysis, replace(analysis, command="again")]), path)
    with opened(path) as seen:
        assert set(seen.page.evaluate(SHOWN)) <= {0, 1}
        assert "No difference between all-MiniLM-L6-v2 (1) and" in seen.page.locator("h1").inner_text()
        assert seen.page.locator(".gauges .gauge").count() == 2
        assert seen.errors == []


def test_figures_for_papers_are_written_in_two_formats_and_are_reproducible(analysis, tmp_path):
    pytest.importorskip("resvg_py")
    first, second = write_figures(analysis, tmp_path / "a"), write_figures(analysis, tmp_path / "b")
    assert {path.suffix for path in first} == {".png", ".svg"}
    assert {path.stem for path in first} >= {"card", "depth", "growth", "ladder", "head-map"}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_results_plot_themselves_for_notebooks_and_files(analysis, tmp_path):
    for drawing in (analysis.plot(), analysis.measurement.plot(), analysis.measurement.plot("hfc_lfc")):
        assert drawing._repr_html_().startswith("<svg")
        drawing.save(tmp_path / "chart.svg")
        assert (tmp_path / "chart.svg").read_text() == drawing.svg()


def test_the_card_is_written_as_a_picture(analysis, tmp_path):
    saved = tmp_path / "a.json"
    saved.write_text(analysis.to_json())
    done = oversmooth("report", saved, "--figures", tmp_path / "figures", "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert 'width="1200" height="630"' in (tmp_path / "figures" / "card.svg").read_text()


def test_the_analysis_round_trips(analysis):
    assert Analysis.from_dict(json.loads(analysis.to_json())) == analysis


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["compare", "one"], ("at least 2",)),
        (["report", "nowhere"], ("Nothing was found",)),
        (["report", "-o", "no/such/folder/r.html"], ("no folder",)),
        (["report", "absent.jsonl"], ("JSONL file written by the monitor",)),
        (["report", "one", "two", "-o", "both.json"], ("FILE.json must be given with one model", "several models")),
        (["report", "one", "two", "--figures", "both"], ("--figures must be given with one model",)),
    ],
)
def test_bad_input_gives_a_message_and_exit_code_2(arguments, pieces):
    done = oversmooth(*arguments)
    assert done.returncode == 2
    for piece in pieces:
        assert piece in done.stderr
