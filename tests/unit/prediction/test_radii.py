"""The spectral theorems on random layers: block-triangular form, causal formula, one head, no skip connection."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oversmooth.prediction import radii
from oversmooth.prediction import radii as causal
from oversmooth.prediction.asymptotics import head_theorems
from oversmooth.prediction.operator import LayerOperator, ValuePath
from oversmooth.prediction.radii import dc_radius, dense_ac_radius
from tests.unit.prediction.random_layers import (
    ac_radius,
    assert_same_spectrum,
    asymptotics,
    dense,
    dense_reference,
    every_time,
    generator,
    layers,
    normal,
    one_thread,  # noqa: F401  (a fixture for the whole module)
    random_attention,
    seeds,
    varying_basis,
)


@pytest.fixture
def matrix_free(monkeypatch):
    """No problem is small enough to be solved by all eigenvalues."""
    monkeypatch.setattr(radii, "DENSE_AC", 0)
    monkeypatch.setattr(radii, "DENSE_DC", 0)
    monkeypatch.setattr(causal, "DENSE_WORK", 0)
    monkeypatch.setattr(causal, "DENSE_BLOCK", 0)


any_layer = st.one_of(layers(), layers(is_causal=True), layers(with_norm_after=True), layers(skip=0.0))


@every_time
@given(any_layer)
def test_the_operator_is_the_sum_of_kronecker_products(operator):
    torch.testing.assert_close(dense(operator), dense_reference(operator))


@every_time
@given(any_layer)
def test_the_spectrum_is_that_of_what_tokens_share_and_of_what_differs(operator):
    matrix = dense_reference(operator)
    basis = varying_basis(operator.tokens, operator.path.d_model)
    ones = torch.ones(operator.tokens, 1, dtype=torch.float64) / operator.tokens**0.5
    shared = torch.kron(ones.T, torch.eye(operator.path.d_model, dtype=torch.float64))
    torch.testing.assert_close(shared @ matrix @ basis.T, torch.zeros(len(shared), len(basis), dtype=torch.float64))
    parts = [torch.linalg.eigvals(rows @ matrix @ rows.T) for rows in (shared, basis)]
    assert_same_spectrum(torch.linalg.eigvals(matrix), torch.cat(parts))
    assert dc_radius(operator).value == pytest.approx(parts[0].abs().max().item(), rel=1e-6, abs=1e-6)
    assert dense_ac_radius(operator).value == pytest.approx(parts[1].abs().max().item(), rel=1e-6, abs=1e-6)


@every_time
@given(st.one_of(layers(is_causal=True), layers(is_causal=True, with_norm_after=True)))
def test_under_causal_attention_the_diagonals_have_the_whole_spectrum(operator):
    path = operator.path
    found = []
    for token in range(operator.tokens):
        block = LayerOperator(
            path=path,
            attention=operator.attention[:, token, token, None, None],
            scale=operator.scale,
            skip=operator.skip,
        )
        found.append(torch.linalg.eigvals(dense_reference(block)))
    assert_same_spectrum(torch.linalg.eigvals(dense_reference(operator)), torch.cat(found))
    later = torch.cat(found[1:]).abs().max().item()
    radius = causal.causal_radius(operator, tolerance=1e-9, max_applications=500)
    assert radius.value == pytest.approx(later, rel=1e-9, abs=1e-9)
    assert radius.route == "diagonals"


@every_time
@given(st.one_of(layers(), layers(with_norm_after=True), layers(is_causal=True)))
def test_arnoldi_finds_the_radius_that_all_eigenvalues_give(operator):
    exact = dense_ac_radius(operator)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((radii, "DENSE_AC"), (causal, "DENSE_WORK"), (causal, "DENSE_BLOCK")):
            patch.setattr(module, name, 0)
        found = ac_radius(operator, tolerance=1e-9, max_applications=2000)
    assert found.converged
    assert found.value == pytest.approx(exact.value, rel=1e-6, abs=1e-6)
    assert found.low - 1e-9 <= exact.value <= found.high + 1e-6


@pytest.mark.parametrize("with_norm_after", [False, True])
@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 4), (4, 2), (1, 1)])
def test_the_radius_of_a_small_model_is_exact_to_six_digits(n_heads, n_kv, with_norm_after, matrix_free):
    source = generator(7)
    path = ValuePath(
        w_v=normal(source, n_kv, 8, 32) / 32**0.5,
        w_o=normal(source, 32, n_heads, 8) / 32**0.5,
        after_weight=normal(source, 32) if with_norm_after else None,
        after_centres=with_norm_after,
    )
    operator = LayerOperator(path=path, attention=random_attention(source, n_heads, 24))
    expected = torch.linalg.eigvals(varying_basis(24, 32) @ dense_reference(operator) @ varying_basis(24, 32).T)
    found = ac_radius(operator, tolerance=1e-9)
    assert found.converged
    assert found.value == pytest.approx(expected.abs().max().item(), rel=1e-6)
    assert found.route == "krylov"


@every_time
@given(layers(one_head=True))
def test_one_head_is_dominated_by_a_pair_of_eigenvalues(operator):
    (head,) = head_theorems(operator)
    dominating = operator.skip + head.value_eigenvalue * head.attention_eigenvalue
    assert abs(dominating) == pytest.approx(max(head.rho_dc, head.rho_ac), rel=1e-9)
    spectrum = torch.linalg.eigvals(dense_reference(operator))
    assert abs(dominating) == pytest.approx(spectrum.abs().max().item(), rel=1e-5, abs=1e-5)
    assert head.rho_dc == pytest.approx(dc_radius(operator).value, rel=1e-6, abs=1e-6)
    assert head.rho_ac == pytest.approx(dense_ac_radius(operator).value, rel=1e-4, abs=1e-4)


@every_time
@given(layers(one_head=True, skip=0.0))
def test_without_a_skip_connection_one_head_always_smooths(operator):
    verdict = asymptotics(operator)
    assert verdict.dc.value > verdict.ac.value
    assert verdict.regime == "smoothing"


def test_without_a_skip_connection_heads_that_cancel_sharpen():
    """What the theorem says of one head does not hold of two: what tokens share goes, what differs stays."""
    source = generator(0)
    w_v, w_o = normal(source, 1, 3, 4), normal(source, 4, 1, 3)
    path = ValuePath(w_v=w_v.expand(2, -1, -1), w_o=torch.cat([w_o, -w_o], dim=1))
    operator = LayerOperator(path=path, attention=random_attention(source, 2, 5), skip=0.0)
    verdict = asymptotics(operator)
    assert verdict.dc.value == pytest.approx(0.0, abs=1e-9)
    assert verdict.ac.value > 0.1
    assert verdict.regime == "sharpening"


@every_time
@given(seeds, st.integers(2, 5), st.integers(2, 6))
def test_the_sign_of_h_decides_for_one_head_whatever_the_attention(seed, tokens, d_model):
    source = generator(seed)
    basis = normal(source, d_model, d_model)
    size = 0.05 + 0.95 * torch.rand(d_model, generator=source, dtype=torch.float64)
    attention = random_attention(source, 1, tokens)
    for sign, regime in ((1.0, "smoothing"), (-1.0, "sharpening")):
        h = basis @ torch.diag(sign * size) @ torch.linalg.inv(basis)
        path = ValuePath(w_v=torch.eye(d_model, dtype=torch.float64)[None], w_o=h[:, None])
        assert asymptotics(LayerOperator(path=path, attention=attention)).regime == regime


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_equal_radii_are_neutral():
    path = ValuePath(w_v=torch.zeros(1, 2, 6, dtype=torch.float64), w_o=torch.zeros(6, 1, 2, dtype=torch.float64))
    verdict = asymptotics(LayerOperator(path=path, attention=random_attention(generator(0), 1, 5)))
    assert verdict.regime == "neutral"
    assert verdict.exponent == pytest.approx(0.0, abs=1e-12)
    assert verdict.half_life is None


def test_a_search_that_ends_early_is_undecided_and_gives_bounds(matrix_free):
    source = generator(3)
    path = ValuePath(w_v=normal(source, 2, 16, 32) / 6, w_o=normal(source, 32, 2, 16) / 6)
    operator = LayerOperator(path=path, attention=random_attention(source, 2, 40))
    exact = dense_ac_radius(operator).value
    verdict = asymptotics(operator, max_applications=6)
    assert verdict.regime == "undecided"
    assert not verdict.ac.converged
    assert verdict.ac.low <= exact <= verdict.ac.high


def test_the_search_goes_on_where_the_radii_are_close(matrix_free):
    source = generator(5)
    path = ValuePath(w_v=normal(source, 2, 16, 32) / 6, w_o=normal(source, 32, 2, 16) / 6)
    operator = LayerOperator(path=path, attention=random_attention(source, 2, 20))
    exact = dense_ac_radius(operator).value
    far = ac_radius(operator, against=exact * 2)
    near = ac_radius(operator, against=exact * (1 + 1e-7))
    assert near.applications > far.applications
    assert near.residual < 1e-6 < far.residual


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_limit_of_a_head_has_rank_one(sign):
    source = generator(1)
    v = normal(source, 6, 1)
    path = ValuePath(w_v=v.T[None] / v.norm(), w_o=sign * 0.9 * v[:, None] / v.norm())
    operator = LayerOperator(path=path, attention=random_attention(source, 1, 40).sqrt(), skip=0.0)
    row_sums = operator.attention.sum(-1, keepdim=True)
    operator = LayerOperator(path=path, attention=operator.attention / row_sums, skip=0.0)
    verdict = asymptotics(operator)
    assert verdict.regime == "smoothing"
    assert verdict.limit_rank == 1.0
    assert verdict.is_absolute


def simulated_rank(operator, x, first=400, steps=240):
    """Mean effective rank over many late repetitions, without the library's spectra."""
    found = []
    for step in range(first + steps):
        x = operator.apply(x)
        x = x / x.norm()
        if step >= first:
            s = torch.linalg.svdvals(x)
            share = s / s.sum()
            found.append(torch.special.entr(share).sum().exp().item())
    return sum(found) / len(found)


