"""The headline of a comparison: how features change over depth in each model, and what the inputs were."""

from dataclasses import replace

import pytest

import oversmooth as osm
from oversmooth.output.compare_page import compare_page
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama")[0].save_pretrained(folder)
    return osm.analyze(folder, solve=0)


def with_curve(analysis, name, start, end, error=0.01, origin="given"):
    """The analysis under another name, its mean cosine going evenly from start to end."""
    measurement = analysis.measurement
    places = measurement.curve("cosine")
    last = max(place.depth for place in places)
    moved = {
        id(place): replace(place, mean=start + (end - start) * place.depth / last, standard_error=error)
        for place in places
    }
    values = tuple(moved.get(id(value), value) for value in measurement.values)
    measurement = replace(measurement, values=values, data=replace(measurement.data, origin=origin))
    provenance = replace(analysis.inspection.provenance, target=name)
    inspection = replace(analysis.inspection, provenance=provenance)
    return replace(analysis, inspection=inspection, measurement=measurement)


def verdict(*analyses):
    return compare_page(analyses).verdict


def test_the_change_over_depth_is_compared_not_the_ends(analysed):
    high, low = with_curve(analysed, "high", 0.93, 0.95), with_curve(analysed, "low", 0.1, 0.83)
    said = verdict(high, low)
    assert "by +0.02 in high (from 0.93 to 0.95) and by +0.73 in low (from 0.10 to 0.83)" in said
    assert said.endswith("low smooths more than high.")


@pytest.mark.parametrize(
    ("first", "second", "judged"),
    [
        ((0.1, 0.5), (0.1, 0.3), "b smooths less than a."),
        ((0.5, 0.4), (0.5, 0.2), "b sharpens more than a."),
        ((0.5, 0.2), (0.5, 0.4), "b sharpens less than a."),
        ((0.1, 0.5), (0.2, 0.61), "b changes about as much as a."),
    ],
)
def test_the_direction_of_each_change_is_named(analysed, first, second, judged):
    said = verdict(with_curve(analysed, "a", *first), with_curve(analysed, "b", *second))
    assert said.endswith(judged)


def test_one_sequence_gives_no_judgement(analysed):
    curves = [with_curve(analysed, name, 0.1, end, error=None) for name, end in (("a", 0.2), ("b", 0.9))]
    assert verdict(*curves).endswith("and by +0.80 in b (from 0.10 to 0.90).")


def test_random_inputs_are_named_in_the_headline_and_explained_below(analysed):
    assert analysed.measurement.data.origin == "random ids"
    drawn = [with_curve(analysed, name, 0.1, 0.2, origin="random ids") for name in ("a", "b")]
    page = compare_page(drawn)
    assert page.verdict.startswith("On random token ids: mean cosine")
    notes = [block.text for block in page.sections[0].blocks if getattr(block, "kind", "") == "note"]
    assert sum("drawn at random" in note for note in notes) == 2


def test_random_inputs_of_one_model_only_are_named_with_the_model(analysed):
    said = verdict(with_curve(analysed, "a", 0.1, 0.2), with_curve(analysed, "b", 0.1, 0.2, origin="random ids"))
    assert said.startswith("On random token ids for b only, so that the inputs differ: mean cosine")
