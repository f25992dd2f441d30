"""The device that tests take for a GPU computes what the CPU computes, refuses what a GPU refuses, and counts."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.pretend_gpu import pretend_gpu, ran_alone

HERE, OTHER = "pretend:0", "pretend:1"


@pytest.fixture(autouse=True)
def seen():
    with pretend_gpu() as seen:
        yield seen


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: torch.ones(2, device=HERE) + torch.ones(2),
        lambda: torch.ones(2) + torch.ones(2, device=HERE),
        lambda: torch.ones(2, device=HERE) + torch.ones(2, device=OTHER),
        lambda: torch.ones(2, device=HERE).masked_fill_(torch.ones(2, dtype=torch.bool), 0),
        lambda: torch.ones(2)[torch.ones(2, dtype=torch.bool, device=HERE)],
        lambda: torch.ones(2, device=HERE).numpy(),
    ],
)
def test_what_a_gpu_refuses(mixed):
    with pytest.raises(RuntimeError, match=r"same device|numpy"):
        mixed()


def test_what_a_gpu_accepts():
    x = torch.arange(4, device=HERE)
    assert (x + torch.tensor(1)).tolist() == [1, 2, 3, 4]  # a number may come from the host
    assert x[torch.tensor([0, 2])].tolist() == [0, 2]  # and so may an index
    assert torch.tensor([1.0], device=HERE).to(OTHER).device == torch.device(OTHER)
    assert torch.zeros(1, dtype=torch.double).to(torch.ones(1, device=OTHER)).device == torch.device(OTHER)


def test_shapes_follow_what_is_held():
    x = torch.eye(3, device=HERE)
    assert (x[0] @ x).shape == (3,)
    x[:, 0] = 5
    x.view(-1).mul_(2)
    assert x[:, 0].tolist() == [10, 10, 10]


def test_a_training_step_is_that_of_the_cpu(request):
    if ran_alone(request.node.nodeid):
        return
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)
    there = copy.deepcopy(layer).to(HERE)
    for module, given in ((layer, x), (copy.deepcopy(there), x.to(HERE)), (there, x.to(HERE))):
        optimizer = torch.optim.AdamW(module.parameters(), eps=1e-3)  # gradients of keys' biases are rounding
        module(given)[..., 0].mean().backward()
        optimizer.step()
    for here, expected in zip(there.parameters(), layer.parameters(), strict=True):
        assert here.device == torch.device(HERE)
        torch.testing.assert_close(here.detach().cpu(), expected.detach())


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (lambda x: x @ x.mT, 0),
        (lambda x: x.to(OTHER), 0),
        (lambda x: x.to(torch.float16), 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: torch.empty(2, 2).copy_(x), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.nonzero(), 1),
    ],
)
def test_waits_of_the_host_are_counted(seen, act, waits):
    x = torch.ones(2, 2, device=HERE)
    assert not seen.waits
    act(x)
    assert seen.waits.total() == waits


def test_double_precision_and_factorisations_are_counted(seen):
    x = torch.eye(3, device=HERE)
    torch.linalg.eigvalsh(x)
    assert (seen.lapack.total(), seen.doubles.total()) == (1, 0)
    torch.linalg.svdvals(x.double() + 1)
    assert seen.lapack.total() == 2
    assert seen.doubles.total() == 2


def test_other_tests_see_no_device():
    assert torch.accelerator.is_available()
    with pretend_gpu():
        pass
    assert not torch.accelerator.is_available()
    with warnings.catch_warnings(action="error"), torch.random.fork_rng():
        pass
