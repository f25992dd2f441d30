"""Headlines that pointed away from their own numbers, each beside what is right; those of answers are in `results/`."""

import re

import pytest
import torch

import oversmooth as osm
from oversmooth.output.card import chart_of
from oversmooth.output.page import page_of
from oversmooth.output.render import markdown_of
from oversmooth.output.sections import growth_charts
from tests.answers import answer_of, deep, minilm
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysed():
    """A model whose norms follow the sum, where the plain map and the whole layer may disagree."""
    model, _ = tiny_model("bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.output.LayerNorm.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 90, (5, 9), generator=torch.Generator().manual_seed(0))
    return osm.analyze(model, [{"input_ids": ids}])


def test_a_healthy_curve_and_a_collapsed_one_stand_on_the_same_axis():
    """0.07 to 0.33 and 0.01 to 0.97 opened with the same words over axes of their own."""
    for answer in (minilm(), deep(80)):
        axis = chart_of(answer).panels[0].y
        assert axis.high == 1.0
        assert axis.low <= 0.0
        assert {label for _, label in axis.ticks} >= {"0", "0.5", "0.9", "1"}
    assert minilm().headline != deep(80).headline


def test_the_chart_of_growth_and_the_verdict_below_it_count_the_same_layers(analysed):
    """6 of 6 layers would smooth, and far below: 4 of 6 would sharpen with the norm behind them."""
    prediction = analysed.prediction
    (chart,) = growth_charts(analysed.inspection, prediction)
    line = next(mark for mark in chart.panels[0].marks if mark.name == "ρ_dc")
    assert line.y == tuple(layer.whole.rho_dc for layer in prediction.layers)
    verdict = next(item.text for item in prediction.verdict if "with their norms" in item.text)
    wholes = [layer.whole.regime for layer in prediction.layers]
    for word, said in (("smoothing", "would smooth"), ("sharpening", "would sharpen")):
        count = wholes.count(word)
        assert (f"{count} {said}" in chart.caption) == bool(count)
        assert (f"{count} {said}" in verdict) == bool(count)


def test_layers_are_counted_from_zero_and_the_old_words_are_gone(analysed):
    """Two numberings, layers from 0 and depth from 1, stood on one screen."""
    text = markdown_of(page_of(analysed))
    assert (
        re.search(r"smoother with depth|no clear change with depth|does little|tendency", text, re.IGNORECASE) is None
    )
    chart = chart_of(analysed.answer)
    assert [label for _, label in chart.x.ticks][:3] == ["input", "0", "1"]


def test_changes_that_round_to_zero_have_no_sign():
    parts = {"attention": 0.0004, "feed-forward": -0.0004}
    columns = chart_of(answer_of((0.3, 0.3, 0.3), parts)).panels[1].marks[0]
    assert [value for *_, value in columns.parts] == ["0.00", "0.00"]
    assert columns.total == "0.00"
