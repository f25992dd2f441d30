"""A what-if and the intervention on the live model are one formula: predicted and measured change are equal."""

import copy
import math

import pytest
import torch

import oversmooth as osm
from tests.contract.tiny_models import tiny_model

INTERVENTIONS = {
    "attnscale:0.4": ("attnscale", {"weight": 0.4}, {}),
    "centered": ("centered", {}, {}),
    "gfsa:0.2,0.9,-0.3,3": ("gfsa", {"identity": 0.2, "first": 0.9, "high": -0.3}, {"order": 3}),
    "featscale:0.3,-0.2": ("featscale", {"low": 0.3, "high": -0.2}, {}),
    "layerscale:0.4": ("layerscale", {}, {"init": 0.4}),
    "residual_scaling:3": ("residual_scaling", {}, {}),
    "tempscale:0.4": ("tempscale", {}, {"temperature": 0.4}),
    "gate:0.3": ("gate", {"weight": 0.0, "bias": math.log(0.3 / 0.7)}, {}),
}


def first_attention(model, inputs):
    """The measured change of log(HFC/LFC) across the first layer's attention, whose input no change has touched."""
    parts = osm.measure(model, [inputs]).raw_attributions[0].parts
    return next(part.change for part in parts if part.depth == 1 and part.part == "attention")


def predicted(model, inputs, text):
    (change,) = osm.predict(model, [inputs], what_ifs=[text]).layers[0].what_ifs
    return change.rungs[-1].mean


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("text", INTERVENTIONS)
def test_a_published_intervention_does_what_its_what_if_predicts(family, text):
    name, parameters, options = INTERVENTIONS[text]
    model, inputs = tiny_model(family)
    live = copy.deepcopy(model)
    osm.apply(live, name, **options)
    with torch.no_grad():
        for path, parameter in live.named_parameters():
            if f"oversmooth_{name}" in path and path.rpartition(".")[2] in parameters:
                parameter.fill_(parameters[path.rpartition(".")[2]])
    measured = first_attention(live, inputs)
    assert measured != pytest.approx(first_attention(model, inputs), abs=1e-4)
    assert measured == pytest.approx(predicted(model, inputs, text), abs=2e-5)


def test_differential_pairing_does_what_its_what_if_predicts():
    model, inputs = tiny_model("llama")
    live = copy.deepcopy(model)
    osm.apply(live, "differential", start=math.log(0.3 / 0.7))
    measured = first_attention(live, inputs)
    assert measured != pytest.approx(first_attention(model, inputs), abs=1e-4)
    assert measured == pytest.approx(predicted(model, inputs, "differential:0.3"), abs=2e-5)
    (change,) = osm.predict(tiny_model("gpt2")[0], [inputs], what_ifs=["differential:0.3"]).layers[0].what_ifs
    assert change.not_applicable == "each value head is read by 1 heads, which do not go in pairs"


def test_layernorm_scaling_does_what_its_what_if_predicts():
    """In the second block, and of a model whose queries and keys have no biases: there the what-if is exact."""
    model, inputs = tiny_model("llama")
    live = copy.deepcopy(model)
    osm.apply(live, "layernorm_scaling", layers=[1])

    def second_attention(of):
        parts = osm.measure(of, [inputs]).raw_attributions[0].parts
        return next(part.change for part in parts if part.depth == 2 and part.part == "attention")

    (change,) = osm.predict(model, [inputs], what_ifs=["layernorm_scaling:2"]).layers[1].what_ifs
    assert second_attention(live) != pytest.approx(second_attention(model), abs=1e-4)
    assert second_attention(live) == pytest.approx(change.rungs[-1].mean, abs=2e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("interval", [(-1.0, 0.0), (0.0, 1.0)])
def test_constrain_does_what_the_interval_predicts(family, interval):
    model, inputs = tiny_model(family)
    live = copy.deepcopy(model)
    osm.constrain(live, low=interval[0], high=interval[1])
    text = f"interval:{interval[0]:g},{interval[1]:g}"
    assert first_attention(live, inputs) == pytest.approx(predicted(model, inputs, text), abs=2e-5)
