"""Models on a device that is not the CPU, and on two of them: every number is that of the CPU."""

import math

import pytest
import torch

import oversmooth as osm
from tests.contract.tiny_models import tiny_model
from tests.pretend_gpu import on_two_devices, pretend_gpu

FORMS = {"pre": "llama", "post": "bert", "sandwich": "gemma2", "parallel": "gpt_neox"}
EACH_FORM = pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
VERBS = {
    "inspect": lambda model, batches: osm.inspect(model),
    "measure": lambda model, batches: osm.measure(model, batches, metrics="all", at="all", pairs=True),
    "predict": lambda model, batches: osm.predict(model, batches, what_ifs=("no_skip", "scale:0.5"), simulate=5),
    "verify": lambda model, batches: osm.verify(model, inputs=batches[0]),
}
EACH_VERB = pytest.mark.parametrize("verb", VERBS)
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def seen():
    with pretend_gpu() as seen:
        yield seen


def model_and_batches(case):
    """Two sequences, of which one is padded, and a batch with one more."""
    model, inputs = tiny_model(case)
    ids = inputs["input_ids"]
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, -4:] = 0
    padded = {"input_ids": torch.cat([ids, ids.flip(1)]), "attention_mask": mask}
    return model, [padded, {"input_ids": ids.roll(3, 1)}]


def assert_same(found, expected, path=""):
    """The same values, numbers up to rounding; where they come from, and how long it took, may differ."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name in expected.keys() - {"provenance"}:
            assert_same(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{place}]")
    elif isinstance(expected, float) and isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE), f"{path}: {found} for {expected}"
    else:
        assert found == expected, path


@EACH_VERB
@EACH_FORM
def test_one_device_gives_the_numbers_of_the_cpu(case, verb):
    model, batches = model_and_batches(case)
    expected = VERBS[verb](model, batches).to_dict()
    assert_same(VERBS[verb](model.to("pretend:0"), batches).to_dict(), expected)


@EACH_VERB
@EACH_FORM
def test_two_devices_give_the_numbers_of_the_cpu(case, verb):
    model, batches = model_and_batches(case)
    expected = VERBS[verb](model, batches).to_dict()
    on_two = on_two_devices(model)
    assert {str(tensor.device) for tensor in on_two.parameters()} == {"pretend:0", "pretend:1"}
    assert_same(VERBS[verb](on_two, batches).to_dict(), expected)
