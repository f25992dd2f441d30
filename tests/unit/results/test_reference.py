"""Ranges of known models, from the survey that comes with the package."""

import json
import math
from importlib.resources import files

import pytest

from oversmooth.results import wording as reference
from oversmooth.results.wording import known_range, range_words

SURVEY = json.loads((files("oversmooth.results") / "reference.json").read_text(encoding="utf-8"))


def test_the_survey_holds_numbers_of_every_layer_and_says_where_they_are_from():
    assert len(SURVEY["models"]) >= 3
    for model in SURVEY["models"]:
        assert model["residual"] in ("pre", "post")
        assert len(model["weights_sha256"]) == 64
        assert len(model["tendency"]) >= 6
        assert bool(model["exponent"]) == ("sequences of" in model["data"])
        assert all(math.isfinite(value) for value in (*model["tendency"], *model["exponent"]))


@pytest.mark.parametrize("quantity", ["tendency", "exponent"])
@pytest.mark.parametrize("residual", ["pre", "post"])
def test_a_range_holds_every_layer_of_its_models(quantity, residual):
    known = known_range(quantity, residual)
    models = [model for model in SURVEY["models"] if model["residual"] == residual and model[quantity]]
    assert known.models == tuple(model["model"] for model in models)
    assert all(known.holds(value) for model in models for value in model[quantity])
    assert not known.holds(known.high + 1e-6)


def test_a_page_says_which_models_its_ranges_are_of(monkeypatch):
    survey = {"models": [{"model": "small", "residual": "pre", "tendency": [0.25, -0.5], "exponent": []}]}
    monkeypatch.setattr(reference, "_survey", lambda: survey)
    assert known_range("tendency", "pre").words == "-0.50 to +0.25"
    assert known_range("tendency", "pre").cell == "-0.50..+0.25"
    assert known_range("exponent", "pre") is None
    assert known_range("tendency", "post") is None
    words = range_words("tendency", ["pre", "pre", "post"])
    assert "a kept survey of what was at hand (pre-norm: small)" in words
    assert range_words("exponent", ["pre"]) == ""
