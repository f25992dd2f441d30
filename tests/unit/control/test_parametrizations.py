"""Two weights from one eigenbasis, inside whatever storage a family has; norms that stay positive; taking them off."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from oversmooth.control.eigenbasis import Heads
from oversmooth.control.parametrizations import (
    OutputWeight,
    PositiveNorm,
    ValueWeight,
    ours,
    parametrized,
    put_on,
    take_off,
)
from oversmooth.control.projection import EigenvalueForm, fresh_eigenbasis
from oversmooth.models.canonical import value_rows

HEADS = Heads(d_model=8, n_heads=4, n_kv=2, d_head=3)


class Projections(nn.Module):
    """A value weight, perhaps fused with others, and an output weight, as some family stores them."""

    def __init__(self, fused: str, stored: str):
        super().__init__()
        self.rows = None if not fused else value_rows(fused, HEADS.n_heads, HEADS.n_kv, HEADS.d_head)
        count = HEADS.channels if not fused else (HEADS.n_heads + 2 * HEADS.n_kv) * HEADS.d_head
        self.value, self.output = (
            nn.Linear(HEADS.d_model, count),
            nn.Linear(HEADS.n_heads * HEADS.d_head, HEADS.d_model),
        )
        self.stored = stored
        if stored == "in_out":
            for linear in (self.value, self.output):
                linear.weight = nn.Parameter(linear.weight.detach().T.contiguous())

    def constrain(self) -> "Projections":
        eigenbasis = fresh_eigenbasis(
            HEADS, EigenvalueForm(low=-1.0, high=0.0), torch.empty(0), torch.Generator().manual_seed(0)
        )
        put_on(self.value, "weight", ValueWeight(eigenbasis, self.value.weight, self.stored, self.rows))
        put_on(self.output, "weight", OutputWeight(eigenbasis, self.output.weight, self.stored))
        return self

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, as (out, in)."""
        value, output = self.value.weight.detach(), self.output.weight.detach()
        return (value.T, output.T) if self.stored == "in_out" else (value, output)


STORAGE = [("", "out_in"), ("", "in_out"), ("stacked", "out_in"), ("stacked", "in_out"), ("grouped", "out_in")]


@pytest.mark.parametrize(("fused", "stored"), STORAGE)
def test_value_rows_come_from_the_eigenbasis_and_all_others_are_untouched(fused, stored):
    projections = Projections(fused, stored)
    before, _ = (weight.clone() for weight in projections.weights)
    projections.constrain()
    eigenbasis = ours(projections.value, "weight").eigenbasis
    value, output = (weight.detach() for weight in eigenbasis.weights())
    rows = torch.arange(HEADS.channels) if projections.rows is None else projections.rows
    found_value, found_output = projections.weights
    torch.testing.assert_close(found_value[rows], value)
    torch.testing.assert_close(found_output, output)
    others = [row for row in range(len(before)) if row not in rows]
    torch.testing.assert_close(found_value[others], before[others], rtol=0, atol=0)


@pytest.mark.parametrize(("fused", "stored"), STORAGE)
def test_each_parametrization_contains_its_own_weight_and_no_other(fused, stored):
    projections = Projections(fused, stored).constrain()
    for module in (projections.value, projections.output):
        parametrization = ours(module, "weight")
        assert parametrization.contains(module.weight)
        assert not parametrization.contains(module.weight + 0.01)


