"""Scales that differ between tokens: what eigenvalues of one sign promise in a pre-norm layer, `y' = (I + l A D^-1) y`."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.prediction.random_layers import every_time, generator, normal, random_attention, seeds

tokens = st.integers(2, 7)
shares = st.floats(0.02, 1.0)


def scaled_attention(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`A D^-1` and the scales, which spread over a factor of about ten."""
    source = generator(seed)
    scales = normal(source, count).mul(0.6).exp()
    return random_attention(source, 1, count)[0] / scales, scales


def perron_and_others(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The spectral radius of a positive matrix, which is a simple eigenvalue, and all other eigenvalues."""
    values = torch.linalg.eigvals(b)
    first = values.abs().argmax()
    return values[first].real, values[torch.arange(len(values)) != first]


@every_time
@given(seeds, tokens)
def test_the_spectral_radius_lies_between_one_over_the_scales_and_its_vector_is_positive(seed, count):
    b, scales = scaled_attention(seed, count)
    radius, others = perron_and_others(b)
    assert 1 / scales.max() - 1e-9 <= radius <= 1 / scales.min() + 1e-9
    assert (others.abs() < radius + 1e-12).all()
    values, vectors = torch.linalg.eig(b)
    vector = vectors[:, values.abs().argmax()].real
    assert (vector > 0).all() or (vector < 0).all()


@every_time
@given(seeds, tokens, shares)
def test_eigenvalues_between_minus_the_smallest_scale_and_zero_sharpen_for_any_attention(seed, count, share):
    b, scales = scaled_attention(seed, count)
    radius, others = perron_and_others(b)
    eigenvalue = -share * scales.min()
    assert ((1 + eigenvalue * others).abs() > (1 + eigenvalue * radius).abs()).all()


@every_time
@given(seeds, tokens, st.floats(0.02, 5.0))
def test_positive_eigenvalues_smooth_for_any_attention_and_scales(seed, count, eigenvalue):
    b, _ = scaled_attention(seed, count)
    radius, others = perron_and_others(b)
    assert ((1 + eigenvalue * others).abs() < 1 + eigenvalue * radius).all()


@every_time
@given(seeds, tokens, st.floats(0.2, 2.0))
def test_smoothed_tokens_become_parallel_with_positive_factors_not_equal(seed, count, eigenvalue):
    b, _ = scaled_attention(seed, count)
    step = torch.eye(count, dtype=b.dtype) + eigenvalue * b
    limit = torch.linalg.matrix_power(step / torch.linalg.eigvals(step).abs().max(), 4096)
    left, sizes, _ = torch.linalg.svd(limit)
    assert sizes[1] < 1e-6 * sizes[0]
    factors = left[:, 0] * left[0, 0].sign()
    assert (factors > 0).all()
    sums = b.sum(1)
    if (sums.max() / sums.min()) > 1.1:
        assert factors.max() / factors.min() > 1.0001


def test_beyond_minus_two_over_the_radius_a_layer_may_smooth_again():
    """The plain interval [-1, 0] reaches there where scales are below one half."""
    smoothed = 0
    for seed in range(400):
        b, _ = scaled_attention(seed, 2 + seed % 6)
        radius, others = perron_and_others(b)
        eigenvalue = -(2.0 + 0.01 * (seed % 200)) / radius
        smoothed += bool(((1 + eigenvalue * others).abs() < (1 + eigenvalue * radius).abs()).all())
    assert 40 < smoothed < 400


@every_time
@given(seeds, tokens, st.integers(1, 4), shares)
def test_one_head_with_positive_norm_weights_sharpens_up_to_the_scale_over_the_largest_weight(
    seed, count, width, share
):
    """`X' = X + A D^-1 X G H` with H symmetric: the bound that control follows, for an RMS norm."""
    b, scales = scaled_attention(seed, count)
    source = generator(seed + 1)
    norm = normal(source, width).mul(0.5).exp()
    basis = torch.linalg.qr(normal(source, width, width)).Q
    drawn = 0.05 + 0.95 * torch.rand(width, generator=source, dtype=torch.float64)
    values = -share * drawn * scales.min() / norm.max()
    h = norm[:, None] * (basis * values) @ basis.T
    acting = torch.linalg.eigvals(h)
    torch.testing.assert_close(acting.imag, torch.zeros_like(acting.imag), rtol=0, atol=1e-9)
    radius, others = perron_and_others(b)
    for value in acting.real:
        assert value < 0
        assert ((1 + value * others).abs() > (1 + value * radius).abs()).all()
