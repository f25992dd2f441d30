"""Restarted Arnoldi against all eigenvalues, where rounding, ties and early ends could go wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oversmooth.spectra import krylov as arnoldi
from oversmooth.spectra.krylov import dominating, generic_start
from tests.unit.prediction.random_layers import (
    every_time,
    generator,
    normal,
    one_thread,  # noqa: F401  (a fixture for the whole module)
    seeds,
)


@every_time
@given(seeds, st.integers(1, 60), st.floats(-2, 2), st.floats(-1.5, 1.5).filter(lambda a: abs(a) > 1e-2))
def test_the_dominating_eigenvalue_is_found_for_any_shift(seed, size, shift, factor):
    matrix = normal(generator(seed), size, size) / size**0.5
    found = dominating(
        lambda v: matrix @ v,
        generic_start(size, like=matrix),
        shift=shift,
        factor=factor,
        tolerance=1e-9,
        max_applications=5000,
    )
    moduli = (shift + factor * torch.linalg.eigvals(matrix)).abs()
    assert found.converged
    assert abs(found.value) == pytest.approx(moduli.max().item(), rel=1e-6, abs=1e-7)
    real, imaginary = found.vector
    x = torch.complex(real, imaginary)
    image = shift * x + factor * (matrix.to(x.dtype) @ x)
    assert (image - found.value * x).norm().item() <= 1e-8 * max(abs(found.value), 1) + found.residual * 1.01


def test_a_large_problem_restarts_and_stays_within_float32():
    matrix = normal(generator(0), 400, 400) / 20
    exact = (1 + torch.linalg.eigvals(matrix)).abs().max().item()
    single = matrix.float()
    found = dominating(lambda v: single @ v, generic_start(400, like=single), shift=1.0, tolerance=1e-5)
    assert found.applications > arnoldi.BASIS
    assert found.converged
    assert abs(found.value) == pytest.approx(exact, rel=1e-4)
    assert abs(abs(found.value) - exact) <= found.error + 1e-5


def test_too_few_applications_are_not_called_converged():
    matrix = normal(generator(0), 200, 200)
    found = dominating(lambda v: matrix @ v, generic_start(200, like=matrix), max_applications=10, tolerance=1e-12)
    assert not found.converged
    assert found.applications == 10
    assert found.residual > 1e-12


def test_a_conjugate_pair_counts_twice_and_an_invariant_start_ends_at_once():
    turn = torch.tensor([[0.0, 2.0, 0.0], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    found = dominating(lambda v: turn @ v, generic_start(3, like=turn))
    assert found.near == 2
    assert abs(found.value) == pytest.approx(2.0)
    alone = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    found = dominating(lambda v: turn @ v, alone)
    assert found.value == pytest.approx(0.5)
    assert found.applications == 1


def test_the_zero_map_has_the_shift_as_its_eigenvalue():
    found = dominating(torch.zeros_like, torch.ones(5, dtype=torch.float64), shift=-1.0)
    assert found.value == -1.0
    assert found.residual == 0.0