@pytest.mark.parametrize(("fused", "stored"), STORAGE)
def test_a_state_dict_holds_the_eigenbasis_once_and_restores_it(fused, stored):
    saved, other = Projections(fused, stored).constrain(), Projections(fused, stored).constrain()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    state = saved.state_dict()
    assert sum("psi" in name for name in state) == 1
    storages = [tensor.data_ptr() for tensor in state.values() if tensor.numel()]
    assert len(set(storages)) == len(storages)
    other.load_state_dict(state)
    for one, two in zip(saved.weights, other.weights, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(("fused", "stored"), STORAGE)
def test_a_state_dict_holds_the_ordinary_weights_too(fused, stored):
    projections = Projections(fused, stored)
    names = set(projections.state_dict())
    state = projections.constrain().state_dict()
    assert names <= set(state)
    ordinary = Projections(fused, stored)
    ordinary.load_state_dict({name: state[name] for name in names})
    for found, expected in zip(ordinary.weights, projections.weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_state_dict_of_a_positive_norm_holds_the_ordinary_weight():
    norm = nn.LayerNorm(5)
    put_on(norm, "weight", PositiveNorm(norm.weight, 0.0))
    torch.testing.assert_close(norm.state_dict()["weight"], norm.weight.detach(), rtol=0, atol=0)
    norm.load_state_dict(norm.state_dict())


def test_unknown_tensors_are_still_noticed():
    projections = Projections("", "out_in").constrain()
    state = {**projections.state_dict(), "value.other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "value.other"\.'):
        projections.load_state_dict(state)


def test_a_missing_eigenbasis_is_still_noticed():
    projections = Projections("", "out_in").constrain()
    state = {name: tensor for name, tensor in projections.state_dict().items() if "psi" not in name}
    with pytest.raises(RuntimeError, match=r"value\.parametrizations\.weight\.0\.eigenbasis\.psi"):
        projections.load_state_dict(state)


@pytest.mark.parametrize(("fused", "stored"), STORAGE)
def test_taking_off_leaves_an_ordinary_module_and_copies_as_they_were(fused, stored):
    projections = Projections(fused, stored)
    names = list(projections.state_dict())
    projections.constrain()
    twin = copy.deepcopy(projections)
    before = projections.weights
    for module, tensor in list(parametrized(projections)):
        take_off(module, tensor)
    assert type(projections.value) is type(projections.output) is nn.Linear
    assert list(projections.state_dict()) == names
    assert all(isinstance(linear.weight, nn.Parameter) for linear in (projections.value, projections.output))
    assert all(linear.weight.is_contiguous() for linear in (projections.value, projections.output))
    for found, expected, copied in zip(projections.weights, before, twin.weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(copied, expected, rtol=0, atol=0)


def test_taking_off_one_tensor_leaves_the_parametrization_of_another():
    norm = nn.LayerNorm(4)
    parametrize.register_parametrization(norm, "bias", nn.Identity())
    put_on(norm, "weight", PositiveNorm(norm.weight, 0.0))
    twin = copy.deepcopy(norm)
    take_off(norm, "weight")
    assert parametrize.is_parametrized(norm, "bias")
    assert not parametrize.is_parametrized(norm, "weight")
    torch.testing.assert_close(norm.weight, twin.weight)
    torch.testing.assert_close(norm(torch.ones(1, 4)), twin(torch.ones(1, 4)))


def test_frozen_weights_stay_frozen_and_parameters():
    projections = Projections("stacked", "out_in").requires_grad_(False)
    projections.constrain().requires_grad_(False)
    for module, tensor in list(parametrized(projections)):
        take_off(module, tensor)
    assert not any(parameter.requires_grad for parameter in projections.parameters())
    assert len(list(projections.parameters())) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_weights_follow_the_dtype_of_the_model(dtype):
    projections = Projections("stacked", "out_in").constrain().to(dtype)
    assert {weight.dtype for weight in projections.weights} == {dtype}


# --- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_weights_start_at_their_absolute_value_and_stay_positive(offset):
    norm = nn.LayerNorm(6)
    effective = torch.tensor([-2.0, -0.3, 0.0, 1e-3, 0.7, 40.0])
    with torch.no_grad():
        norm.weight.copy_(effective - offset)
    put_on(norm, "weight", PositiveNorm(norm.weight, offset))
    torch.testing.assert_close(norm.weight + offset, effective.abs().clamp(min=1e-4), rtol=1e-4, atol=1e-6)
    search = torch.optim.SGD(norm.parameters(), lr=3.0)
    for _ in range(50):
        search.zero_grad()
        norm.weight.sum().backward()
        search.step()
    assert ours(norm, "weight").contains(norm.weight)
    assert (norm.weight + offset < 0.1).any()  # it could fall


def test_contains_sees_a_negative_norm_weight():
    assert not PositiveNorm(torch.ones(2), 0.0).contains(torch.tensor([1.0, -0.1]))
    assert PositiveNorm(torch.ones(2), 1.0).contains(torch.tensor([1.0, -0.1]))
