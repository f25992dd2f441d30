"""Ten ordinary changes: the file that CONTRIBUTING names for each is there and holds what is to be changed."""

import re
from pathlib import Path

import pytest

from tests.unit.test_layers import LAYER, ROOT

REPOSITORY = Path(__file__).parents[2]
FILES = dict(re.findall(r"^\| (.+?) \| `([\w/.]+)` \|", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.MULTILINE))
HOLDS = {
    "a metric": "@metric(",
    "an intervention": "class AttnScale(",
    "a family of models": 'name="bert"',
    "a quantised format": "READERS",
    "a sentence in a headline": "def headline",
    "an option of `measure`": "def measure(",
    "the learning rate of CIFAR-100": "learning_rate",
    "a claim": "def ",
    "the GGUF header": "class GGUFStore",
    "what `predict` prints": "predict",
}
"""What somebody who makes the change looks for in the file."""
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()


def test_ten_changes_have_a_file_each():
    assert set(FILES) == set(HOLDS)


@pytest.mark.parametrize("change", HOLDS)
def test_the_file_of_a_change_holds_what_is_to_be_changed(change):
    assert HOLDS[change] in (ROOT / FILES[change]).read_text()


def test_every_package_has_its_sentence_in_the_docs():
    table = ARCHITECTURE.split("## The packages")[1].split("## Where")[0]
    described = {
        name.rstrip("/").removesuffix(".py") for name in re.findall(r"^\| `([\w/.]+)` \|", table, re.MULTILINE)
    }
    assert described == set(LAYER) - {"", "__main__"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", ARCHITECTURE))))
def test_a_test_that_the_docs_name_exists(path):
    assert (REPOSITORY / path).exists()


def named_modules() -> list[str]:
    """Modules and packages that the tables of the docs send a reader to."""
    places = re.findall(r"^\|[^|]*\|([^|]*)\|", ARCHITECTURE.split("## Where do I put")[1], re.MULTILINE)
    return sorted({name for cell in places for name in re.findall(r"`((?!tests)(?:\w+/)+(?:\w+\.py)?)`", cell)})


@pytest.mark.parametrize("name", named_modules())
def test_a_place_that_the_docs_name_exists(name):
    assert (ROOT / name.removeprefix("oversmooth/")).exists()


def test_the_search_for_places_finds_some():
    assert "measurement/metrics.py" in named_modules()
