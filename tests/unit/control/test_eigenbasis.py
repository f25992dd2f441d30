"""The eigenbasis form: eigenvalues stay in the interval, heads decouple, gradients are right and find their way back."""

import copy

import pytest
import torch

from oversmooth.control.eigenbasis import (
    Basis,
    BoundedBasis,
    Eigenbasis,
    GeneralBasis,
    Heads,
    OrthogonalBasis,
    random_columns,
    returning_clip,
)
from oversmooth.control.projection import EigenvalueForm, fresh_eigenbasis, kept_eigenbasis, moved
from oversmooth.errors import BadValue, CannotControl, IllConditioned, NotSupported, UnknownName

SIZES = {
    "one": Heads(d_model=1, n_heads=1, n_kv=1, d_head=1),
    "square": Heads(d_model=12, n_heads=3, n_kv=3, d_head=4),
    "tall": Heads(d_model=12, n_heads=2, n_kv=2, d_head=3),
    "grouped": Heads(d_model=12, n_heads=4, n_kv=2, d_head=3),
    "grouped-square": Heads(d_model=12, n_heads=6, n_kv=3, d_head=4),
    "multi-query": Heads(d_model=12, n_heads=4, n_kv=1, d_head=5),
}
FORMS = {
    "orthogonal": {"basis": "orthogonal"},
    "general": {"basis": "general"},
    "bounded": {"basis": "general", "max_condition": 20.0},
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_eigenbasis(heads: Heads, form: str, low: float = -1.0, high: float = 0.0, seed: int = 0) -> Eigenbasis:
    """In float64, with every parameter moved away from where it starts, and some psi outside the interval."""
    like = torch.empty(0, dtype=torch.float64)
    eigenbasis = fresh_eigenbasis(heads, EigenvalueForm(low=low, high=high, **FORMS[form]), like, generator(seed))
    with torch.no_grad():
        for parameter in eigenbasis.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed + 1), dtype=torch.float64)
    return eigenbasis


def value_map(heads: Heads, w_v: torch.Tensor, w_o: torch.Tensor) -> torch.Tensor:
    values = w_v.reshape(heads.n_kv, heads.d_head, -1).repeat_interleave(heads.per_group, 0)
    return torch.einsum("dhk,hke->de", w_o.reshape(-1, heads.n_heads, heads.d_head), values)


# --- the defining property ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [(-1.0, 0.0), (0.0, 1.0), (-0.3, 0.7)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_eigenvalue_lies_in_the_interval(size, form, interval):
    heads, (low, high) = SIZES[size], interval
    eigenbasis = random_eigenbasis(heads, form, low, high)
    w_v, w_o = eigenbasis.weights()
    found = torch.linalg.eigvals(value_map(heads, w_v, w_o).detach())
    expected = torch.cat([eigenbasis.eigenvalues().detach(), torch.zeros(heads.d_model - heads.channels)])
    torch.testing.assert_close(found.real.sort().values, expected.sort().values.double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.imag, torch.zeros_like(found.imag), rtol=0, atol=1e-9)
    assert eigenbasis.contains(w_v, w_o)
    assert low - 1e-12 <= eigenbasis.eigenvalues().min() <= eigenbasis.eigenvalues().max() <= high + 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_in_its_basis_every_channel_evolves_by_its_own_eigenvalue_whatever_the_attention(size, form):
    heads = SIZES[size]
    eigenbasis = random_eigenbasis(heads, form)
    w_v, w_o = (weight.detach() for weight in eigenbasis.weights())
    attention = torch.rand(heads.n_heads, 7, 7, generator=generator(), dtype=torch.float64).softmax(-1)
    x = torch.randn(7, heads.d_model, generator=generator(1), dtype=torch.float64)
    values = (x @ w_v.T).reshape(7, heads.n_kv, heads.d_head).repeat_interleave(heads.per_group, 1)
    mixed = torch.einsum("hst,thk->shk", attention, values)
    after = x + torch.einsum("shk,dhk->sd", mixed, w_o.reshape(-1, heads.n_heads, heads.d_head))
    columns = eigenbasis.basis.frame()[0].detach()
    shares = torch.ones(heads.n_kv, 1, heads.d_head, dtype=torch.float64)
    if eigenbasis.share_logits is not None:
        shares = eigenbasis.share_logits.detach().softmax(1)
    for channel, eigenvalue in enumerate(eigenbasis.eigenvalues().detach()):
        kv, k = divmod(channel, heads.d_head)
        own = attention[kv * heads.per_group : (kv + 1) * heads.per_group]
        effective = torch.einsum("h,hst->st", shares[kv, :, k], own)
        torch.testing.assert_close(effective.sum(1), torch.ones(7, dtype=torch.float64))  # row-stochastic again
        y = x @ columns[:, channel]
        torch.testing.assert_close(after @ columns[:, channel], y + eigenvalue * (effective @ y), rtol=0, atol=1e-9)


