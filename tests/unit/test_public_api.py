"""The public names and signatures are those of `public_api.txt`: a change is deliberate, and is documented."""

import re
from pathlib import Path

import pytest

import oversmooth
from tests.public_api import FILE, public_api, signature

DOCS = Path(__file__).parents[2] / "docs" / "api"
DOCUMENTED = re.findall(r"^::: oversmooth(?:\.\w+)*\.(\w+)$", "".join(p.read_text() for p in DOCS.glob("*.md")), re.M)


def test_public_names_and_signatures_are_the_frozen_ones():
    assert public_api() == FILE.read_text(), "if this is meant: make public-api, and a line in CHANGELOG.md"


def test_a_signature_that_changes_would_be_seen(monkeypatch):
    def inspect(target, *, more=3):
        """Another one."""

    monkeypatch.setattr(oversmooth, "inspect", inspect)
    assert signature("inspect") == "inspect(target, *, more=3)"
    assert public_api() != FILE.read_text()


@pytest.mark.parametrize("name", sorted(oversmooth.__all__))
def test_every_public_name_is_documented(name):
    assert name in DOCUMENTED


@pytest.mark.parametrize("name", sorted(oversmooth.__all__))
def test_every_public_name_says_what_it_is(name):
    assert len(getattr(oversmooth, name).__doc__.splitlines()[0]) > 20
