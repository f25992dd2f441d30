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
    default = {change.name: change for change in osm.analyze(model, [batch]).prediction.layers[0].what_ifs}
    asked = osm.analyze(model, [batch], what_ifs=["flip_norms"]).prediction.layers[0].what_ifs[0]
    assert default["no_skip"].rho_ac is not None
    assert default["flip_norms"].rho_ac is None
    assert "asked for by name" in default["flip_norms"].missing[0].reason
    assert default["flip_norms"].rungs[5].mean == pytest.approx(asked.rungs[5].mean)
    assert asked.rho_ac is not None
    assert not any(name.startswith("interval") for name in default)  # a projection per layer, as dear as all the rest


def test_data_that_are_not_there_are_refused_before_the_model_is_opened(monkeypatch, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    monkeypatch.setattr("oversmooth.data.load.open_model", lambda *args, **options: pytest.fail("opened"))
    with pytest.raises(UnreadableData, match=r"none of that name; close: notes\.txt"):
        osm.analyze("any/model", str(tmp_path / "note.txt"))