def test_contains_can_fail():
    heads = SIZES["square"]
    eigenbasis = random_eigenbasis(heads, "orthogonal")
    w_v, w_o = eigenbasis.weights()
    assert not eigenbasis.contains(-w_v, w_o)  # eigenvalues of the other sign
    assert not eigenbasis.contains(w_v.roll(4, 0), w_o)  # every head reads what belongs to another
    grouped = random_eigenbasis(SIZES["grouped"], "orthogonal", -1.0, 1.0)
    w_v, w_o = grouped.weights()
    one_against_the_other = w_o.reshape(12, 2, 2, 3) * torch.tensor([3.0, -2.0])[:, None]
    assert not grouped.contains(w_v, one_against_the_other.reshape(12, 12))


def test_more_value_directions_than_the_width_are_refused_with_the_reason():
    with pytest.raises(CannotControl, match=r"make 20 value directions, more than the width 16"):
        Heads(d_model=16, n_heads=4, n_kv=4, d_head=5).require_one_basis()
    Heads(d_model=16, n_heads=8, n_kv=4, d_head=4).require_one_basis()  # only value heads count


@pytest.mark.parametrize("interval", [(0.0, 0.0), (1.0, -1.0), (float("-inf"), 0.0), (float("nan"), 1.0)])
def test_an_interval_that_is_none_is_refused(interval):
    heads = SIZES["one"]
    with pytest.raises(BadValue, match="interval"):
        Eigenbasis(heads, OrthogonalBasis(torch.ones(1, 1)), torch.zeros(1), *interval)


# --- bases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.1, 10.0, 1000.0])
@pytest.mark.parametrize("shape", [(1, 1), (6, 1), (6, 6), (17, 5)])
def test_orthogonal_columns_are_orthonormal_whatever_the_parameters(shape, scale):
    basis = OrthogonalBasis(torch.linalg.qr(torch.randn(shape, generator=generator())).Q)
    with torch.no_grad():
        basis.tangent += scale * torch.randn(shape, generator=generator(1))
    columns = basis.columns()
    torch.testing.assert_close(columns.T @ columns, torch.eye(shape[1]), rtol=0, atol=2e-6 * max(1, scale / 10))


@pytest.mark.parametrize("make", [OrthogonalBasis, GeneralBasis, lambda start: BoundedBasis(start, 10.0)])
@pytest.mark.parametrize("shape", [(6, 6), (17, 5)])
def test_a_basis_starts_where_it_is_told_and_its_rows_are_dual(make, shape):
    start = torch.linalg.qr(torch.randn(shape, generator=generator(), dtype=torch.float64)).Q
    columns, rows = make(start).frame()
    torch.testing.assert_close(columns, start)
    torch.testing.assert_close(rows @ columns, torch.eye(shape[1], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 6), (9, 4)])
def test_the_gradient_of_the_tangent_at_the_start_is_the_riemannian_gradient(shape):
    start = torch.linalg.qr(torch.randn(shape, generator=generator(), dtype=torch.float64)).Q
    euclidean = torch.randn(shape, generator=generator(1), dtype=torch.float64)
    basis = OrthogonalBasis(start)
    (basis.columns() * euclidean).sum().backward()
    along = start.T @ euclidean
    projected = euclidean - start @ (along + along.T) / 2  # onto the tangent space of the Stiefel manifold
    torch.testing.assert_close(basis.tangent.grad, projected)


def test_a_general_basis_stops_with_a_clear_error_before_it_overflows():
    start = torch.eye(4)
    start[:, 1] = start[:, 0] + 1e-7 * start[:, 1]
    with pytest.raises(IllConditioned, match=r"above 1e\+06") as raised:
        GeneralBasis(start).frame()
    assert all(words in str(raised.value) for words in ("max_condition=100", "basis='orthogonal'", "learning rate"))
    with pytest.raises(IllConditioned, match="nan"):
        GeneralBasis(torch.full((4, 4), float("nan"))).frame()
    GeneralBasis(start.double()).frame()  # float64 has the digits


def test_a_bounded_basis_cannot_pass_its_condition_number():
    basis = BoundedBasis(torch.randn(8, 8, generator=generator(), dtype=torch.float64), 30.0)
    for scale in (0.0, 1.0, 1e3):
        with torch.no_grad():
            basis.spread += scale * torch.randn(8, generator=generator(1))
        assert torch.linalg.cond(basis.frame()[0]) <= 30.0 * (1 + 1e-9)
    with pytest.raises(BadValue, match="max_condition"):
        BoundedBasis(torch.eye(2), 1.0)


