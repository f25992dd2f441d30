"""Loss and features over the strength of an edit are those of the checkpoints that `edit` writes."""

import pytest
import torch

import oversmooth as osm
from oversmooth.control.edit import Change
from oversmooth.control.projection import EigenvalueForm
from oversmooth.errors import BadValue, MissingValue
from oversmooth.output.charts import Line
from oversmooth.results import EditPoint, Loss
from oversmooth.worth.edit_curve import _judged
from tests.unit.worth.test_task_loss import FEW, causal

SHARPEN = Change(form=EigenvalueForm(low=-1.0, high=0.0))


def point(strength, increase, cosine):
    loss = Loss(loss=2.0 + increase, standard_error=0.1)
    return EditPoint(strength=strength, loss=loss, increase=increase, moved=strength, cosine=cosine, change=0.0)


@pytest.fixture(scope="module")
def curve():
    model = causal()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = osm.edit_curve(model, FEW, interval=(-1.0, 0.0), layers="1", strengths=(1.0, 0.5))
    torch.testing.assert_close(dict(model.state_dict()), before)  # it is as it was
    return found


def test_the_loss_at_a_strength_is_that_of_the_checkpoint_that_edit_writes(curve, tmp_path):
    causal().save_pretrained(tmp_path / "whole")
    assert [each.strength for each in curve.points] == [0.0, 0.5, 1.0]
    for each in curve.points[1:]:
        out = tmp_path / f"{each.strength}"
        done = osm.edit(tmp_path / "whole", out, interval=(-1.0, 0.0), layers="1", strength=each.strength)
        assert osm.task_loss(out, FEW).found.loss == pytest.approx(each.loss.loss, rel=1e-5)
        assert osm.measure(out, FEW).curve("cosine")[-1].mean == pytest.approx(each.cosine, abs=1e-5)
        assert done.layers[0].moved == pytest.approx(each.moved, rel=1e-4)


def test_strength_zero_is_the_model_as_it_is(curve):
    first = curve.points[0]
    assert (first.increase, first.moved) == (0.0, 0.0)
    assert first.loss.loss == pytest.approx(osm.task_loss(causal(), FEW).found.loss)
    assert osm.EditCurve.from_dict(curve.to_dict()) == curve


@pytest.mark.parametrize(
    ("points", "best", "words"),
    [
        ([(0.5, 0.3, 0.2), (1.0, 0.9, 0.1)], None, "already at strength 0.5 the loss grows by 0.3"),
        ([(0.5, 0.05, 0.3), (1.0, 0.9, 0.1)], 0.5, "from 0.500 to 0.300, and the loss grows by 0.05"),
        ([(0.5, 0.0, 0.499), (1.0, 0.01, 0.498)], None, "moves by -0.002 only"),
        ([(0.5, 0.05, 0.7)], None, "moves the wrong way, by [+]0.200"),
        ([(1.0, -0.05, 0.3)], 1.0, "the loss falls by 0.05"),
    ],
)
def test_an_edit_is_worth_it_where_features_move_as_meant_at_a_small_price(points, best, words):
    import re

    found, verdict = _judged([point(0.0, 0.0, 0.5), *(point(*each) for each in points)], SHARPEN, 0.1)
    assert found == best
    assert re.search(words, verdict)
    assert verdict.startswith("Not worth it") == (best is None)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, MissingValue, "interval"),
        ({"interval": (-1.0, 0.0), "strengths": ()}, BadValue, "at least one"),
        ({"interval": (-1.0, 0.0), "strengths": (2.0,)}, BadValue, "at most 1"),
        ({"interval": (-1.0, 0.0), "max_loss_increase": -1.0}, BadValue, "at least 0"),
    ],
)
def test_what_is_no_edit_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        osm.edit_curve(causal(), FEW, **options)


def test_the_page_has_the_verdict_and_both_curves(curve):
    from oversmooth.output.curve_pages import edit_curve_page
    from oversmooth.output.render import render

    page = edit_curve_page(curve)
    assert page.verdict == curve.verdict
    (pair,) = page.sections[0].blocks
    lines = [next(mark for mark in chart.panels[0].marks if isinstance(mark, Line)) for chart in pair.charts]
    assert [len(line.x) for line in lines] == [3, 3]
    assert "loss-against-features" in render(page)
