"""Closed forms, invariances and naive references for every metric of the table."""

import gc
import math
import weakref

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oversmooth.errors import BadValue, UnknownName, UserCodeFailed
from oversmooth.measurement import metrics
from oversmooth.measurement.metrics import DEFAULT_METRICS, METRICS, SUMS, evaluate, joined, lookup, settled
from oversmooth.measurement.moments import Moments, measurable

BOUNDED = settings(derandomize=True, deadline=None, max_examples=25)
ALL = tuple(METRICS)
seeds = st.integers(0, 10_000)


def random_tokens(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).add(0.3).to(dtype)


def kept(h):
    return torch.ones(h.shape[:2], dtype=torch.bool)


def values(name, h, keep=None):
    """Values of one metric, all of which have to exist."""
    found = METRICS[name](h, kept(h) if keep is None else keep)
    assert found.defined.all(), f"{name} is missing for {(~found.defined).nonzero().flatten().tolist()}"
    return found.values


def value(name, rows, dtype=torch.float64):
    return values(name, torch.tensor(rows, dtype=dtype)[None])[0].item()


# --- independent references: one sequence, float64, pair loops and dense decompositions ------------------------------


def pairs(x):
    return [(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j]


def angle(a, b):
    return a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)


def parts(x):
    averaging = np.full((len(x), len(x)), 1 / len(x))
    return np.linalg.norm(x - averaging @ x), np.linalg.norm(averaging @ x)


def norm_1inf(x):
    return math.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf))


def entropy_rank(x):
    p = np.linalg.svd(x, compute_uv=False)
    p = p[p > 0] / p.sum()
    return np.exp(-(p * np.log(p)).sum())


