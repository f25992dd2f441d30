"""What `analyze` does when less is asked for, and when the data are not there."""

import pytest

import oversmooth as osm
from oversmooth.errors import UnreadableData
from tests.contract.tiny_models import tiny_model


def test_without_solving_nothing_is_predicted_and_the_page_says_so():
    model, batch = tiny_model("bert")
    found = osm.analyze(model, [batch], solve=0)
    assert found.prediction is None
    assert found.measurement is not None
    assert ("prediction", "not asked for (--solve 0)") in [(part.field, part.reason) for part in found.missing]


def test_what_ifs_that_are_problems_of_their_own_are_solved_only_when_asked_for():
    model, batch = tiny_model("vit")
    name = "interval:-1,0"
    quick = osm.predict(model, [batch], what_ifs=[name], solve_what_ifs=False).layers[0].what_ifs[0]
    asked = osm.analyze(model, [batch], what_ifs=[name]).prediction.layers[0].what_ifs[0]
    assert quick.rho_ac is None
    assert "asked for by name" in quick.missing[0].reason
    assert quick.rungs[5].mean == pytest.approx(asked.rungs[5].mean)
    assert asked.rho_ac is not None


def test_a_report_has_the_what_ifs_that_cost_little_and_no_projection_of_every_layer():
    model, batch = tiny_model("vit")
    names = [change.name for change in osm.analyze(model, [batch]).prediction.layers[0].what_ifs]
    assert names == ["no_skip", "no_biases", "flip_norms", "scale:0.5", "centered"]


def test_data_that_are_not_there_are_refused_before_the_model_is_opened(monkeypatch, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    monkeypatch.setattr("oversmooth.data.load.open_model", lambda *args, **options: pytest.fail("opened"))
    with pytest.raises(UnreadableData, match=r"none of that name; close: notes\.txt"):
        osm.analyze("any/model", str(tmp_path / "note.txt"))
