"""The atlas in a real browser, with one model and with thousands: it opens, filters, and no name becomes markup."""

import random
import re

import pytest

import oversmooth as osm
from oversmooth.output.atlas import GRID, AtlasModel, render_atlas
from tests.browser import opened
from tests.command_line import oversmooth
from tests.small_checkpoints import FAMILIES, checkpoint

HOSTILE = (
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    "{{ 7 * 7 }} & \"quotes\" 'and' <b>bold</b>",
    "<a href='javascript:document.title=1'>owner/name</a>",
)


def models(count):
    """Models of a dozen families; some refused, some with names that would like to be code."""
    draw = random.Random(0)
    families = [*FAMILIES, "t5", HOSTILE[1]]
    for number in range(count):
        name = HOSTILE[number // 100 % len(HOSTILE)] if number % 100 == 1 else f"owner-{number % 97}/model-{number}"
        is_read = number % 20 != 3
        layers = draw.choice((12, 24, 32))
        known = {"target": name, "status": "read" if is_read else "refused", "reason": None if is_read else HOSTILE[0]}
        if not is_read:
            nothing = ("family", "d_model", "n_layers", "block_parameters", "mean_excess", "mean_excess_spread")
            more = ("above_chance_share", "mean_positivity", "norm_negative_share", "year")
            yield AtlasModel(**known, **dict.fromkeys((*nothing, *more)))
            continue
        family = draw.randrange(len(families))
        excess = tuple(0.1 * family - 0.4 + draw.gauss(0, 0.1) for _ in range(GRID))
        yield AtlasModel(
            **known,
            family=families[family],
            year=draw.choice((2019, 2022, 2025, None)),
            d_model=768,
            n_layers=layers,
            block_parameters=12 * layers * draw.choice((256, 768, 4096)) ** 2,
            mean_excess=sum(excess) / GRID,
            mean_excess_spread=0.02,
            above_chance_share=sum(value > 0.06 for value in excess) / GRID,
            mean_positivity=draw.gauss(0, 0.1),
            norm_negative_share=draw.choice((0.0, 0.02)),
            excess=excess,
        )


@pytest.fixture(scope="module")
def five_thousand(tmp_path_factory):
    page = tmp_path_factory.mktemp("atlas") / "atlas.html"
    page.write_text(render_atlas(list(models(5000)), folder=HOSTILE[2], versions="0"), encoding="utf-8")
    return page


def test_five_thousand_models_open_filter_and_stay_text(five_thousand):
    with opened(five_thousand) as seen:
        page = seen.page
        page.wait_for_selector("html[data-ready=yes]")
        assert page.text_content("#count") == "5000 of 5000 models"
        assert page.locator("#depth path.median").count() >= 8
        page.select_option("#family", "bert")
        few = int(page.text_content("#count").split()[0])
        assert 0 < few < 5000
        assert set(page.locator("#models tbody td:nth-child(2)").all_text_contents()) == {"bert"}
        page.select_option("#by", "year")
        assert "2019" in page.text_content("#groups")
        page.click("#reset")
        page.fill("#search", "onerror")
        page.locator("#count", has_text=re.compile("^10 of")).wait_for()
        assert page.locator("#models tbody tr").count() == 10
        assert page.locator("#models tbody td.name").first.text_content() == HOSTILE[1]
        page.fill("#search", "nothing is called so")
        page.wait_for_selector("#ranks .nothing")
        page.click("#reset")
        page.locator("#count", has_text=re.compile("^5000 of")).wait_for()
        page.click("#after")
        assert page.text_content("#page") == "page 2 of 50"
        assert page.locator("main img, main a, main b, main script").count() == 0
        assert page.title().startswith("oversmooth atlas")
        assert seen.errors == []
        assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_one_model_makes_a_page_from_the_command_line(tmp_path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    for file, content in checkpoint("gpt2", 0).items():
        (tmp_path / "models" / "a" / file).write_bytes(content)
    osm.survey(tmp_path / "models", tmp_path / "survey")
    done = oversmooth("report", tmp_path / "survey", "-o", tmp_path / "atlas.html")
    assert done.returncode == 0, done.stderr
    with opened(tmp_path / "atlas.html") as seen:
        seen.page.wait_for_selector("html[data-ready=yes]")
        assert seen.page.text_content("#count") == "1 of 1 model"
        assert seen.page.text_content("#models tbody td:nth-child(2)") == "gpt2"
        assert seen.page.locator("#ranks path.dots").count() == 1
        assert seen.page.text_content("#share tbody td:nth-child(4)") == "0%"
        assert seen.errors == []


def test_a_dot_says_which_model_it_is(five_thousand):
    with opened(five_thousand) as seen:
        seen.page.wait_for_selector("html[data-ready=yes]")
        seen.page.locator("#ranks").focus()
        seen.page.keyboard.press("ArrowRight")
        first = seen.page.locator("#tip").inner_text().splitlines()[0]
        assert first == seen.page.locator("#models tbody td.name").first.inner_text(), "both are sorted by mean excess"
        box = seen.page.locator("#ranks svg").bounding_box()
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert "mean excess" in seen.page.locator("#tip").inner_text()


def test_on_a_phone_nothing_sticks_out(five_thousand):
    with opened(five_thousand, width=360) as seen:
        seen.page.wait_for_selector("html[data-ready=yes]")
        assert seen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert seen.errors == []


def test_five_thousand_models_are_a_small_file_that_answers_its_title_without_script(five_thousand):
    assert five_thousand.stat().st_size <= 1_500_000
    text = five_thousand.read_text()
    assert re.search(r"<h1>The weights of [0-9,]+ of 4,750 models strengthen what tokens share more than chance", text)
    assert text.count('<td class="name">') == 100


def test_a_folder_without_a_survey_is_refused(tmp_path):
    done = oversmooth("report", tmp_path, "-o", tmp_path / "atlas.html")
    assert done.returncode == 2
    assert not (tmp_path / "atlas.html").exists()


def test_a_survey_of_refused_models_is_a_page_too(tmp_path):
    page = render_atlas([model for model in models(40) if model.status == "refused"], folder="x", versions="0")
    assert "None of 2 models could be read." in page