def corner_over_centre(x):
    side = math.isqrt(len(x))
    spectrum = np.fft.fftshift(np.fft.fft2(x.reshape(side, side, -1), axes=(0, 1)), axes=(0, 1))
    amplitude = np.log(np.abs(spectrum) + 1e-6).mean(-1)
    return amplitude[0, 0] - amplitude[side // 2, side // 2]


def lower_median(numbers):
    return np.sort(numbers)[(len(numbers) - 1) // 2]


def gram_entropy(x):
    p = np.linalg.svd(x, compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    return -(p * np.log(p)).sum() / np.log(min(x.shape)) if min(x.shape) > 1 else 0.0


REFERENCES = {
    "cosine": lambda x: np.mean([angle(a, b) for a, b in pairs(x)]),
    "cosine_abs": lambda x: np.mean([abs(angle(a, b)) for a in x for b in x]),
    "hfc_lfc": lambda x: parts(x)[0] / parts(x)[1],
    "log_hfc_lfc": lambda x: np.log(parts(x)[0] / parts(x)[1]),
    "dirichlet": lambda x: sum((a - b) @ (a - b) for a, b in pairs(x)) / len(x),
    "residual": lambda x: norm_1inf(x - x.mean(0)) / norm_1inf(x),
    "effective_rank": entropy_rank,
    "effective_rank_share": lambda x: entropy_rank(x) / min(x.shape),
    "stable_rank": lambda x: np.linalg.norm(x) ** 2 / np.linalg.norm(x, 2) ** 2,
    "token_norm": lambda x: np.mean([np.sqrt(a @ a) for a in x]),
    "token_norm_spread": lambda x: np.std([np.sqrt(a @ a) for a in x]),
    "high_frequency": corner_over_centre,
    "log_hfc_lfc_unit": lambda x: np.log(np.divide(*parts(x / np.linalg.norm(x, axis=1, keepdims=True)))),
    "largest_norm": lambda x: np.linalg.norm(x, axis=1).max() / lower_median(np.linalg.norm(x, axis=1)),
    "massive": lambda x: np.abs(x).max() / lower_median(np.abs(x).ravel()),
    "matrix_entropy": gram_entropy,
}


def test_every_metric_has_an_independent_reference():
    assert set(REFERENCES) == set(METRICS)


@pytest.mark.parametrize("name", ALL)
@BOUNDED
@given(data=st.data(), batch=st.integers(1, 3), d_model=st.integers(1, 5), seed=seeds)
def test_a_metric_equals_its_naive_reference_wherever_the_kept_tokens_are(name, data, batch, d_model, seed):
    counts = (4, 9) if METRICS[name].images_only else (2, 3, 5, 8)
    d_model += name == "log_hfc_lfc_unit"  # tokens of length one on a line are 1 or -1, and may all be equal
    h = random_tokens(batch, 9, d_model, seed=seed)
    keep = torch.zeros(batch, 9, dtype=torch.bool)
    for row in keep:
        places = data.draw(st.permutations(range(9)))
        row[places[: data.draw(st.sampled_from(counts))]] = True
    expected = [REFERENCES[name](x[mask].numpy()) for x, mask in zip(h, keep, strict=True)]
    # 1e-6: singular values come from a Gram matrix; everything else is good to 1e-12.
    tolerance = 1e-6 if "rank" in name or "entropy" in name else 1e-10
    expected = torch.tensor(expected, dtype=h.dtype)
    torch.testing.assert_close(values(name, h, keep), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(121, 768), (289, 64)], ids=["wide", "tall"])
@pytest.mark.parametrize("name", ALL)
def test_real_sizes_in_float32_equal_the_reference_in_float64(name, shape):
    h = random_tokens(1, *shape, dtype=torch.float32)
    expected = REFERENCES[name](h[0].double().numpy())
    torch.testing.assert_close(values(name, h).item(), float(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (2, 1)])
def test_singular_values_from_the_gram_matrix_equal_those_of_the_tokens(shape):
    h = random_tokens(3, *shape)
    found = Moments.of(h, kept(h)).singular_values.sort(descending=True).values
    torch.testing.assert_close(found, torch.linalg.svdvals(h), rtol=1e-7, atol=1e-7)


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [m.name for m in METRICS.values() if m.smoothed is not None])
def test_equal_tokens_give_the_smoothed_value_of_the_table(name, dtype):
    h = random_tokens(3, 1, 7, dtype=dtype).expand(3, 9, 7)
    expected = torch.full((3,), METRICS[name].smoothed)
    torch.testing.assert_close(
        values(name, h).float(), expected, rtol=0, atol=1e-5 if "rank" in name or "entropy" in name else 1e-6
    )


@pytest.mark.parametrize("offset", [0.0, 1.0, 1000.0])
def test_fully_smoothed_hidden_states_of_real_size_have_hfc_lfc_below_a_millionth(offset):
    h = (random_tokens(2, 1, 768, dtype=torch.float32) + offset).expand(2, 128, 768).contiguous()
    assert values("hfc_lfc", h).max() < 1e-6


@pytest.mark.parametrize("difference", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_tokens_keep_five_digits_in_float32(difference):
    h = random_tokens(2, 1, 768) + difference * random_tokens(2, 128, 768, seed=1)
    h = h.float()
    for name in ("hfc_lfc", "log_hfc_lfc", "dirichlet"):
        exact = values(name, h.double()).float()
        torch.testing.assert_close(values(name, h), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [2, 4, 9])
def test_orthonormal_tokens_have_the_values_known_by_hand(n):
    known = {
        "cosine": 0,
        "cosine_abs": 1 / n,
        "hfc_lfc": math.sqrt(n - 1),  # HFC^2 = n - 1, LFC^2 = n * n/n^2 = 1
        "log_hfc_lfc": math.log(n - 1) / 2,
        "dirichlet": 2 * (n - 1),
        "residual": 2 * (n - 1) / n,  # each row and column of I - 1/n sums to (1 - 1/n) + (n - 1)/n; those of I to 1
        "effective_rank": n,
        "effective_rank_share": 1,
        "stable_rank": n,
        "token_norm": 1,
        "token_norm_spread": 0,
        "log_hfc_lfc_unit": math.log(n - 1) / 2,
        "matrix_entropy": 1,
        "largest_norm": 1,
    }
    found = {name: value(name, np.eye(n)) for name in known}
    assert found == pytest.approx(known, abs=1e-12)


@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(1, 5), seed=seeds)
def test_tokens_on_one_line_have_rank_one(n, d_model, seed):
    h = random_tokens(1, n, 1, seed=seed) * random_tokens(1, 1, d_model, seed=seed + 1)
    for name in ("effective_rank", "stable_rank", "cosine_abs"):
        torch.testing.assert_close(values(name, h), torch.ones(1, dtype=h.dtype), rtol=0, atol=1e-5)
    share = torch.full((1,), 1 / min(n, d_model), dtype=h.dtype)
    torch.testing.assert_close(values("effective_rank_share", h), share, rtol=0, atol=1e-5)


def test_two_opposite_tokens_are_unlike_by_sign_and_alike_without_it():
    rows = [[3.0, 4.0], [-3.0, -4.0]]
    found = {name: value(name, rows) for name in ("cosine", "cosine_abs", "dirichlet", "residual", "stable_rank")}
    known = {"cosine": -1, "cosine_abs": 1, "dirichlet": 100, "residual": 1, "stable_rank": 1}
    assert found == pytest.approx(known)


def test_token_norm_and_its_spread_are_mean_and_standard_deviation():
    rows = [[3.0, 4.0], [0.0, 1.0]]
    assert value("token_norm", rows) == pytest.approx(3)
    assert value("token_norm_spread", rows) == pytest.approx(2)


def test_a_pair_with_a_zero_token_counts_as_cosine_zero():
    rows = [[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    assert value("cosine", rows) == pytest.approx(2 / 6)
    assert value("cosine_abs", rows) == pytest.approx(4 / 9)


@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(1, 5), seed=seeds)
def test_bounds_hold_for_every_sequence(n, d_model, seed):
    h = random_tokens(2, n, d_model, seed=seed, dtype=torch.float32)
    cosine, ranks = values("cosine", h), values("effective_rank", h)
    assert cosine.min() >= -1 / (n - 1) - 1e-6
    assert cosine.max() <= 1
    assert ranks.min() >= 1 - 1e-6
    assert ranks.max() <= min(n, d_model) + 1e-5


def test_rounding_never_lifts_a_mean_cosine_above_one():
    h = random_tokens(64, 1, 64, dtype=torch.float32).expand(64, 16, 64)
    assert values("cosine", h).max() <= 1
    assert values("cosine_abs", h).max() <= 1


@pytest.mark.parametrize("side", [2, 4])
def test_a_checkerboard_is_all_high_frequency_and_a_constant_grid_has_none(side):
    rows, columns = np.indices((side, side)).reshape(2, -1)
    board = ((-1.0) ** (rows + columns))[:, None]
    most = math.log(side**2 + 1e-6) - math.log(1e-6)
    assert value("high_frequency", board) == pytest.approx(most)
    assert value("high_frequency", np.ones_like(board)) == pytest.approx(-most)


@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(1, 5), seed=seeds)
def test_log_hfc_lfc_is_the_logarithm_of_hfc_lfc(n, d_model, seed):
    h = random_tokens(2, n, d_model, seed=seed)
    torch.testing.assert_close(metrics.log_hfc_lfc(h, kept(h)).values, metrics.hfc_lfc(h, kept(h)).values.log())


@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(2, 5), seed=seeds)
def test_the_ratio_of_tokens_at_length_one_is_a_function_of_the_mean_cosine(n, d_model, seed):
    h = random_tokens(2, n, d_model, seed=seed)
    c = values("cosine", h)
    expected = ((n - 1) * (1 - c) / (1 + (n - 1) * c)).log() / 2
    torch.testing.assert_close(values("log_hfc_lfc_unit", h), expected, rtol=1e-6, atol=1e-6)


