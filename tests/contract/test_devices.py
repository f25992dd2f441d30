"""Models on a device that is not the CPU, and on two of them: every number is that of the CPU."""

import math
from functools import cache

import pytest
import torch

import oversmooth as osm
from tests.contract.tiny_models import tiny_model
from tests.pretend_gpu import on_two_devices, pretend_gpu, ran_alone

FORMS = {"pre": "llama", "post": "bert", "sandwich": "gemma2", "parallel": "gpt_neox"}


def trained(model, batches):
    """The loss of each step, and what is left of the weights."""
    osm.constrain(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for batch in batches:
        there = {name: value.to(next(model.parameters()).device) for name, value in batch.items()}
        loss = model(**there)[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    osm.bake(model)
    return {"losses": losses, "rho_dc": [layer.plain.rho_dc for layer in osm.inspect(model).layers]}


def applied(model, batches):
    osm.apply(model, "neutreno")
    return osm.measure(model, batches).to_dict()


VERBS = {
    "inspect": lambda model, batches: osm.inspect(model).to_dict(),
    "measure": lambda model, batches: osm.measure(model, batches, metrics="all", at="all", pairs=True).to_dict(),
    "predict": lambda model, batches: osm.predict(model, batches, what_ifs=["no_skip"], simulate=5).to_dict(),
    "verify": lambda model, batches: osm.verify(model, inputs=batches[0]).to_dict(),
}
MORE = {
    "analyze": lambda model, batches: osm.analyze(model, batches, what_ifs=()).to_dict(),
    "monitor": lambda model, batches: osm.Monitor(model, batches).step(),
    "edit": lambda model, batches: osm.edit_curve(model, batches, strengths=[1.0], interval=(-1.0, 0.0)).to_dict(),
    "apply": applied,
}
TRAINING = {"train": trained}
"""On one device only: torch's engine for gradients knows one device of a backend written in Python."""


def each(verbs, more):
    """Every verb with every form; of what follows from the others one form, unless tests may take long."""
    names = [(case, verb) for case in FORMS.values() for verb in verbs]
    names += [("llama", verb) for verb in more]
    slow = [(case, verb) for case in FORMS.values() for verb in more if case != "llama"]
    return pytest.mark.parametrize(
        ("case", "verb"), [*names, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in slow)]
    )


ALL = {**VERBS, **MORE, **TRAINING}
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


@cache
def on_the_cpu(case, verb):
    return ALL[verb](*model_and_batches(case))


@each(VERBS, {**MORE, **TRAINING})
def test_one_device_gives_the_numbers_of_the_cpu(case, verb, request):
    if verb in TRAINING and ran_alone(request.node.nodeid):
        return
    model, batches = model_and_batches(case)
    assert_same(ALL[verb](model.to("pretend:0"), batches), on_the_cpu(case, verb))


@each(VERBS, MORE)
def test_two_devices_give_the_numbers_of_the_cpu(case, verb):
    model, batches = model_and_batches(case)
    on_two = on_two_devices(model)
    assert {str(tensor.device) for tensor in on_two.parameters()} == {"pretend:0", "pretend:1"}
    assert_same(ALL[verb](on_two, batches), on_the_cpu(case, verb))
