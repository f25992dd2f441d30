"""Spectra against dense float64 references built head by head in the row convention of the theory."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.optimize import linear_sum_assignment

from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.spectra import krylov
from oversmooth.spectra import spectrum as spectra
from oversmooth.spectra.spectrum import _eigenvectors, _projector_norm, head_cores, head_spectra, spectrum
from oversmooth.spectra.value_map import ValueMap, bias_norm, folded_map, plain_map, value_norm_and_asymmetry

F64 = torch.float64
SHAPES = {  # d_model, n_heads, n_kv, d_head
    "one": (1, 1, 1, 1),
    "one head of one channel": (5, 1, 1, 1),
    "heads of one channel": (4, 4, 4, 1),
    "own values": (12, 3, 3, 4),
    "shared values": (12, 6, 2, 2),
    "one value head": (9, 3, 1, 3),
    "more channels than width": (6, 2, 2, 5),
    "more shared channels than width": (6, 8, 4, 3),
    "heads wider than the model": (3, 2, 1, 5),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def eigenvalue_condition(matrix, value, multiplicity=1):
    """1 / |y^H x| of unit left and right eigenvectors; `None` where it is not finite."""
    vectors = _eigenvectors(matrix, complex(value), multiplicity)
    return None if vectors is None else _projector_norm(*vectors)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=generator(seed), dtype=F64).to(dtype)


def rotation(size, seed=0):
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


def random_weights(shape, seed=0, dtype=F64, **fields):
    d_model, n_heads, n_kv, d_head = shape
    return AttentionWeights(
        w_v=normal(n_kv, d_head, d_model, seed=seed + 1, dtype=dtype),
        w_o=normal(d_model, n_heads, d_head, seed=seed + 2, dtype=dtype),
        b_v=normal(n_kv, d_head, seed=seed + 3, dtype=dtype),
        **fields,
    )


def norm_of(kind, size, seed):
    return Norm(kind=kind, weight=1 + 0.3 * normal(size, seed=seed))


def row_head(weights, head):
    """`H_h = W_V^h W_O^h`, d x d, acting on rows from the right."""
    value = weights.w_v[head // (weights.n_heads // weights.n_kv)]
    return value.double().numpy().T @ weights.w_o[:, head].double().numpy().T


def row_layer(weights):
    return sum(row_head(weights, head) for head in range(weights.n_heads))


def complex_of(pairs):
    return np.array([complex(*pair) for pair in pairs])


def assert_same_multiset(found, expected, atol):
    """Pairs the two lists with the least total distance; zeros forced by the shape may be left out of `found`."""
    found = np.concatenate([found, np.zeros(len(expected) - len(found))])
    distance = np.abs(found[:, None] - expected)
    rows, columns = linear_sum_assignment(distance)
    np.testing.assert_allclose(found[rows], expected[columns], rtol=0, atol=atol)


def map_of(matrix):
    matrix = torch.as_tensor(matrix, dtype=F64)
    return ValueMap(left=matrix, right=torch.eye(len(matrix), dtype=F64))


def with_eigenvalues(values, seed=0):
    """A symmetric map with these eigenvalues."""
    basis = rotation(len(values), seed)
    return ValueMap(left=basis * torch.tensor(values, dtype=F64), right=basis.T)


# --- layer and head spectra -----------------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("seed", [0, 1])
def test_layer_spectrum_has_the_eigenvalues_of_the_dense_map(shape, seed):
    weights = random_weights(shape, seed)
    expected = np.linalg.eigvals(row_layer(weights))
    found = spectrum(plain_map(weights, F64))
    scale = np.abs(expected).max()
    assert_same_multiset(complex_of(found.eigenvalues), expected, atol=1e-6 * scale)
    everything = torch.tensor(expected)
    for value, reference in (
        (found.rho_dc, (1 + everything).abs().max()),
        (found.spectral_radius, everything.abs().max()),
        (found.min_real, everything.real.min()),
        (found.max_real, everything.real.max()),
    ):
        torch.testing.assert_close(value, reference.item(), rtol=1e-6, atol=1e-6 * scale)
    torch.testing.assert_close(abs(1 + complex(*found.dominating)), found.rho_dc)
    assert found.size == weights.d_model


@each_shape
@pytest.mark.parametrize("seed", [0, 1])
def test_head_spectra_have_the_eigenvalues_of_the_dense_head_maps(shape, seed):
    weights = random_weights(shape, seed)
    found = head_spectra(weights, F64)
    assert [head.head for head in found] == list(range(weights.n_heads))
    for head in found:
        assert head.kv_head == head.head // (weights.n_heads // weights.n_kv)
        expected = np.linalg.eigvals(row_head(weights, head.head))
        assert_same_multiset(complex_of(head.eigenvalues), expected, atol=1e-8)
        torch.testing.assert_close(head.rho_dc, np.abs(1 + expected).max().item(), rtol=0, atol=1e-8)
        torch.testing.assert_close(head.spectral_radius, np.abs(expected).max().item(), rtol=0, atol=1e-8)
        own = complex_of(head.eigenvalues)
        assert (head.min_real, head.max_real) == (own.real.min(), own.real.max())
        assert head.negative_share == np.mean(own.real < 0)


@pytest.mark.parametrize("n_heads", [1, 2])
def test_one_head_per_value_head_adds_up_to_the_layer(n_heads):
    weights = random_weights((8, n_heads, n_heads, 4))
    total = sum(row_head(weights, head) for head in range(n_heads))
    torch.testing.assert_close(plain_map(weights, F64).apply(torch.eye(8, dtype=F64)).T, torch.tensor(total))


@each_shape
def test_head_cores_have_the_traces_of_powers_of_the_head_maps(shape):
    weights = random_weights(shape)
    cores = head_cores(weights, F64)
    assert cores.shape == (weights.n_heads, *2 * (min(weights.d_head, weights.d_model),))
    for head, core in enumerate(cores):
        dense = torch.tensor(row_head(weights, head))
        for power in (1, 2, 3):
            expected = torch.linalg.matrix_power(dense, power).trace()
            torch.testing.assert_close(torch.linalg.matrix_power(core, power).trace(), expected)


@each_shape
def test_rotating_the_residual_stream_leaves_the_spectrum(shape):
    weights = random_weights(shape)
    turn = rotation(weights.d_model)
    rotated = dataclasses.replace(
        weights, w_v=weights.w_v @ turn, w_o=torch.einsum("ed,ehc->dhc", turn, weights.w_o), b_v=None
    )
    before, after = (spectrum(plain_map(each, F64)) for each in (weights, rotated))
    torch.testing.assert_close(after.rho_dc, before.rho_dc)
    assert_same_multiset(complex_of(after.eigenvalues), complex_of(before.eigenvalues), atol=1e-8)


@each_shape
def test_mixing_the_channels_of_a_value_head_leaves_layer_and_head_spectra(shape):
    weights = random_weights(shape)
    mix = torch.eye(weights.d_head, dtype=F64) + 0.1 * normal(weights.d_head, weights.d_head, seed=9)
    mixed = dataclasses.replace(weights, w_v=mix @ weights.w_v, w_o=weights.w_o @ torch.linalg.inv(mix))
    torch.testing.assert_close(spectrum(plain_map(mixed, F64)).rho_dc, spectrum(plain_map(weights, F64)).rho_dc)
    for after, before in zip(head_spectra(mixed, F64), head_spectra(weights, F64), strict=True):
        assert_same_multiset(complex_of(after.eigenvalues), complex_of(before.eigenvalues), atol=1e-8)


def test_eigenvalues_are_sorted_by_real_part():
    weights = random_weights((12, 3, 3, 4))
    for found in (spectrum(plain_map(weights, F64)), *head_spectra(weights, F64)):
        real = [value[0] for value in found.eigenvalues]
        assert real == sorted(real)


def test_the_dominating_eigenvalue_of_a_conjugate_pair_is_the_upper_one():
    turn = torch.tensor([[1.0, -2.0], [2.0, 1.0]], dtype=F64)  # eigenvalues 1 +- 2i
    for matrix in (turn, turn.T):
        found = spectrum(map_of(matrix))
        torch.testing.assert_close(found.dominating, (1.0, 2.0))
        torch.testing.assert_close(found.rho_dc, math.hypot(2, 2))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_multiple_of_the_identity_has_one_eigenvalue(size):
    found = spectrum(map_of(-0.25 * torch.eye(size, dtype=F64)))
    assert found.eigenvalues == size * ((-0.25, 0.0),)
    assert (found.rho_dc, found.dominating, found.spectral_radius) == (0.75, (-0.25, 0.0), 0.25)
    assert (found.negative_share, found.is_defective) == (1.0, False)
    torch.testing.assert_close(found.condition, 1.0)


def test_negative_share_counts_all_eigenvalues_of_the_map():
    assert spectrum(with_eigenvalues([-2.0, -0.5, 0.5, 3.0])).negative_share == 0.5
    full = with_eigenvalues([-2.0, -0.5, 0.5, 3.0, 1.0])
    assert spectrum(ValueMap(left=full.left[:, :4], right=full.right[:4])).negative_share == 2 / 5


@pytest.mark.parametrize("seed", range(4))
def test_negative_share_does_not_count_zeros_that_rounding_made_negative(seed):
    product = normal(20, 6, seed=seed) @ normal(6, 20, seed=seed + 10)
    expected = (torch.linalg.eigvals(normal(6, 20, seed=seed + 10) @ normal(20, 6, seed=seed)).real < 0).sum().item()
    assert spectrum(map_of(product)).negative_share == expected / 20
    weights = AttentionWeights(w_v=torch.zeros(2, 3, 6), w_o=torch.zeros(6, 2, 3))
    assert [head.negative_share for head in head_spectra(weights, F64)] == [0.0, 0.0]


def test_zeros_forced_by_few_channels_can_dominate():
    values = [-0.9, -0.5, -0.1]
    full = with_eigenvalues([*values, 7.0, 7.0])
    few = spectrum(ValueMap(left=full.left[:, :3], right=full.right[:3]))
    assert (few.rho_dc, few.dominating, few.max_real) == (1.0, (0.0, 0.0), 0.0)
    torch.testing.assert_close((few.spectral_radius, few.min_real), (0.9, -0.9))
    all_channels = spectrum(with_eigenvalues(values))
    torch.testing.assert_close((all_channels.rho_dc, all_channels.max_real), (0.9, -0.1))


def test_zeros_forced_by_small_heads_can_dominate():
    basis = rotation(4)
    weights = AttentionWeights(w_v=-0.5 * basis.reshape(2, 2, 4), w_o=basis.T.reshape(4, 2, 2))
    assert [head.rho_dc for head in head_spectra(weights, F64)] == [1.0, 1.0]
    torch.testing.assert_close([head.max_real for head in head_spectra(weights, F64)], [-0.5, -0.5])
    torch.testing.assert_close(spectrum(plain_map(weights, F64)).rho_dc, 0.5)


# --- what the eigenvalues mean --------------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_acts_on_equal_tokens_as_the_value_map(shape, tokens):
    weights = random_weights(shape)
    token = normal(weights.d_model, seed=5)
    equal = token.expand(tokens, weights.d_model).numpy()
    result = equal.copy()
    for head in range(weights.n_heads):
        attention = normal(tokens, tokens, seed=20 + head).softmax(1).numpy()
        result += attention @ equal @ row_head(weights, head)
    expected = token + plain_map(weights, F64).apply(token[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result), expected.expand(tokens, weights.d_model))


def test_what_tokens_share_grows_by_rho_dc_per_layer():
    value_map = with_eigenvalues([0.4, -1.9, 0.1, -0.3])
    x = normal(4, 1, seed=3)
    for _ in range(200):
        x = x / x.norm()
        grown = x + value_map.apply(x)
        growth, x = grown.norm().item(), grown
    torch.testing.assert_close(growth, spectrum(value_map).rho_dc)
    torch.testing.assert_close(growth, 1.4)


# --- norms folded in ------------------------------------------------------------------------------------------------


def centring(kind, size):
    return np.eye(size) - np.full((size, size), 1 / size) if kind == "layer" else np.eye(size)


def row_norm(norm):
    size = len(norm.weight)
    return centring(norm.kind, size) @ np.diag(norm.weight.numpy())


def assert_folds_to(weights, expected, words):
    found, said = folded_map(weights, F64)
    dense = found.apply(torch.eye(weights.d_model, dtype=F64))
    torch.testing.assert_close(dense.T, torch.tensor(expected), rtol=1e-9, atol=1e-9)
    assert_same_multiset(complex_of(spectrum(found).eigenvalues), np.linalg.eigvals(expected), atol=1e-6)
    assert said == words


@each_shape
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("residual", ["pre", "parallel", "sandwich"])
def test_a_norm_before_attention_folds_to_c_g_h(shape, kind, residual):
    norm = norm_of(kind, shape[0], seed=7)
    weights = random_weights(shape, residual=residual, norms={"attn_norm": norm})
    assert_folds_to(weights, row_norm(norm) @ row_layer(weights), "norm before attention")


@each_shape
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_after_the_sum_folds_to_identity_plus_h_times_c_g(shape, kind):
    norm = norm_of(kind, shape[0], seed=7)
    weights = random_weights(shape, residual="post", norms={"attn_norm": norm})
    eye = np.eye(shape[0])
    assert_folds_to(weights, (eye + row_layer(weights)) @ row_norm(norm) - eye, "norm after the sum")


@each_shape
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_on_both_sides_fold_to_c_g_h_c_g(shape, kind):
    before, branch = norm_of(kind, shape[0], seed=7), norm_of(kind, shape[0], seed=8)
    weights = random_weights(shape, residual="sandwich", norms={"attn_norm": before, "attn_branch_norm": branch})
    expected = row_norm(before) @ row_layer(weights) @ row_norm(branch)
    assert_folds_to(weights, expected, "norm before attention, norm on the branch")


@each_shape
def test_a_norm_on_the_branch_alone_folds_from_the_right(shape):
    branch = norm_of("layer", shape[0], seed=8)
    weights = random_weights(shape, residual="sandwich", norms={"attn_branch_norm": branch})
    assert_folds_to(weights, row_layer(weights) @ row_norm(branch), "norm on the branch")


@each_shape
def test_a_branch_gain_folds_from_the_right(shape):
    gain = normal(shape[0], seed=6)
    weights = random_weights(shape, gain=gain)
    assert_folds_to(weights, row_layer(weights) @ np.diag(gain.numpy()), "branch gain")


def test_gain_and_norm_after_the_sum_fold_in_this_order():
    norm, gain = norm_of("layer", 6, seed=7), normal(6, seed=6)
    weights = random_weights((6, 2, 1, 2), residual="post", norms={"attn_norm": norm}, gain=gain)
    expected = (np.eye(6) + row_layer(weights) @ np.diag(gain.numpy())) @ row_norm(norm) - np.eye(6)
    assert_folds_to(weights, expected, "branch gain, norm after the sum")


def test_the_norm_of_the_feed_forward_block_is_not_folded():
    weights = random_weights((6, 2, 1, 2), norms={"ffn_norm": norm_of("layer", 6, seed=7)})
    assert folded_map(weights, F64) is None
    assert folded_map(random_weights((6, 2, 1, 2)), F64) is None


def test_positive_rms_weights_keep_the_signs_of_a_symmetric_map_and_negative_ones_do_not():
    basis = rotation(6)
    values = torch.tensor([-0.9, -0.8, -0.6, -0.5, -0.3, -0.2], dtype=F64)
    weights = AttentionWeights(w_v=(values[:, None] * basis.T)[None], w_o=basis[:, None])
    shares = []
    for sign in (1.0, -1.0):
        weight = torch.tensor([sign, 2.0, 0.5, 1.0, 3.0, 0.1], dtype=F64)
        folded = dataclasses.replace(weights, norms={"attn_norm": Norm(kind="rms", weight=weight)})
        shares.append(spectrum(folded_map(folded, F64)[0]).negative_share)
    assert shares == [1.0, 5 / 6]


# --- Krylov route ---------------------------------------------------------------------------------------------------

EXTREMES = ("rho_dc", "spectral_radius", "min_real", "max_real")
WIDE = {
    "plain": lambda: plain_map(random_weights((60, 6, 6, 10)), F64),
    "shared values": lambda: plain_map(random_weights((60, 8, 4, 5)), F64),
    "norm before": lambda: folded_map(
        random_weights((60, 8, 4, 5), norms={"attn_norm": norm_of("layer", 60, seed=7)}), F64
    )[0],
    "norm after": lambda: folded_map(
        random_weights((60, 8, 4, 5), residual="post", norms={"attn_norm": norm_of("layer", 60, seed=7)}), F64
    )[0],
    "norm after, own values": lambda: folded_map(
        random_weights((60, 6, 6, 10), residual="post", norms={"attn_norm": norm_of("rms", 60, seed=7)}), F64
    )[0],
}


@pytest.fixture
def everything_is_wide(monkeypatch):
    monkeypatch.setattr(spectra, "DENSE_UP_TO", 0)


@pytest.mark.usefixtures("everything_is_wide")
@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_krylov_extremes_are_those_of_all_eigenvalues(make):
    found, dense = spectrum(make()), spectrum(make(), full=True)
    assert (found.route, dense.route) == ("krylov", "dense")
    for name in EXTREMES:
        torch.testing.assert_close(getattr(found, name), getattr(dense, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.dominating, dense.dominating, rtol=1e-9, atol=1e-9)
    assert found.residual < 2e-9
    assert {entry.field for entry in found.missing} == {"negative_share", "condition", "is_defective", "eigenvalues"}
    assert {entry.field for entry in dense.missing} == {"residual"}


@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_extremes_of_a_core_that_is_formed_are_those_of_all_eigenvalues(make, monkeypatch):
    monkeypatch.setattr(spectra, "DENSE_WITHOUT_ASKING", 0)
    found, dense = spectrum(make(), only_extremes=True), spectrum(make())
    assert (found.route, dense.route) == ("krylov", "dense")
    for name in (*EXTREMES, "dominating"):
        torch.testing.assert_close(getattr(found, name), getattr(dense, name), rtol=1e-9, atol=1e-9)
    assert found.residual < 2e-9


def test_extremes_of_a_matrix_without_a_gap_come_from_a_space_much_smaller_than_it():
    matrix = normal(600, 600) / 600**0.5
    seen = []

    def product(x):
        seen.append(x.shape[1])
        return matrix @ x

    found = krylov.extremes(product, normal(600, seed=1))
    values = np.linalg.eigvals(matrix.numpy())
    expected = np.abs(1 + values).max(), np.abs(values).max(), values.real.max(), values.real.min()
    by_dc, by_modulus, rightmost, leftmost = found.values
    reported = abs(1 + by_dc), abs(by_modulus), rightmost.real, leftmost.real
    np.testing.assert_allclose(reported, expected, rtol=1e-8)
    assert found.residual <= 2e-9
    assert sum(seen) < 350


def test_a_residual_that_does_not_keep_its_promise_is_no_answer(monkeypatch):
    matrix, calls = normal(60, 60), []

    def unsteady(x):
        calls.append(1)
        return (matrix + len(calls) * 1e-6) @ x

    assert krylov.extremes(lambda x: matrix @ x, normal(60, seed=1)) is not None
    assert krylov.extremes(unsteady, normal(60, seed=1)) is None


@pytest.mark.usefixtures("everything_is_wide")
def test_krylov_extremes_in_float32_are_right_to_its_precision():
    weights = random_weights((60, 6, 6, 10))
    found, dense = spectrum(plain_map(weights, torch.float32)), spectrum(plain_map(weights, F64), full=True)
    assert found.route == "krylov"
    for name in EXTREMES:
        torch.testing.assert_close(getattr(found, name), getattr(dense, name), rtol=1e-4, atol=1e-4)
    assert 0 < found.residual < 1e-4


def test_extremes_of_formed_cores_in_float32_are_those_of_float64_to_1e_5(monkeypatch):
    monkeypatch.setattr(spectra, "DENSE_WITHOUT_ASKING", 0)
    weights = random_weights((320, 16, 8, 40))
    found = spectrum(plain_map(weights, torch.float32), only_extremes=True)
    dense = spectrum(plain_map(weights, F64))
    assert (found.route, dense.route) == ("krylov", "dense")
    for name in EXTREMES:
        torch.testing.assert_close(
            getattr(found, name), getattr(dense, name), rtol=0, atol=1e-5 * dense.spectral_radius
        )
    assert 1e-9 < found.residual <= 4e-6


def test_a_core_too_far_from_normal_for_float32_is_tried_again_in_float64():
    far = torch.diag(torch.linspace(-1, 1, 300, dtype=F64)) + torch.triu(60 * normal(300, 300), 280)
    map_ = ValueMap(left=(rotation(300) @ far).float(), right=rotation(300).T.float())
    assert spectra._extremes(map_) is None
    found, dense = spectrum(map_, only_extremes=True), spectrum(map_.in_float64(), full=True)
    assert found.route == "krylov"
    assert found.residual < 2e-9
    torch.testing.assert_close(found.rho_dc, dense.rho_dc, rtol=1e-6, atol=0)


def test_residuals_are_those_of_the_factors_and_show_what_rounding_did_to_the_core():
    matrix, rounded = normal(80, 80), normal(80, 80).bfloat16().double()
    assert krylov.extremes(rounded.__matmul__, normal(80, seed=1)) is not None
    assert krylov.extremes(rounded.__matmul__, normal(80, seed=1), check=matrix.__matmul__) is None


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((0, float("inf")), (40, 1e6), 64),  # nothing to go by: as far as allowed
        ((40, 1e6), (64, 1e7), 102),  # it got worse
        ((40, 1e6), (64, 1.1e3), 89),  # 24 vectors for three digits, and a little more is missing
        ((40, 1e6), (64, 2.0), 71),  # almost there: no look that is bound to come too early
        ((40, 1e6), (64, 9e5), 102),
    ],
)
def test_the_next_look_is_where_the_search_should_be_over(before, now, expected):
    assert krylov._next_look(before, now) == expected


@pytest.mark.usefixtures("everything_is_wide")
def test_krylov_knows_the_zeros_forced_by_few_channels():
    basis = rotation(60)[:, :50]
    values = -torch.linspace(0.1, 0.9, 50, dtype=F64)
    found = spectrum(ValueMap(left=basis * values, right=basis.T))
    assert found.route == "krylov"
    expected = (1.0, (0.0, 0.0), 0.0, -0.9, 0.9)
    reported = (found.rho_dc, found.dominating, found.max_real, found.min_real, found.spectral_radius)
    torch.testing.assert_close(reported, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("everything_is_wide")
def test_krylov_does_not_depend_on_the_global_seed():
    value_map = WIDE["plain"]()
    torch.manual_seed(1)
    first = spectrum(value_map)
    torch.manual_seed(2)
    assert spectrum(value_map) == first


@pytest.mark.usefixtures("everything_is_wide")
@pytest.mark.parametrize("make", WIDE.values(), ids=WIDE.keys())
def test_where_krylov_does_not_converge_every_eigenvalue_is_computed(make, monkeypatch):
    monkeypatch.setattr(krylov, "LARGEST_SPACE", 6)
    assert spectrum(make()) == spectrum(make(), full=True)


@pytest.mark.usefixtures("everything_is_wide")
def test_a_wide_layer_of_zeros_has_the_spectrum_of_zeros():
    found = spectrum(map_of(torch.zeros(60, 60)))
    assert [getattr(found, name) for name in EXTREMES] == [1.0, 0.0, 0.0, 0.0]


def test_maps_too_small_for_krylov_are_computed_completely():
    assert spectrum(map_of(normal(3, 3)), only_extremes=True).route == "dense"


# --- size, symmetry, bias -------------------------------------------------------------------------------------------


@each_shape
def test_norm_and_asymmetry_are_those_of_the_dense_map(shape):
    weights = random_weights(shape)
    dense = row_layer(weights)
    expected = np.linalg.norm(dense), np.linalg.norm(dense - dense.T) / (2 * np.linalg.norm(dense))
    found = value_norm_and_asymmetry(plain_map(weights, F64))
    torch.testing.assert_close(found, tuple(float(x) for x in expected), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("size", "channels"), [(1, 1), (2, 1), (6, 6), (6, 9), (6, 4), (40, 10)])
def test_a_symmetric_map_has_asymmetry_zero(size, channels):
    factor = normal(size, channels)
    norm, asymmetry = value_norm_and_asymmetry(ValueMap(left=factor, right=factor.T))
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(factor @ factor.T).item())
    torch.testing.assert_close(asymmetry, 0.0, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("size", "half"), [(2, 1), (6, 3), (6, 5), (6, 1), (40, 5)])
def test_an_antisymmetric_map_has_asymmetry_one(size, half):
    a, b = normal(size, half, seed=1), normal(size, half, seed=2)
    value_map = ValueMap(left=torch.cat([a, -b], 1), right=torch.cat([b, a], 1).T)  # a b^T - b a^T
    torch.testing.assert_close(value_norm_and_asymmetry(value_map)[1], 1.0)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_map_of_zeros_has_no_asymmetry(channels):
    zeros = ValueMap(left=torch.zeros(3, channels, dtype=F64), right=normal(channels, 3))
    assert value_norm_and_asymmetry(zeros) == (0.0, None)


@each_shape
def test_bias_norm_is_the_length_of_what_attention_adds_to_every_token(shape):
    weights = random_weights(shape)
    group = weights.n_heads // weights.n_kv
    added = sum(weights.w_o[:, h].numpy() @ weights.b_v[h // group].numpy() for h in range(weights.n_heads))
    torch.testing.assert_close(bias_norm(weights, F64), float(np.linalg.norm(added)))
    assert bias_norm(dataclasses.replace(weights, b_v=None), F64) == 0.0


# --- defective maps and conditioning --------------------------------------------------------------------------------


def jordan(value, order, coupling=1.0):
    return value * np.eye(order) + coupling * np.eye(order, k=1)


BLOCKS = {  # Jordan form, eigenvalues, whether the dominating one is defective
    "two, dominating": (scipy.linalg.block_diag(jordan(3, 2), -1, 1), [3, 3, -1, 1], True),
    "two, elsewhere": (scipy.linalg.block_diag(jordan(1, 2), 4, -1), [1, 1, 4, -1], False),
    "three, dominating": (scipy.linalg.block_diag(jordan(3, 3), 1), [3, 3, 3, 1], True),
    "three, elsewhere": (scipy.linalg.block_diag(jordan(1, 3), 4), [1, 1, 1, 4], False),
    "four, elsewhere": (scipy.linalg.block_diag(jordan(1, 4), 4), [1, 1, 1, 1, 4], False),
    "weakly coupled": (scipy.linalg.block_diag(jordan(1, 2, 0.01), 4), [1, 1, 4], False),
    "nilpotent of order two": (jordan(0, 2), [0, 0], True),
    "nilpotent of order three": (jordan(0, 3), [0, 0, 0], True),
    "nilpotent beside a larger one": (scipy.linalg.block_diag(jordan(0, 3), 2, 1), [0, 0, 0, 2, 1], False),
    "beside a repeated one": (scipy.linalg.block_diag(jordan(1, 2), 4, 4, 4), [1, 1, 4, 4, 4], False),
}
BASES = {
    "as it is": lambda size: torch.eye(size, dtype=F64),
    "rotated": rotation,
    "sheared": lambda size: rotation(size, 1) * torch.linspace(1, 2, size, dtype=F64) @ rotation(size, 2),
}


@pytest.mark.parametrize("basis", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize(("form", "eigenvalues", "at_dominating"), BLOCKS.values(), ids=BLOCKS.keys())
def test_a_jordan_block_is_said_and_its_eigenvalues_are_right(form, eigenvalues, at_dominating, basis):
    turn = basis(len(form))
    found = spectrum(map_of(turn @ torch.tensor(form) @ torch.linalg.inv(turn)))
    assert found.is_defective is True
    # A block of order k turns rounding into an error of about epsilon^(1/k).
    assert_same_multiset(complex_of(found.eigenvalues), np.array(eigenvalues, dtype=complex), atol=2e-3)
    torch.testing.assert_close(found.rho_dc, 1.0 + max(eigenvalues), rtol=0, atol=2e-3)
    assert (found.condition is None) == at_dominating
    reasons = [entry.reason for entry in found.missing if entry.field == "condition"]
    assert ["defective" in reason for reason in reasons] == [True] * at_dominating


@pytest.mark.parametrize("size", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("seed", range(3))
def test_random_and_normal_maps_are_not_called_defective(size, seed):
    matrix = normal(size, size, seed=seed)
    turned = rotation(size, seed)
    for each in (matrix, matrix + matrix.T, matrix - matrix.T, turned):
        assert spectrum(map_of(each)).is_defective is False
    for each in (matrix + matrix.T, matrix - matrix.T, turned):
        torch.testing.assert_close(spectrum(map_of(each)).condition, 1.0)


@pytest.mark.parametrize("basis", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize("values", [[2.0, 2.0], [2.0, 2.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, -1.0, -1.0]])
def test_repeated_eigenvalues_with_all_their_eigenvectors_are_not_called_defective(values, basis):
    turn = basis(len(values))
    found = spectrum(map_of(turn @ torch.diag(torch.tensor(values, dtype=F64)) @ torch.linalg.inv(turn)))
    assert found.is_defective is False
    projector = turn @ torch.diag(torch.tensor([float(v == max(values)) for v in values], dtype=F64))
    expected = torch.linalg.matrix_norm(projector @ torch.linalg.inv(turn), ord=2).item()
    torch.testing.assert_close(found.condition, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("base", [1.5, 10.0])
def test_singular_values_that_decay_below_rounding_are_not_called_defective(base):
    sizes = base ** -torch.arange(60, dtype=F64)
    assert spectrum(map_of(rotation(60, 1) * sizes @ rotation(60, 2))).is_defective is False


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_condition_is_that_of_left_and_right_eigenvectors(size, seed):
    matrix = normal(size, size, seed=seed)
    values, left, right = scipy.linalg.eig(matrix.numpy(), left=True, right=True)
    expected = 1 / np.abs((left.conj() * right).sum(0))
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(eigenvalue_condition(matrix, value), reference.item(), rtol=1e-6, atol=1e-6)
    dominating = np.abs(1 + values).argmax()
    torch.testing.assert_close(spectrum(map_of(matrix)).condition, expected[dominating].item(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 1, 1, 4), (12, 6, 2, 2), (5, 1, 1, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_condition_is_that_of_the_map_and_not_of_its_small_core(shape, seed):
    weights = random_weights(shape, seed)
    values, left, right = scipy.linalg.eig(row_layer(weights), left=True, right=True)
    dominating = np.abs(1 + values).argmax()
    expected = 1 / np.abs((left.conj() * right).sum(0))[dominating]
    found = spectrum(plain_map(weights, F64)).condition
    if abs(values[dominating]) < 1e-9:  # zero, repeated: the norm of its projector, from its kernels
        right, left = scipy.linalg.null_space(row_layer(weights)), scipy.linalg.null_space(row_layer(weights).T)
        expected = 1 / np.linalg.svd(left.T @ right)[1][-1]
    torch.testing.assert_close(found, float(expected), rtol=1e-6, atol=0)


def test_condition_of_a_forced_zero_that_dominates_is_the_norm_of_its_projector():
    left, right = normal(9, 3, seed=1), normal(3, 9, seed=2)
    right = -0.5 * torch.linalg.inv(right @ left) @ right  # so that the core is -I/2
    found = spectrum(ValueMap(left=left, right=right))
    assert found.dominating == (0.0, 0.0)
    projector = torch.eye(9, dtype=F64) + 2 * left @ right
    torch.testing.assert_close(found.condition, torch.linalg.matrix_norm(projector, ord=2).item())
    assert found.is_defective is False


def test_a_low_rank_map_can_be_nilpotent_although_its_core_is_not_defective():
    left, right = torch.zeros(4, 1, dtype=F64), torch.zeros(1, 4, dtype=F64)
    left[0], right[0, 1] = 1.0, 1.0  # e_1 e_2^T, whose core is the number zero
    found = spectrum(ValueMap(left=left, right=right))
    assert (found.is_defective, found.condition, found.rho_dc) == (True, None, 1.0)


def test_a_low_rank_map_can_be_zero_although_its_core_is_nilpotent():
    column, zero = normal(4, 1), torch.zeros(4, 1, dtype=F64)
    found = spectrum(ValueMap(left=torch.cat([column, zero], 1), right=torch.cat([zero, column], 1).T))
    assert (found.is_defective, found.condition) == (False, 1.0)


@pytest.mark.parametrize("order", [2, 3])
def test_a_jordan_block_inside_few_channels_is_said(order):
    basis = rotation(10)[:, : order + 2]
    form = torch.tensor(scipy.linalg.block_diag(jordan(1, order), 4, -2))
    found = spectrum(ValueMap(left=basis @ form, right=basis.T))
    assert found.is_defective is True
    torch.testing.assert_close(found.condition, 1.0)


@pytest.mark.parametrize("pruned", [0, 1])
def test_a_pruned_value_head_does_not_make_the_layer_defective(pruned):
    weights = random_weights((12, 6, 2, 2))
    weights.w_v[pruned] = 0.0
    found = spectrum(plain_map(weights, F64))
    assert found.is_defective is False
    assert head_spectra(weights, F64)[3 * pruned].spectral_radius == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_pruned_value_head_beside_negative_eigenvalues_leaves_a_harmless_zero_dominating(seed):
    basis = rotation(9, seed)[:, :4]
    weights = AttentionWeights(w_v=-0.5 * basis.T.reshape(2, 2, 9), w_o=basis.reshape(9, 2, 2))
    weights.w_v[0] = 0.0
    weights.w_o[:, 0] = normal(9, 2, seed=seed)
    found = spectrum(plain_map(weights, F64))
    torch.testing.assert_close((found.rho_dc, found.condition), (1.0, 1.0))
    assert found.is_defective is False


def test_condition_of_a_defective_eigenvalue_does_not_exist():
    assert eigenvalue_condition(torch.tensor(jordan(2.0, 2)), 2.0) is None
    assert eigenvalue_condition(torch.tensor(jordan(2.0, 2)), 2.0, multiplicity=2) is None
    assert eigenvalue_condition(2 * torch.eye(2, dtype=F64), 2.0, multiplicity=2) == 1.0


def test_float32_does_not_judge_whether_a_map_is_defective():
    found = spectrum(plain_map(random_weights((6, 2, 2, 3)), torch.float32))
    assert found.is_defective is None
    assert [entry.reason for entry in found.missing if entry.field == "is_defective"] == [
        "float32 is too coarse to tell; compute in float64"
    ]


# --- precision ------------------------------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", [torch.float32, F64])
def test_stored_half_precision_never_enters_the_arithmetic(shape, stored, compute):
    norms = {"attn_norm": Norm(kind="layer", weight=normal(shape[0], seed=7, dtype=stored))}
    weights = random_weights(shape, dtype=stored, norms=norms, gain=normal(shape[0], seed=6, dtype=stored))
    exact = dataclasses.replace(
        weights,
        w_v=weights.w_v.double(),
        w_o=weights.w_o.double(),
        b_v=weights.b_v.double(),
        gain=weights.gain.double(),
        norms={"attn_norm": Norm(kind="layer", weight=norms["attn_norm"].weight.double())},
    )
    for numbers in (
        lambda each: spectrum(plain_map(each, compute)),
        lambda each: spectrum(folded_map(each, compute)[0]),
        lambda each: head_spectra(each, compute),
        lambda each: bias_norm(each, compute),
        lambda each: value_norm_and_asymmetry(plain_map(each, compute)),
    ):
        assert numbers(weights) == numbers(exact)


def test_the_weights_are_left_as_they_were():
    weights = random_weights((12, 6, 2, 2), norms={"attn_norm": norm_of("layer", 12, seed=7)}, gain=normal(12, seed=6))
    before = weights.w_v.clone(), weights.w_o.clone()
    spectrum(plain_map(weights, F64))
    spectrum(folded_map(weights, F64)[0])
    head_spectra(weights, F64)
    torch.testing.assert_close((weights.w_v, weights.w_o), before, rtol=0, atol=0)


def test_an_eigenvalue_that_lies_exactly_where_inverse_iteration_shifts_to_has_a_condition():
    epsilon = torch.finfo(F64).eps
    second = -1.0
    for _ in range(5):  # the shift depends on the norm, and the norm on the second eigenvalue
        second = -1.0 + 10 * epsilon * math.hypot(1.0, second)
    found = spectrum(map_of(torch.diag(torch.tensor([-1.0, second], dtype=F64))))
    assert found.condition == pytest.approx(1.0)
