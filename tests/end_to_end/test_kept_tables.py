"""Kept tables of training runs: every word and verdict on their pages follows again from the kept rows."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def script(monkeypatch):
    """A script of benchmarks/ as a module, by name."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module


def kept(name: str) -> tuple[dict, str]:
    return json.loads((RESULTS / f"{name}.json").read_text()), (RESULTS / f"{name}.md").read_text()


def test_the_table_of_cifar10_follows_from_its_runs(script):
    table, (found, page) = script("cifar10_table"), kept("cifar10")
    comparisons = script("training_tables").compared(found["rows"], table.METRICS, table.ACCURACY)
    tried = {(row["variant"], row["rate"]): row["validation_accuracy"] for row in found["rates"]}
    assert found["comparisons"] == comparisons
    assert page == table.page(found["rows"], table._best(tried), comparisons)


def test_the_table_of_superglue_follows_from_its_runs(script):
    table, (found, page) = script("superglue_table"), kept("superglue")
    comparisons = table.compared(found["rows"])
    assert found["comparisons"] == comparisons
    assert page == table.page(found["rows"], comparisons, found["examples"])


def test_the_table_of_digits_follows_from_its_runs(script):
    table, (found, page) = script("digits_table"), kept("digits")
    assert page == table.page(found["rows"])


def test_the_readme_tells_where_cosines_of_digits_end(script):
    tables, (found, _) = script("training_tables"), kept("digits")
    ends = [tables.mean(found["rows"], variant, "last_cosine") for variant in ("smooth", "sharpen", "vanilla")]
    words = " ".join((ROOT / "README.md").read_text().split())
    told = re.search(
        r"between tokens of ([\d.-]+) when smoothed, ([\d.-]+) when sharpened and ([\d.-]+) without", words
    )
    assert told is not None
    assert [f"{end:.2f}" for end in ends] == list(told.groups())


def test_the_table_of_the_measured_scale_follows_from_its_runs(script):
    table, (found, page) = script("measured_scale_table"), kept("measured_scale")
    assert page == table.page(found["rows"])
    control = (ROOT / "docs" / "control.md").read_text()
    assert table.summary(found["rows"]) in control, "run python benchmarks/measured_scale_table.py --summary"
