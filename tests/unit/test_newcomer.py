"""From the tree alone a newcomer finds where something new goes: the answers of CONTRIBUTING and the rooms of the docs."""

import re
from pathlib import Path

import pytest

from tests.unit.test_layers import LAYER, ROOT

REPOSITORY = Path(__file__).parents[2]
ANSWERS = dict(
    re.findall(r"^\| (an? [\w ]+) \| `(src/[\w/]+/)` \|", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.MULTILINE)
)
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()
SEVEN = ("metric", "family of models", "intervention", "recipe", "report section", "file format", "command")


def test_the_seven_questions_of_a_newcomer_are_answered():
    assert [re.sub("^an? ", "", question) for question in ANSWERS] == list(SEVEN)


@pytest.mark.parametrize("folder", ANSWERS.values())
def test_the_folder_of_an_answer_exists(folder):
    assert list((REPOSITORY / folder).glob("*.py")) != []


def test_every_room_has_its_sentence_in_the_docs():
    table = ARCHITECTURE.split("## The rooms")[1].split("## Where")[0]
    described = {
        name.rstrip("/").removesuffix(".py") for name in re.findall(r"^\| `([\w/.]+)` \|", table, re.MULTILINE)
    }
    assert described == set(LAYER) - {"", "__main__"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", ARCHITECTURE))))
def test_a_test_that_the_docs_name_exists(path):
    assert (REPOSITORY / path).exists()


def named_modules() -> list[str]:
    """Modules and folders of the package that the tables of the docs send a reader to."""
    places = re.findall(r"^\|[^|]*\|([^|]*)\|", ARCHITECTURE.split("## Where do I put")[1], re.MULTILINE)
    return sorted({name for cell in places for name in re.findall(r"`((?!tests)(?:\w+/)+(?:\w+\.py)?)`", cell)})


@pytest.mark.parametrize("name", named_modules())
def test_a_place_that_the_docs_name_exists(name):
    assert (ROOT / name.removeprefix("oversmooth/")).exists()


def test_the_search_for_places_finds_some():
    assert "measurement/metrics.py" in named_modules()
