"""The same texts at several lengths: what is measured is what `measure` finds on the texts cut by hand."""

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import BadValue, NotSupported, WrongBatch
from oversmooth.output.charts import Line
from oversmooth.output.curve_pages import lengths_page
from oversmooth.output.render import render
from tests.contract.tiny_models import tiny_model

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(5, 40, (3, 12), generator=GENERATOR)
MASK = torch.ones_like(IDS)
MASK[1, 7:] = 0
BATCH = {"input_ids": IDS, "attention_mask": MASK}


@pytest.fixture(scope="module")
def curves():
    model, _ = tiny_model("bert")
    return osm.measure_lengths(model, [BATCH], lengths=(10, 4), predicts=True, solve=1)


def test_texts_that_are_long_enough_are_cut_and_others_left_out(curves):
    model, _ = tiny_model("bert")
    assert (curves.lengths, curves.texts, curves.left_out) == ((4, 10), 2, 1)
    for length in curves.lengths:
        by_hand = osm.measure(model, [{"input_ids": IDS[[0, 2], :length]}])
        for point in by_hand.curve("cosine"):
            (found,) = [
                value
                for value in curves.values
                if (value.metric, value.depth, value.length) == ("cosine", point.depth, length)
            ]
            assert found.mean == pytest.approx(point.mean, abs=1e-6)
        (change,) = [change.change for change in curves.changes if change.length == length]
        assert change == pytest.approx(by_hand.unit_attributions[0].total, abs=1e-5)
    assert osm.LengthCurves.from_dict(curves.to_dict()) == curves


def test_every_layer_is_predicted_at_every_length(curves):
    assert [(item.length, item.layer) for item in curves.predictions] == [(n, k) for n in (4, 10) for k in range(3)]
    assert {row["regime"] for row in curves.prediction_rows()} <= {"smoothing", "sharpening", "neutral", "undecided"}


def test_padding_in_front_is_taken_off():
    model, _ = tiny_model("bert")
    behind = {
        "input_ids": torch.nn.functional.pad(IDS, (3, 0)),
        "attention_mask": torch.nn.functional.pad(MASK, (3, 0)),
    }
    one, other = (osm.measure_lengths(model, [batch], lengths=(4, 6)) for batch in (BATCH, behind))
    assert [value.mean for value in one.values] == [value.mean for value in other.values]


def test_the_page_shows_curves_over_depth_and_over_length(curves):
    page = lengths_page(curves)
    charts = [chart for pair in page.sections[0].blocks for chart in pair.charts]
    lines = [[mark for panel in chart.panels for mark in panel.marks if isinstance(mark, Line)] for chart in charts]
    assert [len(found) for found in lines] == [2, 1, 2, 1]
    assert page.verdict == curves.verdict
    assert "exponents-over-length" in render(page)


def test_max_samples_counts_texts_that_are_used():
    model, _ = tiny_model("bert")
    assert osm.measure_lengths(model, [BATCH], lengths=(4, 10), max_samples=1).texts == 1


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        ((8,), BadValue, "at least two different ones"),
        ((8, 8), BadValue, "at least two different ones"),
        ((1, 8), BadValue, "at least 2 tokens each"),
        ((8, 400), WrongBatch, "3 shorter ones, the longest of 12"),
    ],
)
def test_lengths_that_cannot_be_compared_are_refused(lengths, error, words):
    model, _ = tiny_model("bert")
    with pytest.raises(error, match=words):
        osm.measure_lengths(model, [BATCH], lengths=lengths)


def test_pictures_have_no_length():
    model, inputs = tiny_model("vit")
    with pytest.raises(NotSupported, match="only texts have a length"):
        osm.measure_lengths(model, [inputs], lengths=(4, 8))