def test_parallel_tokens_keep_digits_at_length_one_however_nearly_parallel_they_are():
    h = (random_tokens(1, 1, 64) + 1e-4 * random_tokens(1, 32, 64, seed=1)).float()
    exact = values("log_hfc_lfc_unit", h.double()).float()
    torch.testing.assert_close(values("log_hfc_lfc_unit", h), exact, rtol=1e-4, atol=0)


def test_numbers_without_the_largest_token_are_those_of_the_other_tokens():
    h = random_tokens(2, 7, 5)
    h[0, 3] *= 1000
    h[1, 6] *= 1000
    others = torch.stack([h[0, [0, 1, 2, 4, 5, 6]], h[1, :6]])
    without = Moments.of(h, kept(h)).without_largest
    for name in (metric.name for metric in METRICS.values() if metric.scales):
        torch.testing.assert_close(METRICS[name].on(without).values, values(name, others), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [metric.name for metric in METRICS.values() if metric.of_sums])
def test_a_metric_of_sums_gives_at_all_places_together_what_it_gives_at_each_and_needs_no_tokens(name):
    first, second = random_tokens(3, 6, 8, dtype=torch.float32), random_tokens(3, 6, 8, seed=1, dtype=torch.float32)
    second[1] = second[1, :1]  # all tokens equal: no logarithm of HFC
    second[2, 4] = torch.nan
    keep = kept(first)
    keep[0, 4:] = False
    places = [Moments.of(h, keep) for h in (first, second)]
    together = METRICS[name].on(joined([settled(place) for place in places]))
    alone = [METRICS[name].on(place) for place in places]
    assert torch.equal(together.values, torch.cat([found.values for found in alone]))
    assert torch.equal(together.defined, torch.cat([found.defined for found in alone]))
    if METRICS[name].scales:
        others = METRICS[name].on(joined([settled(place.without_largest, SUMS) for place in places]))
        expected = torch.cat([METRICS[name].on(place.without_largest).values for place in places])
        assert torch.equal(others.values, expected)