def test_random_columns_depend_on_the_generator_only_and_prefer_no_direction():
    heads = Heads(d_model=3, n_heads=1, n_kv=1, d_head=2)
    draws = torch.stack([random_columns(heads, generator(seed)) for seed in range(800)])
    torch.testing.assert_close(draws[5], random_columns(heads, generator(5)))
    torch.testing.assert_close(draws.mean(0), torch.zeros(3, 2), rtol=0, atol=0.08)
    torch.testing.assert_close(draws.square().mean(0), torch.full((3, 2), 1 / 3), rtol=0, atol=0.05)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_agree_with_finite_differences(size, form):
    eigenbasis = random_eigenbasis(SIZES[size], form)
    with torch.no_grad():
        eigenbasis.psi.clamp_(-0.9, -0.1)  # at the ends of the interval there is no derivative to compare with
    names, start = zip(*eigenbasis.named_parameters(), strict=True)

    def weights(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.functional_call(Weights(eigenbasis), dict(zip(_inside(names), values, strict=True)), ())

    assert torch.autograd.gradcheck(weights, start, atol=1e-6)


class Weights(torch.nn.Module):
    def __init__(self, eigenbasis: Eigenbasis):
        super().__init__()
        self.inner = eigenbasis

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.weights()


def _inside(names: tuple[str, ...]) -> list[str]:
    return [f"inner.{name}" for name in names]


def test_the_clip_passes_gradients_inside_and_those_that_lead_back():
    x = torch.tensor([-2.0, -2.0, -0.5, 1.0, 1.0], requires_grad=True)
    clipped = returning_clip(x, -1.0, 0.0)
    assert clipped.tolist() == [-1.0, -1.0, -0.5, 0.0, 0.0]
    clipped.backward(torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]))  # descent moves against the gradient
    assert x.grad.tolist() == [0.0, -1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_psi_that_left_the_interval_learns_its_way_back(optimizer):
    psi = torch.nn.Parameter(torch.tensor([0.4, -1.7]))
    search = optimizer([psi], lr=0.05)
    for _ in range(200):
        search.zero_grad()
        (returning_clip(psi, -1.0, 0.0) + 0.5).square().sum().backward()
        search.step()
    torch.testing.assert_close(psi.detach(), torch.tensor([-0.5, -0.5]), rtol=0, atol=0.02)


def test_a_psi_does_not_run_away_while_the_loss_wants_more_than_the_interval_allows():
    psi = torch.nn.Parameter(torch.tensor([-0.1]))
    search = torch.optim.SGD([psi], lr=0.1)
    for _ in range(500):
        search.zero_grad()
        (returning_clip(psi, -1.0, 0.0) - 5.0).square().sum().backward()
        search.step()
    assert 0.0 <= psi.item() <= 1.1  # left by one step at most


def test_the_gradient_of_a_plain_clip_would_be_lost_for_good():
    psi = torch.tensor([0.4], requires_grad=True)
    (psi.clamp(-1.0, 0.0) + 0.5).square().sum().backward()
    assert psi.grad.item() == 0.0  # what the tests above protect from


# --- evaluation -----------------------------------------------------------------------------------------------------


class Counting(Basis):
    def __init__(self, inner: Basis):
        super().__init__()
        self.inner, self.count = inner, 0

    def frame(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return self.inner.frame()


@pytest.fixture
def counted() -> Eigenbasis:
    eigenbasis = random_eigenbasis(SIZES["square"], "orthogonal")
    eigenbasis.basis = Counting(eigenbasis.basis)
    return eigenbasis


def test_value_and_output_weight_of_one_pass_are_evaluated_once(counted):
    for passes in (1, 2, 3):
        counted.value_weight()
        counted.output_weight()
        assert counted.basis.count == passes


def test_what_is_kept_for_the_output_weight_is_never_stale(counted):
    counted.value_weight()
    with torch.no_grad():
        counted.psi -= 0.1
        counted.basis.inner.tangent += 0.1
    torch.testing.assert_close(counted.output_weight(), counted.weights()[1], rtol=0, atol=0)
    with torch.no_grad():
        counted.value_weight()
    assert counted.output_weight().requires_grad  # kept without a graph, asked for with one


def test_gradients_may_be_accumulated_over_several_passes(counted):
    for _ in range(3):
        (counted.value_weight().square().sum() + counted.output_weight().sum()).backward()
    thrice = [parameter.grad.clone() for parameter in counted.parameters()]
    counted.zero_grad()
    value, output = counted.weights()
    (value.square().sum() + output.sum()).backward()
    for accumulated, parameter in zip(thrice, counted.parameters(), strict=True):
        torch.testing.assert_close(accumulated, 3 * parameter.grad)


def test_a_copy_in_the_middle_of_a_pass_is_independent(counted):
    counted.value_weight()
    twin = copy.deepcopy(counted)
    with torch.no_grad():
        twin.psi.zero_()
    torch.testing.assert_close(twin.value_weight(), torch.zeros(12, 12, dtype=torch.float64))
    assert counted.value_weight().abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_factorisation_is_in_float32_under_autocast_and_with_half_parameters(form, dtype):
    heads = SIZES["grouped"]
    eigenbasis = fresh_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0, **FORMS[form]), torch.empty(0), generator())
    exact = eigenbasis.weights()
    with torch.autocast("cpu", dtype=dtype):
        for found, expected in zip(eigenbasis.weights(), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    halves = fresh_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0), torch.empty(0, dtype=dtype), generator())
    assert {parameter.dtype for parameter in halves.parameters()} == {torch.float32}
    assert {weight.dtype for weight in eigenbasis.to(dtype).weights()} == {torch.float32}


