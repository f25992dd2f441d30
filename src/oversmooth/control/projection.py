"""Where the parametrization starts: from pretrained weights, kept as well as the interval allows, or from a random draw.

`kept` projects. For each value head it takes the symmetric part of the head's own map `H_h = W_V^h W_O^h`, and of its
eigenvectors the `d_head` ones that lose least when their eigenvalues are clipped to the interval. Heads own separate
parts of one basis, but these subspaces overlap: they are made orthonormal together by the polar factor of the eigenvectors
weighted with their clipped eigenvalues, which moves large ones least. Inside its part each head is then diagonalised
again, and what is on the diagonal is clipped. That is the start of an orthogonal basis.

A general basis goes on from there: `refine` lowers `sum_h norm(H_h - H'_h)^2` over all its parameters by L-BFGS, which
finds the nearest maps in the neighbourhood, typically a third closer. Either way H moves: a symmetric map with
eigenvalues of one sign is far from what pretrained layers have. How far is reported, per layer and per head.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.control.eigenbasis import (
    Basis,
    BoundedBasis,
    Eigenbasis,
    GeneralBasis,
    Heads,
    OrthogonalBasis,
    full_precision,
    random_columns,
)
from oversmooth.environment.threads import one_thread
from oversmooth.errors import BadValue, IllConditioned, NotSupported, UnknownName
from oversmooth.models.canonical import AttentionWeights

BASES = ("orthogonal", "general")
REFINING_STEPS = 30
DOUBLE_UP_TO = 1024
"""Largest width whose start is computed in float64; above it the SVD would take minutes per layer."""

ONE_THREAD_UP_TO = 256
"""Largest width for which more threads would only wait for each other."""
LEAST_WEIGHT = 1e-6
"""Relative weight of a direction whose eigenvalue was clipped to zero: it gives way to all others."""
LEAST_EIGENVALUE = 1e-2
"""Relative size below which an eigenvalue counts as zero when a value bias is solved for: it would become large."""

Values = Float[Tensor, "kv d_head d_model"]
Outputs = Float[Tensor, "d_model head d_head"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Orthonormal columns, eigenvalues and the shares of heads in them."""

    columns: Float[Tensor, "d_model channel"]
    psi: Float[Tensor, " channel"]
    shares: Float[Tensor, "kv group d_head"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the weights shall become."""

    low: float
    high: float
    basis: str = "orthogonal"
    max_condition: float | None = None

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise UnknownName("basis", self.basis, BASES)
        if self.max_condition is not None and self.basis != "general":
            raise NotSupported(
                "max_condition", f"with basis={self.basis!r}", "only a general basis can be ill-conditioned"
            )
        if not -math.inf < self.low < self.high < math.inf:
            raise BadValue("The interval", (self.low, self.high), "two finite numbers, the smaller one first")


def fresh_eigenbasis(heads: Heads, form: Form, like: Tensor, generator: torch.Generator | None = None) -> Eigenbasis:
    """Orthonormal columns without preference and eigenvalues uniform in the interval, for training from scratch."""
    dtype = full_precision(like.new_empty(0)).dtype
    columns = random_columns(heads, generator, dtype)
    psi = form.low + (form.high - form.low) * torch.rand(heads.channels, generator=generator, dtype=dtype)
    return _eigenbasis(heads, form, Start(columns=columns, psi=psi), like)


def kept_eigenbasis(heads: Heads, form: Form, w_v: Values, w_o: Outputs) -> Eigenbasis:
    """Close to the given weights, as the head of this module says."""
    precise = torch.float64 if heads.d_model <= DOUBLE_UP_TO else torch.float32
    start = kept(heads, w_v.to(precise), w_o.to(precise), form.low, form.high)
    eigenbasis = _eigenbasis(heads, form, start, w_v)
    if form.basis == "general":
        refine(eigenbasis, w_v, w_o)
    return eigenbasis


def _eigenbasis(heads: Heads, form: Form, start: Start, like: Tensor) -> Eigenbasis:
    """On the device of `like`, in its precision but never in a half one."""
    to = full_precision(like.new_empty(0))
    columns, psi = start.columns.to(to), start.psi.to(to)
    basis: Basis
    if form.basis == "orthogonal":
        basis = OrthogonalBasis(columns)
    elif form.max_condition is None:
        basis = GeneralBasis(columns)
    else:
        basis = BoundedBasis(columns, form.max_condition)
    return Eigenbasis(heads, basis, psi, form.low, form.high, start.shares)


# --- the orthogonal start -------------------------------------------------------------------------------------------


def kept(heads: Heads, w_v: Values, w_o: Outputs, low: float, high: float) -> Start:
    """The start of an orthogonal basis close to the given weights."""
    grouped = w_o.unflatten(1, (heads.n_kv, heads.per_group))
    found = [_own_directions(w_v[g], grouped[:, g].flatten(1), heads, low, high) for g in range(heads.n_kv)]
    directions, sizes = torch.cat([own for own, _ in found], 1), torch.cat([size for _, size in found])
    largest = sizes.max().item() or 1.0
    weighted = directions * sizes.clamp(min=LEAST_WEIGHT * largest)
    left, _, right = torch.linalg.svd(weighted, full_matrices=False)
    columns, coefficients = [], []
    for g, part in enumerate((left @ right).split(heads.d_head, 1)):
        reads = w_v[g] @ part
        cores = torch.stack([(part.T @ grouped[:, g, h]) @ reads for h in range(heads.per_group)])
        cores = (cores + cores.mT) / 2
        turn = torch.linalg.eigh(cores.sum(0)).eigenvectors
        columns.append(part @ turn)
        coefficients.append((turn.T @ cores @ turn).diagonal(dim1=1, dim2=2))
    lambdas = _nearest_allowed(torch.stack(coefficients), low, high)
    totals = lambdas.sum(1, keepdim=True)
    is_zero = totals == 0
    shares = torch.where(is_zero, 1 / heads.per_group, lambdas / totals.masked_fill(is_zero, 1))
    return Start(columns=torch.cat(columns, 1), psi=totals.flatten(), shares=shares if heads.per_group > 1 else None)


def _own_directions(
    reads: Float[Tensor, "d_head d_model"],
    writes: Float[Tensor, "d_model written"],
    heads: Heads,
    low: float,
    high: float,
) -> tuple[Float[Tensor, "d_model d_head"], Float[Tensor, " d_head"]]:
    """Directions in which clipping the symmetric part of a value head's map loses least, and how much they weigh."""
    span = torch.linalg.qr(torch.cat([writes, reads.T], 1)).Q
    written = (span.T @ writes).unflatten(1, (heads.per_group, heads.d_head)).sum(1)
    core = written @ (reads @ span)
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    clipped = values.clamp(low, high)
    gain = values.square() - (values - clipped).square()
    best = gain.argsort(descending=True)[: heads.d_head]
    return span @ vectors[:, best], clipped[best].abs()


def _nearest_allowed(
    wanted: Float[Tensor, "kv group d_head"], low: float, high: float
) -> Float[Tensor, "kv group d_head"]:
    """The nearest values of one sign per channel whose sum over the group lies in the interval."""
    sides = []
    if high > 0:
        sides.append(_nearest_positive(wanted, max(low, 0.0), high))
    if low < 0:
        sides.append(-_nearest_positive(-wanted, max(-high, 0.0), -low))
    if len(sides) == 1:
        return sides[0]
    first, second = ((side - wanted).square().sum(1, keepdim=True) for side in sides)
    return torch.where(first <= second, sides[0], sides[1])


def _nearest_positive(
    wanted: Float[Tensor, "kv group d_head"], least: float, most: float
) -> Float[Tensor, "kv group d_head"]:
    """Projection onto `x >= 0, least <= sum x <= most`: lower (or raise) all by the same amount, never below zero."""
    positive = wanted.clamp(min=0)
    total = positive.sum(1, keepdim=True)
    target = total.clamp(least, most)
    ordered = wanted.sort(1, descending=True).values
    count = torch.arange(1, wanted.shape[1] + 1, device=wanted.device).view(1, -1, 1)
    excess = (ordered.cumsum(1) - target) / count
    active = (ordered - excess > 0).sum(1, keepdim=True).clamp(min=1)
    shifted = (wanted - excess.gather(1, active - 1)).clamp(min=0)
    return torch.where(target == total, positive, shifted)


# --- distances ------------------------------------------------------------------------------------------------------


def refine(eigenbasis: Eigenbasis, w_v: Values, w_o: Outputs, steps: int = REFINING_STEPS) -> None:
    """Moves all parameters so that the maps of the heads come as close to the given ones as a local search finds."""
    dtype = eigenbasis.psi.dtype
    w_v, w_o = w_v.detach().to(dtype), w_o.detach().to(dtype)
    scale = _squared_distances(w_v, w_o, torch.zeros_like(w_v), torch.zeros_like(w_o)).sum()
    parameters = list(eigenbasis.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    search = torch.optim.LBFGS(parameters, max_iter=steps, history_size=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value, output = eigenbasis.weights()
        squares = _squared_distances(w_v, w_o, value.view_as(w_v), output.reshape(w_o.shape))
        distance = squares.sum() / scale
        distance.backward()
        return distance

    first, last = 0.0, 0.0
    if scale > 0:
        is_small = w_o.shape[0] <= ONE_THREAD_UP_TO
        with (
            torch.enable_grad(),
            one_thread(is_small),
            suppress(IllConditioned),
        ):  # then back to the start, which is well conditioned
            first = loss().item()
            search.step(loss)
            last = loss().item()
    search.zero_grad()
    if not 0 < last < first:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


def _squared_distances(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> Float[Tensor, " head"]:
    """`norm(W_O W_V - W_O' W_V')^2` of every head, from Gram matrices of size `2 d_head`."""
    group = w_o.shape[1] // w_v.shape[0]
    left = torch.cat([w_o, -new_o], 2).transpose(0, 1)
    right = torch.cat([w_v, new_v], 1).repeat_interleave(group, 0)
    return ((left.mT @ left) * (right @ right.mT)).sum((1, 2)).clamp(min=0)


def moved(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> tuple[list[float | None], float | None]:
    """How far the map of every head and that of the layer moved, relative to its norm; `None` where that was zero."""
    w_v, w_o, new_v, new_o = (tensor.detach().double() for tensor in (w_v, w_o, new_v, new_o))
    nothing = torch.zeros_like(w_v), torch.zeros_like(w_o)
    change, size = _squared_distances(w_v, w_o, new_v, new_o), _squared_distances(w_v, w_o, *nothing)
    heads = [_ratio(a, b) for a, b in zip(change.tolist(), size.tolist(), strict=True)]
    old, new = _as_one_head(w_v, w_o), _as_one_head(new_v, new_o)
    none = torch.zeros_like(old[0]), torch.zeros_like(old[1])
    return heads, _ratio(_squared_distances(*old, *new).item(), _squared_distances(*old, *none).item())


def _as_one_head(value: Values, output: Outputs) -> tuple[Tensor, Tensor]:
    """Weights of a single head whose map is that of the whole layer."""
    summed = output.unflatten(1, (value.shape[0], -1)).sum(2)
    return value.flatten(0, 1)[None], summed.flatten(1)[:, None]


def _ratio(change: float, size: float) -> float | None:
    return (change / size) ** 0.5 if size > 0 else None


# --- biases ---------------------------------------------------------------------------------------------------------


def constant(weights: AttentionWeights) -> Float[Tensor, " d_model"] | None:
    """`W_O b_V + b_O`, the vector that attention adds to every token alike; `None` without biases. In float64."""
    if weights.b_v is None:
        return None if weights.b_o is None else weights.b_o.double()
    added = torch.einsum("dkc,kc->d", weights.w_o_shared.double(), weights.b_v.double())
    return added if weights.b_o is None else added + weights.b_o.double()


def with_constant_kept(old: AttentionWeights, new: AttentionWeights) -> AttentionWeights:
    """The new weights with biases that add the same vector to every token as the old ones did.

    The output bias takes the difference where there is one. Where there is none the value bias is solved for, which is
    exact when every value head has one reader and otherwise the best that nonzero eigenvalues allow.
    """
    wanted = constant(old)
    if wanted is None or old.b_v is None:
        return new
    if old.b_o is not None:
        found = constant(replace(new, b_v=old.b_v, b_o=torch.zeros_like(old.b_o)))
        assert found is not None, "there is a value bias"
        return replace(new, b_v=old.b_v, b_o=(wanted - found).to(old.b_o.dtype))
    output = new.w_o_shared.double().flatten(1).cpu()
    solved = torch.linalg.lstsq(output, wanted.cpu()[:, None], rcond=LEAST_EIGENVALUE, driver="gelsd").solution
    return replace(new, b_v=solved.reshape(old.b_v.shape).to(old.b_v))