# --- invariances ----------------------------------------------------------------------------------------------------

SCALE_FREE = set(ALL) - {"dirichlet", "token_norm", "token_norm_spread"}
INVARIANT = {
    "scaling each token by a positive factor": {"cosine", "cosine_abs", "log_hfc_lfc_unit"},
    "scaling each token by any factor": {"cosine_abs"},
    "rotating d_model": set(ALL) - {"residual", "high_frequency", "massive"},
    "one common scale": SCALE_FREE,
    "token order": set(ALL) - {"high_frequency"},
    "channel order": set(ALL),
    "adding one vector to all tokens": {"dirichlet"},
    "transposing the grid": set(ALL),
}


def transformed(h, what, seed):
    batch, n, d_model = h.shape
    factors = random_tokens(batch, n, 1, seed=seed)
    side = math.isqrt(n)
    return {
        "scaling each token by a positive factor": lambda: h * factors.exp(),
        "scaling each token by any factor": lambda: h * factors,
        "rotating d_model": lambda: h @ torch.linalg.qr(random_tokens(d_model, d_model, seed=seed)).Q,
        "one common scale": lambda: h * 1e3,
        "token order": lambda: h[:, torch.arange(n).roll(1)],
        "channel order": lambda: h.flip(2),
        "adding one vector to all tokens": lambda: h + 5 * random_tokens(batch, 1, d_model, seed=seed),
        "transposing the grid": lambda: h.unflatten(1, (side, side)).transpose(1, 2).flatten(1, 2),
    }[what]()


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what, names in INVARIANT.items() for name in sorted(names)]
)
@BOUNDED
@given(side=st.integers(2, 3), d_model=st.integers(1, 5), seed=seeds)
def test_a_metric_is_invariant_to_what_its_docstring_says(what, name, side, d_model, seed):
    h = random_tokens(2, side**2, d_model + (name == "log_hfc_lfc_unit"), seed=seed)
    found = values(name, transformed(h, what, seed + 1))
    # 1e-3: high_frequency adds 1e-6 to each amplitude, so that its scale invariance is approximate.
    tolerance = 1e-3 if name == "high_frequency" else 1e-6
    torch.testing.assert_close(found, values(name, h), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("what", sorted(set(INVARIANT) - {"channel order", "transposing the grid"}))
def test_the_invariance_test_above_can_fail(what):
    h = random_tokens(1, 9, 5)
    change = {name: abs(values(name, transformed(h, what, 1)) - values(name, h)).item() for name in ALL}
    assert {name for name in ALL if change[name] < 1e-4} == INVARIANT[what]


@pytest.mark.parametrize(("name", "power"), [("dirichlet", 2), ("token_norm", 1), ("token_norm_spread", 1)])
def test_metrics_with_a_unit_grow_with_the_common_scale(name, power):
    h = random_tokens(2, 4, 3)
    torch.testing.assert_close(values(name, 3 * h), 3**power * values(name, h))


# --- padding, precision and batches ---------------------------------------------------------------------------------


def scattered():
    """Two sequences that keep nine and four tokens, with dropped ones before, between and after."""
    keep = torch.zeros(2, 14, dtype=torch.bool)
    keep[0, [1, 2, 3, 5, 6, 7, 8, 10, 12]] = True
    keep[1, [2, 3, 9, 11]] = True
    return random_tokens(2, 14, 5, dtype=torch.float32), keep


@pytest.mark.parametrize("rubbish", [0.0, 1e30, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ALL)
def test_dropped_positions_never_matter(name, rubbish):
    h, keep = scattered()
    alone = torch.cat([values(name, row[mask][None]) for row, mask in zip(h, keep, strict=True)])
    spoilt = h.masked_fill(~keep[..., None], rubbish)
    torch.testing.assert_close(values(name, spoilt, keep), alone)


@pytest.mark.parametrize("name", ALL)
def test_the_given_hidden_states_are_left_as_they_were(name):
    h, keep = scattered()
    before = h.clone()
    METRICS[name](h, keep)
    torch.testing.assert_close(h, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_memory_layout_of_hidden_states_does_not_matter(name):
    h, keep = scattered()
    for layout in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
        moved = h.permute(layout).contiguous().permute([layout.index(axis) for axis in range(3)])
        torch.testing.assert_close(values(name, moved, keep), values(name, h, keep))


@pytest.mark.parametrize("name", ALL)
def test_one_sequence_does_not_depend_on_the_others_in_its_batch(name):
    h = random_tokens(4, 9, 5, dtype=torch.float32)
    h[1] *= 1e6
    h[2] = torch.nan
    h[3] = 0
    found = METRICS[name](h, kept(h))
    assert found.defined[:2].all()
    for i in range(2):
        torch.testing.assert_close(found.values[i : i + 1], values(name, h[i : i + 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_half_precision_is_summed_in_float32(name, dtype):
    h, keep = scattered()
    half = h.to(dtype)
    found = values(name, half, keep)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, values(name, half.float(), keep), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_float64_stays_float64(name):
    assert values(name, random_tokens(1, 4, 3)).dtype == torch.float64


@pytest.mark.parametrize("name", ALL)
def test_autocast_does_not_shorten_the_digits(name):
    h, keep = scattered()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = values(name, h, keep)
    torch.testing.assert_close(inside, values(name, h, keep), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_values_carry_no_gradient(name):
    h, keep = scattered()
    assert not values(name, h.requires_grad_(), keep).requires_grad


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_gives_no_values(name):
    assert values(name, torch.empty(0, 4, 3)).shape == (0,)


# --- values that do not exist ---------------------------------------------------------------------------------------

UNIT = {"log_hfc_lfc_unit", "largest_norm", "massive"}
MISSING = {
    "every token is zero": (
        [[0.0, 0.0]] * 4,
        set(ALL) - {"dirichlet", "token_norm", "token_norm_spread", "high_frequency"},
    ),
    "one token is nonzero": ([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], {"cosine", "cosine_abs", *UNIT}),
    "the mean is zero": (
        [[3.0, 4.0], [-3.0, -4.0], [1.0, 0.0], [-1.0, 0.0]],
        {"hfc_lfc", "log_hfc_lfc", "log_hfc_lfc_unit"},
    ),
    "the tokens are equal": ([[3.0, 4.0]] * 4, {"log_hfc_lfc", "log_hfc_lfc_unit"}),
    "a token is infinite": ([[torch.inf, 1.0], [1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], set(ALL)),
    "a token is not a number": ([[1.0, torch.nan], [1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], set(ALL)),
    "a norm overflows": ([[3e38, 3e38], [1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], set(ALL)),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_value_is_missing_exactly_where_it_does_not_exist(case):
    rows, missing = MISSING[case]
    found = evaluate(ALL, torch.tensor(rows)[None], torch.ones(1, 4, dtype=torch.bool))
    assert {name for name in ALL if not found[name].defined} == missing
    for name in ALL:
        assert found[name].values.isfinite().all()
    for name in missing:
        assert found[name].values == 0


def test_only_metrics_that_can_be_missing_say_when():
    finite_cases = ("every token is zero", "one token is nonzero", "the mean is zero", "the tokens are equal")
    can_be_missing = set().union(*(MISSING[case][1] for case in finite_cases))
    assert {name for name in ALL if METRICS[name].missing_when} == can_be_missing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mean_that_is_only_rounding_error_gives_no_ratio(dtype):
    h = random_tokens(4, 128, 64, dtype=dtype)
    h = h - h.mean(1, keepdim=True)
    assert not metrics.hfc_lfc(h, kept(h)).defined.any()


def test_a_small_but_real_mean_still_gives_a_ratio():
    h = random_tokens(4, 128, 64, dtype=torch.float32)
    h = h - h.mean(1, keepdim=True) + 1e-5
    torch.testing.assert_close(values("hfc_lfc", h), values("hfc_lfc", h.double()).float(), rtol=1e-2, atol=0)


# --- what raises ----------------------------------------------------------------------------------------------------


def test_a_sequence_is_measurable_from_two_kept_tokens_on():
    keep = torch.tensor([[False, False, False], [False, True, False], [True, False, True], [True, True, True]])
    assert measurable(keep).tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", ALL)
def test_an_unmeasurable_sequence_is_refused_by_number(name):
    keep = torch.tensor([[True, True, True, True], [False, True, False, False]])
    with pytest.raises(BadValue, match=r"(?s)tokens that sequence 1 keeps must be at least 2.*got 1.*measurable"):
        METRICS[name](random_tokens(2, 4, 3), keep)


def test_a_mask_of_another_shape_is_refused():
    # With shapes checked at run time the annotation speaks first; both name the argument.
    with pytest.raises((BadValue, jaxtyping.TypeCheckError), match="keep"):
        metrics.cosine(random_tokens(2, 4, 3), torch.ones(1, 4, dtype=torch.bool))


def test_high_frequency_refuses_tokens_that_are_no_square_grid():
    h = random_tokens(1, 5, 3)
    with pytest.raises(BadValue, match=r"(?s)for high_frequency must be a square.*got 5.*prefix tokens dropped"):
        metrics.high_frequency(h, kept(h))


# --- the table, lookup and evaluate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_metric_explains_itself(name):
    metric = METRICS[name]
    assert metric.name == name
    assert metric is getattr(metrics, name)
    assert metric.definition
    first, blank, *rest = metric.__doc__.splitlines()
    assert (first.count(";"), blank) == (1, "")
    assert "nvariant" in " ".join(rest)


def test_default_metrics_are_in_the_table_and_fit_any_model():
    assert [metric.images_only for metric in lookup(DEFAULT_METRICS)] == [False] * len(DEFAULT_METRICS)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(UnknownName, match=r"Unknown metric 'cosin'\. Close: cosine.*Known: cosine, .*high_frequency"):
        lookup(("hfc_lfc", "cosin"))


def test_one_name_or_one_metric_needs_no_list():
    assert lookup("cosine") == (metrics.cosine,)
    assert lookup(metrics.cosine) == (metrics.cosine,)


def test_a_metric_asked_for_twice_is_refused():
    with pytest.raises(BadValue, match=r"metrics must be names that are all different; got \['cosine', 'cosine'\]"):
        lookup(("cosine", metrics.cosine))


def largest_entry(h, keep):
    return h.masked_fill(~keep[..., None], -torch.inf).amax((1, 2))


def test_a_function_of_the_users_own_is_a_metric_by_its_name():
    h, keep = scattered()
    found = evaluate(("cosine", largest_entry), h, keep)
    assert list(found) == ["cosine", "largest_entry"]
    torch.testing.assert_close(found["largest_entry"].values, torch.stack([h[0][keep[0]].max(), h[1][keep[1]].max()]))


def test_a_number_that_the_users_function_cannot_give_is_missing():
    def undefined(h, keep):
        return torch.tensor([torch.nan, 1.0])

    found = evaluate(undefined, *scattered())["undefined"]
    assert found.defined.tolist() == [False, True]
    assert found.values.tolist() == [0, 1]


@pytest.mark.parametrize("wrong", [1.0, torch.ones(()), torch.ones(2, 14)], ids=["float", "scalar", "per token"])
def test_a_function_that_does_not_answer_per_sequence_is_refused(wrong):
    def mine(h, keep):
        return wrong

    words = r"metric mine returns must be \(batch,\), here \(2,\)|The metric 'mine' returns a float, not a tensor"
    with pytest.raises((BadValue, UserCodeFailed), match=words):
        evaluate(mine, *scattered())


def test_a_function_with_a_built_in_name_is_refused():
    def cosine(h, keep):
        return h.sum((1, 2))

    with pytest.raises(BadValue, match="name of your metric must be none of the built-in ones; got 'cosine'"):
        lookup(cosine)


def test_metrics_evaluated_together_equal_each_alone():
    h, keep = scattered()
    together = evaluate(ALL, h, keep)
    assert list(together) == list(ALL)
    for name in ALL:
        torch.testing.assert_close(together[name].values, values(name, h, keep), rtol=0, atol=0)


def test_shared_sums_are_computed_once():
    moments = Moments.of(*scattered())
    assert moments.norms is moments.norms
    assert moments.centred is moments.centred
    assert moments.singular_values is moments.singular_values


def test_a_span_kept_by_all_sequences_is_not_copied():
    h = random_tokens(2, 5, 3, dtype=torch.float32)
    keep = kept(h)
    keep[:, 0] = False
    assert Moments.of(h, keep).x.data_ptr() == h[:, 1:].data_ptr()


def test_tokens_are_free_as_soon_as_nobody_holds_them():
    """Not when the garbage collector comes by: by then the tokens of many places would be in memory."""
    gc.disable()
    try:
        h = torch.randn(2, 5, 4)
        moments = Moments.of(h, kept(h))
        assert moments.without_largest.gram.shape == (2, 4, 4)
        seen = weakref.ref(moments)
        del moments
        assert seen() is None
    finally:
        gc.enable()