def sharpening_layers(is_pair, count):
    """Layers that sharpen clearly, whose dominating eigenvalue is real, or one of a conjugate pair."""
    found = []
    for seed in range(2000):
        source = generator(seed)
        tokens, n_heads = 3 + seed % 4, 1 + seed % 2
        path = ValuePath(w_v=normal(source, n_heads, 3, 6), w_o=-0.6 * normal(source, 6, n_heads, 3))
        operator = LayerOperator(path=path, attention=random_attention(source, n_heads, tokens))
        values = torch.linalg.eigvals(dense_reference(operator))
        order = values.abs().argsort(descending=True)
        leading = values[order[0]]
        pairs = bool(leading.imag.abs() > 0.1 * leading.abs())
        gap = values[order[2 if pairs else 1]].abs() / leading.abs()
        if pairs == is_pair and gap < 0.95 and dc_radius(operator).value < 0.95 * leading.abs():
            found.append((operator, normal(source, tokens, 6)))
        if len(found) == count:
            return found
    raise AssertionError("too few layers of this kind")


@pytest.mark.parametrize(
    ("is_pair", "is_dense"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_the_rank_of_the_limit_is_that_of_a_simulation(is_pair, is_dense, monkeypatch):
    if not is_dense:
        monkeypatch.setattr(radii, "DENSE_AC", 0)
    ranks = []
    for operator, x in sharpening_layers(is_pair, 8):
        verdict = asymptotics(operator)
        assert verdict.regime == "sharpening"
        assert verdict.dimension == 1 + is_pair
        assert verdict.limit_rank == pytest.approx(simulated_rank(operator, x), rel=0.03)
        if operator.path.n_heads == 1:  # a product of one vector over tokens and one over features; two where both turn
            assert verdict.limit_rank <= 1 + is_pair + 1e-3
        ranks.append(verdict.limit_rank)
    assert not is_pair or max(ranks) > 1.5
