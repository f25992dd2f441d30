"""Random layers for the theorems: any sizes, any attention, in float64, from a seed."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from oversmooth.prediction.asymptotics import Asymptotics, asymptotics_each
from oversmooth.prediction.operator import LayerOperator, ValuePath, centre
from oversmooth.prediction.radii import Radius, ac_radii

every_time = settings(max_examples=200, derandomize=True, deadline=None, database=None)
"""At least 200 cases, the same ones in every run."""
seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(source: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def random_attention(source: torch.Generator, heads: int, tokens: int, *, is_causal: bool = False) -> torch.Tensor:
    """Positive rows that sum to one, from nearly uniform to nearly one-hot."""
    sharpness = 10 ** (2 * torch.rand(heads, 1, 1, generator=source, dtype=torch.float64) - 1)
    scores = sharpness * normal(source, heads, tokens, tokens)
    if is_causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1)


@st.composite
def layers(draw, *, is_causal=False, with_norm_after=False, one_head=False, skip=1.0):
    """A layer of any shape: grouped or not, with more or fewer value channels than features."""
    source = generator(draw(seeds))
    tokens, d_model = draw(st.integers(2, 6)), draw(st.integers(1, 8))
    n_kv, group, d_head = (
        (1, 1, draw(st.integers(1, 4)))
        if one_head
        else (
            draw(st.integers(1, 3)),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
        )
    )
    path = ValuePath(
        w_v=normal(source, n_kv, d_head, d_model) / d_model**0.5,
        w_o=normal(source, d_model, n_kv * group, d_head) / (n_kv * d_head) ** 0.5,
        after_weight=normal(source, d_model) if with_norm_after else None,
        after_centres=with_norm_after and d_model > 1,
    )
    scale = draw(st.sampled_from([1.0, 0.3, 4.0]))
    attention = random_attention(source, n_kv * group, tokens, is_causal=is_causal)
    return LayerOperator(path=path, attention=attention, scale=scale, skip=skip)


def dense(operator: LayerOperator) -> torch.Tensor:
    """The matrix of T on all features, (token, d_model) flattened, acting on rows from the right."""
    size = operator.tokens * operator.path.d_model
    eye = torch.eye(size, dtype=torch.float64).view(size, operator.tokens, operator.path.d_model)
    return operator.apply(eye).flatten(1)


def dense_reference(operator: LayerOperator) -> torch.Tensor:
    """The same built head by head from Kronecker products, without the library's code."""
    path = operator.path
    n, d = operator.tokens, path.d_model
    total = operator.skip * torch.eye(n * d, dtype=torch.float64)
    for head in range(path.n_heads):
        h = path.w_v[head // (path.n_heads // path.n_kv)].T @ path.w_o[:, head].T
        total = total + torch.kron(operator.attention[head].T.contiguous(), h) / operator.scale
    if path.after_weight is not None:
        centring = torch.eye(d, dtype=torch.float64) - path.after_centres / d
        total = total @ torch.kron(torch.eye(n, dtype=torch.float64), centring * path.after_weight)
    return total


def varying_basis(tokens: int, d_model: int) -> torch.Tensor:
    """Orthonormal rows that span the centred features."""
    q = torch.linalg.qr(centre(torch.eye(tokens, dtype=torch.float64))[:, : tokens - 1]).Q
    return torch.kron(q.T.contiguous(), torch.eye(d_model, dtype=torch.float64))


def assert_same_spectrum(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Two lists of eigenvalues are the same up to order: closest pairs, and the sum, which order cannot change."""
    from scipy.optimize import linear_sum_assignment

    assert len(a) == len(b)
    distance = (a[:, None] - b[None, :]).abs()
    rows, columns = linear_sum_assignment(distance.numpy())
    size = max(a.abs().max().item(), 1e-3)
    torch.testing.assert_close(a.sum(), b.sum(), rtol=0, atol=1e-9 * len(a) * max(size, 1))
    # A k-fold eigenvalue splits by the k-th root of the rounding error.
    assert distance[rows, columns].max().item() <= max(tolerance, 1e-3 * size)


def asymptotics(operator: LayerOperator, **options: int) -> Asymptotics:
    return asymptotics_each([operator], **options)[0]


def ac_radius(operator: LayerOperator, *, against: float | None = None, **options: float) -> Radius:
    return ac_radii([operator], [against], **options)[0]