# --- where it starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_fresh_eigenvalues_are_uniform_in_the_interval_and_repeatable(size):
    heads, form = SIZES[size], EigenvalueForm(low=0.2, high=0.6)
    first, second = (fresh_eigenbasis(heads, form, torch.empty(0), generator(3)) for _ in range(2))
    assert ((first.psi >= 0.2) & (first.psi <= 0.6)).all()
    for one, other in zip(first.weights(), second.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def random_weights(heads: Heads, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    w_v = torch.randn(heads.n_kv, heads.d_head, heads.d_model, generator=generator(seed), dtype=torch.float64)
    w_o = torch.randn(heads.d_model, heads.n_heads, heads.d_head, generator=generator(seed + 1), dtype=torch.float64)
    return w_v / heads.d_model**0.5, w_o / heads.d_model**0.5


def move(heads: Heads, eigenbasis: Eigenbasis, w_v: torch.Tensor, w_o: torch.Tensor):
    value, output = eigenbasis.weights()
    return moved(w_v, w_o, value.reshape(w_v.shape), output.reshape(w_o.shape))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_weights_that_have_the_form_already_are_kept_exactly(size, form):
    heads = SIZES[size]
    orthogonal = random_eigenbasis(heads, "orthogonal")
    value, output = (weight.detach() for weight in orthogonal.weights())
    w_v, w_o = value.reshape(heads.n_kv, heads.d_head, -1), output.reshape(-1, heads.n_heads, heads.d_head)
    kept = kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0, **FORMS[form]), w_v, w_o)
    _, whole = move(heads, kept, w_v, w_o)
    assert whole is None or whole < 2e-3  # a head that owned nothing of an eigenvalue keeps a share of 1e-4


@pytest.mark.parametrize("size", [name for name in SIZES if name != "one"])
def test_a_general_basis_starts_nearer_than_an_orthogonal_one_and_neither_moves_more_than_needed(size):
    heads = SIZES[size]
    w_v, w_o = random_weights(heads)
    squares = {}
    for form, options in FORMS.items():
        kept = kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0, **options), w_v, w_o)
        by_head, _ = move(heads, kept, w_v, w_o)
        squares[form] = sum(distance**2 for distance in by_head)
        assert kept.contains(*kept.weights())
    assert squares["general"] < 0.9 * squares["orthogonal"]
    assert squares["bounded"] <= squares["orthogonal"] + 1e-9
    assert squares["orthogonal"] < heads.n_heads  # setting H to zero would move every head by one


def test_the_distance_that_is_reported_is_that_of_the_dense_maps():
    heads = SIZES["grouped"]
    (w_v, w_o), (new_v, new_o) = random_weights(heads), random_weights(heads, 7)
    by_head, whole = moved(w_v, w_o, new_v, new_o)
    for head in range(heads.n_heads):
        old, new = w_o[:, head] @ w_v[head // 2], new_o[:, head] @ new_v[head // 2]
        torch.testing.assert_close(by_head[head], ((new - old).norm() / old.norm()).item())
    old, new = value_map(heads, w_v, w_o), value_map(heads, new_v, new_o)
    torch.testing.assert_close(whole, ((new - old).norm() / old.norm()).item())
    assert moved(0 * w_v, w_o, new_v, new_o) == ([None] * 4, None)


def test_a_start_from_zero_weights_is_finite():
    heads = SIZES["grouped"]
    w_v, w_o = random_weights(heads)
    for options in FORMS.values():
        kept = kept_eigenbasis(heads, EigenvalueForm(low=-1.0, high=0.0, **options), 0 * w_v, 0 * w_o)
        assert all(torch.isfinite(weight).all() for weight in kept.weights())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"basis": "diagonal"}, UnknownName),
        ({"max_condition": 5.0}, NotSupported),
        ({"low": 1.0}, BadValue),
        ({"low": 0.0, "basis": "general"}, BadValue),
    ],
)
def test_a_form_that_makes_no_sense_is_refused(wrong, error):
    with pytest.raises(error, match="interval" if "low" in wrong else next(iter(wrong))):
        EigenvalueForm(**{"low": -1.0, "high": 0.0, **wrong})
