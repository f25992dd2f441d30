"""Where a constrained layer starts: as near as is said, and never farther than nothing would be."""

import pytest
import torch

from oversmooth.control.projection import EigenvalueForm, kept_eigenbasis, nearest, nearest_allowed
from tests.unit.control.test_eigenbasis import (
    FORMS,
    SIZES,
    generator,
    move,
    random_eigenbasis,
    random_weights,
    value_map,
)

INTERVALS = [(-1.0, 0.0), (0.0, 1.0), (-0.3, 0.7)]


def squares(heads, eigenbasis, w_v, w_o):
    """`norm(H - H')^2` and `sum_h norm(H_h - H'_h)^2` from dense maps, each beside that of H' = 0."""
    value, output = (weight.detach() for weight in eigenbasis.weights())
    new_v, new_o = value.reshape(w_v.shape), output.reshape(w_o.shape)
    old, new = value_map(heads, w_v, w_o), value_map(heads, new_v, new_o)
    pairs = [
        (w_o[:, h] @ w_v[h // heads.per_group], new_o[:, h] @ new_v[h // heads.per_group]) for h in range(heads.n_heads)
    ]
    layer = (old - new).square().sum().item(), old.square().sum().item()
    return layer, (sum((a - b).square().sum().item() for a, b in pairs), sum(a.square().sum().item() for a, _ in pairs))


@pytest.mark.parametrize("size_of_h", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("form", ["orthogonal", "general"])
@pytest.mark.parametrize("size", SIZES)
def test_a_kept_start_is_never_farther_than_zero(size, form, interval, size_of_h):
    heads, (low, high) = SIZES[size], interval
    w_v, w_o = random_weights(heads, 3)
    w_v = size_of_h * w_v
    kept = kept_eigenbasis(heads, EigenvalueForm(low=low, high=high, **FORMS[form]), w_v, w_o)
    layer, by_head = squares(heads, kept, w_v, w_o)
    assert layer[0] <= layer[1] * (1 + 1e-6)
    assert layer[0] + by_head[0] <= (layer[1] + by_head[1]) * (1 + 1e-3)  # heads keep a share of 1e-4 at least
    assert kept.contains(*kept.weights())


def test_heads_that_cancel_leave_the_layer_map_no_farther_than_zero():
    """The nearest maps of two opposite heads add up to something where the layer's own map is nearly nothing."""
    heads = SIZES["square"]
    w_v, w_o = random_weights(heads)
    w_v, w_o = w_v[:1].repeat(3, 1, 1), w_o[:, :1].repeat(1, 3, 1)
    w_o[:, 1] *= -1
    w_o[:, 2] *= 1e-3
    kept = kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0), w_v, w_o)
    layer, _ = squares(heads, kept, w_v, w_o)
    assert layer[0] <= layer[1] * (1 + 1e-6)


@pytest.mark.parametrize("size", ["square", "tall"])
def test_weights_of_the_form_are_kept_head_by_head_even_where_eigenvalues_are_equal(size):
    heads = SIZES[size]
    given = random_eigenbasis(heads, "orthogonal")
    with torch.no_grad():
        given.psi.fill_(-2.0)  # clipped to the same end of the interval in every head
    value, output = (weight.detach() for weight in given.weights())
    w_v, w_o = value.reshape(heads.n_kv, heads.d_head, -1), output.reshape(-1, heads.n_heads, heads.d_head)
    by_head, whole = move(heads, kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0), w_v, w_o), w_v, w_o)
    assert max(by_head) < 1e-7
    assert whole < 1e-7


def test_the_search_comes_nearer_than_head_by_head_alone(monkeypatch):
    heads = SIZES["square"]
    w_v, w_o = random_weights(heads, 5)

    def distance():
        layer, by_head = squares(heads, kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0), w_v, w_o), w_v, w_o)
        return layer[0] + by_head[0]

    searched = distance()
    monkeypatch.setattr("oversmooth.control.projection.ROUNDS", 0)
    assert searched < 0.99 * distance()


@pytest.mark.parametrize("size", [name for name in SIZES if name != "one"])
def test_the_columns_are_orthonormal_to_rounding(size):
    heads = SIZES[size]
    columns = nearest(heads, *random_weights(heads), -1.0, 0.0).columns
    torch.testing.assert_close(columns.T @ columns, torch.eye(heads.channels, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("interval", [*INTERVALS, (0.2, 0.5), (-2.0, -1.5)])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_the_nearest_allowed_eigenvalues_beat_every_other_allowed_ones(group, interval):
    low, high = interval
    source = generator(group)
    own, total = (torch.randn(2, count, 3, generator=source, dtype=torch.float64) for count in (group, 1))

    def cost(x):
        return (x - own).square().sum(1) + (x.sum(1) - total[:, 0]).square()

    best = nearest_allowed(own, total, low, high)
    assert (best.sum(1) >= low - 1e-12).all()
    assert (best.sum(1) <= high + 1e-12).all()
    assert ((best >= 0).all(1) | (best <= 0).all(1)).all()
    for _ in range(3000):
        shares = torch.rand(2, group, 3, generator=source, dtype=torch.float64) ** 3
        sums = low + (high - low) * torch.rand(2, 1, 3, generator=source, dtype=torch.float64)
        assert (cost(best) <= cost(shares / shares.sum(1, keepdim=True) * sums) + 1e-12).all()
