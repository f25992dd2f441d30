"""What a mean over sequences says, and where it says nothing."""

import pytest
import torch

from oversmooth.measurement.statistics import Running, direction
from oversmooth.results.base import interval


@pytest.mark.parametrize("count", [2, 3, 10, 200])
def test_the_interval_is_students(count):
    from scipy import stats

    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) + 0.3
    running = Running()
    running.add(numbers)
    low, high = interval(running.mean, running.standard_error, running.count)
    expected = stats.t.interval(0.95, count - 1, loc=numbers.mean().item(), scale=stats.sem(numbers.numpy()))
    assert (low, high) == pytest.approx(expected)


def test_a_single_sequence_has_no_interval():
    assert interval(0.3, None, 1) is None
    assert direction(0.3, None) == "sharpening"
    assert direction(-0.3, None) == "smoothing"


@pytest.mark.parametrize(
    ("mean", "found", "word"),
    [
        (-0.5, (-0.6, -0.4), "smoothing"),
        (0.5, (0.4, 0.6), "sharpening"),
        (0.5, (-0.1, 1.1), "no clear change"),
        (-0.5, (-1.0, 0.0), "no clear change"),
        (-3.3e-16, (-3.4e-16, -3.2e-16), "no clear change"),
        (-3.3e-16, None, "no clear change"),
    ],
)
def test_an_interval_that_holds_zero_is_no_clear_change(mean, found, word):
    assert direction(mean, found) == word
