"""One evaluation of every eigenbasis for the passes of a step: the gradients of many, at the cost of one."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import oversmooth as osm
from oversmooth.control.eigenbasis import Basis, Eigenbasis
from oversmooth.errors import IllConditioned
from oversmooth.models.live import call_model
from tests.contract.tiny_models import tiny_model

FORMS = {"orthogonal": {}, "general": {"basis": "general"}, "bounded": {"basis": "general", "max_condition": 20.0}}
FAMILIES = ("bert", "llama", "timm_vit")


def constrained(family, form="orthogonal"):
    model, inputs = tiny_model(family)
    osm.sharpen(model, generator=torch.Generator().manual_seed(0), init="fresh", **FORMS[form])
    return model.train(False), inputs


def loss_of(model, inputs, scale=1.0):
    output = call_model(model, inputs)
    features = output if isinstance(output, torch.Tensor) else output[0]
    return scale * features.square().mean() + features.sum() / features.numel()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def evaluations(monkeypatch):
    """How often any basis is made, one by one or in a batch."""
    seen = []
    for kind in Basis.__subclasses__():
        plain = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, plain=plain: (seen.append(1), plain(self))[1])
    return seen


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_several_passes_are_the_same(family, form):
    model, inputs = constrained(family, form)
    for scale in (1.0, 2.0, -0.5):
        loss_of(model, inputs, scale).backward()
    expected = gradients(model)
    model.zero_grad()
    with osm.accumulate(model):
        for scale in (1.0, 2.0, -0.5):
            loss_of(model, inputs, scale).backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7)


def test_a_basis_is_made_once_for_all_layers_and_passes(monkeypatch):
    model, inputs = constrained("bert")
    seen = evaluations(monkeypatch)
    with osm.accumulate(model):
        for _ in range(4):
            loss_of(model, inputs).backward()
        model.state_dict()
        with torch.no_grad():
            loss_of(model, inputs)
    assert len(seen) == 1
    loss_of(model, inputs)
    layers = sum(1 for part in dict.fromkeys(model.modules()) if isinstance(part, Eigenbasis))
    assert len(seen) == 1 + layers, "and as before outside"


def test_outputs_inside_are_those_outside():
    model, inputs = constrained("llama")
    expected = loss_of(model, inputs)
    with osm.accumulate(model):
        torch.testing.assert_close(loss_of(model, inputs), expected)


def test_weights_that_change_inside_are_evaluated_anew():
    model, inputs = constrained("bert")
    basis = next(part for part in model.modules() if isinstance(part, Basis))
    with osm.accumulate(model):
        with torch.no_grad():
            next(basis.parameters()).mul_(1.5).add_(0.1 * torch.randn(next(basis.parameters()).shape))
        inside = loss_of(model, inputs)
        inside.backward()
    torch.testing.assert_close(loss_of(model, inputs), inside)
    expected, changed = copy.deepcopy(model), next(basis.parameters())
    expected.zero_grad()
    loss_of(expected, inputs).backward()
    own = next(next(part for part in expected.modules() if isinstance(part, Basis)).parameters())
    torch.testing.assert_close(changed.grad, own.grad)


def test_a_failure_inside_leaves_nothing_behind():
    model, inputs = constrained("bert")

    def fail(parameter):
        raise ZeroDivisionError

    next(model.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError), osm.accumulate(model):
        loss_of(model, inputs).backward()
    assert all(part.shared is None for part in model.modules() if isinstance(part, Eigenbasis))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(loss_of(copied, inputs), loss_of(model, inputs))


def test_a_copy_made_inside_shares_nothing():
    model, inputs = constrained("bert")
    with osm.accumulate(model):
        loss_of(model, inputs).backward()
        copied = copy.deepcopy(model)
    assert all(part.shared is None for part in copied.modules() if isinstance(part, Eigenbasis))


def test_frozen_layers_stay_without_gradients():
    model, inputs = constrained("bert")
    frozen = next(part for part in model.modules() if isinstance(part, Eigenbasis)).requires_grad_(False)
    with osm.accumulate(model):
        loss_of(model, inputs).backward()
    assert all(parameter.grad is None for parameter in frozen.parameters())
    others = [part for part in model.modules() if isinstance(part, Eigenbasis) and part is not frozen]
    assert all(parameter.grad is not None for part in others for parameter in part.parameters())


def test_clipping_sees_the_whole_gradient():
    model, inputs = constrained("bert")
    with osm.accumulate(model):
        loss_of(model, inputs).backward()
    own = torch.stack([gradient.norm() for gradient in gradients(model).values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9), own)


def test_columns_that_became_dependent_are_refused():
    model, _ = constrained("bert", "general")
    basis = next(part for part in model.modules() if isinstance(part, Basis))
    with torch.no_grad():
        basis.columns.fill_(1.0)
    with pytest.raises(IllConditioned), osm.accumulate(model):
        pass


def test_a_model_without_constraints_trains_as_ever():
    model, inputs = tiny_model("bert")
    with osm.accumulate(model):
        loss_of(model, inputs).backward()
    assert gradients(model)
