"""Kept tables of training runs: every word and verdict on their pages follows again from the kept rows."""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from statistics import mean

import pytest

from oversmooth.claims.claim import LEVEL, share_left_open
from oversmooth.claims.experiments import DEEP, MINI_BERT
from oversmooth.claims.pretrained import MOST_OTHERS
from oversmooth.claims.reproduce import FAMILY

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
    assert page == table.page(found["rows"], comparisons, found)


def test_the_table_of_digits_follows_from_its_runs(script):
    table, (found, page) = script("digits_table"), kept("digits")
    assert page == table.page(found["rows"])


def test_variants_are_paired_by_seed(script):
    rows = [
        {"variant": variant, "seed": seed, "loss": value}
        for variant, values in {"sharpen": [None, 2.0, 3.5], "vanilla": [1.0, 1.9, 3.0, None]}.items()
        for seed, value in enumerate(values)
    ]
    effect = script("training_tables").effect_of(rows, "loss", "sharpen", "vanilla")
    assert effect.units == 2
    assert effect.mean == pytest.approx((0.1 + 0.5) / 2)


def test_the_readme_tells_where_cosines_of_digits_end():
    runs = json.loads((RESULTS / "claims" / "claims.json").read_text())["parametrization"]["observed"]["runs"]
    ends = [
        mean(row["last_cosine"] for row in runs if (row["setting"], row["variant"]) == (DEEP.name, variant))
        for variant in ("smooth", "free", "vanilla", "sharpen")
    ]
    words = " ".join((ROOT / "README.md").read_text().split())
    number = r"(-?\d\.\d\d)"
    told = re.search(
        rf"between tokens of {number} when smoothed, {number} with free signs in the same form, {number} without the form "
        rf"and {number} when sharpened",
        words,
    )
    assert told is not None
    assert [round(end, 2) for end in ends] == [float(number) for number in told.groups()]


def test_the_table_of_mini_bert_follows_from_its_runs(script):
    table, (found, page) = script("mini_bert_table"), kept("mini_bert")
    comparisons = script("training_tables").compared(found["rows"], ("loss",), table.NATS)
    assert found["comparisons"] == comparisons
    assert page == table.page(found["rows"], comparisons, table.should_be(found["rows"]))


def test_the_table_of_the_measured_scale_follows_from_its_runs(script):
    table, (found, page) = script("measured_scale_table"), kept("measured_scale")
    assert page == table.page(found["rows"])
    control = (ROOT / "docs" / "control.md").read_text()
    assert table.summary(found["rows"]) in control, "run python benchmarks/measured_scale_table.py --summary"


def test_the_docs_tell_how_many_layers_smooth_in_the_sharpened_models_of_claim_5():
    runs = json.loads((RESULTS / "claims" / "claims.json").read_text())["parametrization"]["observed"]["runs"]
    words = " ".join((ROOT / "docs" / "control.md").read_text().split())
    told = re.search(
        r"(\d+) of 60 layers smooths in plain sharpened models \((-\d\.\d+)\) and (\d+) of 60 at the measured scale "
        r"\(at worst (-\d\.\d+)\); in sharpened mini-berts (\d+) of 40 do \(at worst (-\d\.\d+)\)",
        words,
    )
    assert told is not None
    for (setting, variant), count, worst in zip(
        ((DEEP.name, "sharpen"), (DEEP.name, "sharpen-measured"), (MINI_BERT[-1].name, "sharpen")),
        told.groups()[::2],
        told.groups()[1::2],
        strict=True,
    ):
        rows = [row for row in runs if (row["setting"], row["variant"]) == (setting, variant)]
        assert sum(row["smoothing_layers"] for row in rows) == float(count)
        assert round(min(row["worst_layer"] for row in rows), 3) == float(worst)


def test_the_docs_tell_which_claims_were_out_of_reach():
    claims = json.loads((RESULTS / "claims" / "claims.json").read_text())
    words = " ".join((ROOT / "docs" / "reproducibility.md").read_text().split())
    assert "With the six pretrained models at hand, claim 1 could not have been refuted and claim 2 could not" in words
    models = {row["model"] for row in claims["similarity"]["observed"]["inputs"]}
    assert len(models) == 6
    assert share_left_open(len(models)) > MOST_OTHERS, "too few to refute claim 1"
    assert 2.0 ** -len(models) > LEVEL / FAMILY, "too few to decide claim 2"


@pytest.mark.parametrize("file", ["README.md", "docs/reproducibility.md"])
def test_the_minutes_of_a_reproduction_are_those_of_the_kept_one(file):
    line = next(line for line in (ROOT / file).read_text().splitlines() if line.startswith("oversmooth reproduce all "))
    seconds = json.loads((RESULTS / "claims" / "manifest.json").read_text())["seconds"]
    told = re.search(r"(\d+) minutes", line)
    assert told is not None
    assert int(told[1]) == math.ceil(seconds / 60)
