"""Where the eigenbasis form starts: the nearest form to pretrained weights, or a draw.

For orthonormal columns V, heads owning slices of them, and eigenvalues in the interval, it makes

    norm(H - H')^2 + sum_h norm(H_h - H'_h)^2                                              (Frobenius)

small: what a layer does where all heads attend alike, and what each head does where they attend apart. Neither part
alone will do: the nearest layer map takes heads farther from their own maps than zero is, and the nearest maps of heads
add up to a layer map that is farther than zero. Both steps below are exact, so that the distance never grows:

    eigenvalues   for given V all channels are separate: each takes the nearest value that is allowed
    columns       for given eigenvalues the sum of quadratic forms is bounded from below by its tangent, whose maximum over
                  orthonormal columns is a polar factor

The search starts head by head, at the directions in which clipping the symmetric part of `H_h` loses least, made
orthonormal together. It finds a neighbourhood's best, not the best of all. What is certain: weights that have the form
already are returned as they are, and where the interval holds zero, neither the distance above nor that of the layer map
is ever larger than that of H' = 0.

`kept_weights` is the one projection of the library: `constrain` starts from it, `edit` writes it, and the what-if
`interval` predicts with it. An orthogonal basis is what `nearest` finds. A general basis goes on from there: `refine` lowers
the same distance, `norm(H - H')^2 + sum_h norm(H_h - H'_h)^2`, over all its parameters by L-BFGS. Either way H moves: a map
with real eigenvalues of one sign is far from what pretrained layers have. How far is reported, per layer and per head.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

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
from oversmooth.environment.versions import one_thread
from oversmooth.errors import BadValue, IllConditioned, NotSupported, UnknownName
from oversmooth.models.canonical import AttentionWeights, summed_over_groups

# --- the map of the eigenbasis form that lies near given weights: the start of `init="keep"` ---

ROUNDS = 10
"""Most rounds of the search; the distance hardly falls after that."""
LEAST_HOLD = 0.125
"""The longest step that is tried: longer ones mostly lead away."""
ENOUGH = 4e-3
"""Fall of the squared distance per round, relative to the square of H, below which the search ends."""
NOTHING = 1e-6
"""Eigenvalues below this, relative to the largest, are zero but for rounding."""
LEAST_WEIGHT = 1e-3
"""Least weight of a direction, relative to the largest, where directions are made orthonormal together."""

Values = Float[Tensor, "kv d_head d_model"]
Outputs = Float[Tensor, "d_model head d_head"]
ByHead = Float[Tensor, "kv d_model d_head"]
Shares = Float[Tensor, "kv group d_head"]
Totals = Float[Tensor, "kv 1 d_head"]


@dataclass(frozen=True, kw_only=True)
class FittedBasis:
    """Orthonormal columns, eigenvalues and the shares of heads in them."""

    columns: Float[Tensor, "d_model channel"]
    psi: Float[Tensor, " channel"]
    shares: Shares | None = None


def nearest(heads: Heads, w_v: Values, w_o: Outputs, low: float, high: float) -> FittedBasis:
    """The columns and eigenvalues that the search ends at."""
    given = _Given(heads, w_v, w_o, low, high)
    found = given.seen(_orthonormal(*given.own_directions()))
    hold = 1.0
    for _ in range(ROUNDS):
        moved = given.seen(_polar(given.ahead(found, hold)))
        fall = found.distance - moved.distance
        if fall <= 0:  # the step was too long, or only rounding is left
            hold *= 4
            continue
        found, hold = moved, max(hold / 2, LEAST_HOLD)
        if fall <= ENOUGH * given.size:
            break
    lambdas = found.lambdas
    if low <= 0 <= high and found.layer_distance > 0:  # then not the heads, but the layer's map alone
        lambdas = nearest_allowed((found.layer / heads.per_group).expand_as(found.own), found.layer, low, high)
    totals = lambdas.sum(1, keepdim=True)
    is_zero = totals == 0
    shares = torch.where(is_zero, 1 / heads.per_group, lambdas / totals.masked_fill(is_zero, 1))
    columns = _joined(found.columns)
    return FittedBasis(columns=columns, psi=totals.flatten(), shares=shares if heads.per_group > 1 else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Seen:
    """Columns of all value heads, what the given maps make of them, and the best eigenvalues for them."""

    columns: ByHead
    own_images: Float[Tensor, "kv group d_model d_head"]
    layer_images: ByHead
    """The columns under the symmetric parts of their heads' own maps, and under that of the layer's."""
    own: Shares
    layer: Totals
    """`v^T H_h v` of every column for the heads it belongs to, and `v^T H v`."""
    lambdas: Shares

    @cached_property
    def layer_distance(self) -> float:
        """`norm(H - H')^2 - norm(H)^2`: what the layer's map is away, less what it is away from zero."""
        totals = self.lambdas.sum(1, keepdim=True)
        return (totals * (totals - 2 * self.layer)).sum().item()

    @cached_property
    def distance(self) -> float:
        """What is minimised, less its value at H' = 0."""
        return (self.lambdas * (self.lambdas - 2 * self.own)).sum().item() + self.layer_distance


class _Given:
    """The weights that are to be kept: `H_h = W_O^h W_V^g`, of which only the symmetric part can be kept."""

    def __init__(self, heads: Heads, w_v: Values, w_o: Outputs, low: float, high: float):
        self.heads, self.low, self.high = heads, low, high
        self.w_v = w_v
        self.w_o = w_o.unflatten(1, (heads.n_kv, heads.per_group)).permute(1, 2, 0, 3).contiguous()
        self.reads = w_v.flatten(0, 1)
        self.writes = summed_over_groups(w_o, heads.n_kv).flatten(1).contiguous()
        self.size = ((self.writes.T @ self.writes) * (self.reads @ self.reads.T)).sum().item()

    def own_directions(self) -> tuple[Float[Tensor, "d_model channel"], Float[Tensor, " channel"]]:
        """For every value head the directions in which clipping the symmetric part of its map loses least.

        Beside them the size of what is left of their eigenvalues: large ones move least when all are made orthonormal.
        """
        found, weights = [], []
        for reads, writes in zip(self.w_v, self.writes.split(self.heads.d_head, 1), strict=True):
            span = torch.linalg.qr(torch.cat([writes, reads.T], 1)).Q
            core = (span.T @ writes) @ (reads @ span)
            values, vectors = torch.linalg.eigh((core + core.T) / 2)
            clipped = values.clamp(self.low, self.high)
            gain = values.square() - (values - clipped).square()
            best = gain.argsort(descending=True)[: self.heads.d_head]
            found.append(span @ vectors[:, best])
            weights.append(clipped[best].abs())
        return torch.cat(found, 1), torch.cat(weights)

    def seen(self, columns: Float[Tensor, "d_model channel"]) -> _Seen:
        """The columns, turned so that for every head its own map and the layer's together are diagonal in them."""
        mine = columns.unflatten(1, (self.heads.n_kv, self.heads.d_head)).transpose(0, 1)
        forth = self.w_o @ (self.w_v @ mine)[:, None]
        own = (forth + self.w_v.mT[:, None] @ (self.w_o.mT @ mine[:, None])) / 2
        whole = (self.writes @ (self.reads @ columns) + self.reads.T @ (self.writes.T @ columns)) / 2
        layer = whole.unflatten(1, (self.heads.n_kv, self.heads.d_head)).transpose(0, 1)
        core = mine.mT @ (own.sum(1) + layer)
        turn = torch.linalg.eigh((core + core.mT) / 2).eigenvectors
        mine, own, layer = mine @ turn, own @ turn[:, None], layer @ turn
        own_values, layer_values = (mine[:, None] * own).sum(2), (mine * layer).sum(1)[:, None]
        return _Seen(
            columns=mine,
            own_images=own,
            layer_images=layer,
            own=own_values,
            layer=layer_values,
            lambdas=nearest_allowed(own_values, layer_values, self.low, self.high),
        )

    def ahead(self, seen: _Seen, hold: float) -> Float[Tensor, "d_model channel"]:
        """The gradient plus a multiple of the columns: with a large enough one, its polar factor is never farther."""
        totals = seen.lambdas.sum(1)
        gradient = seen.layer_images * totals[:, None] + (seen.own_images * seen.lambdas[:, :, None]).sum(1)
        longest = seen.layer_images.norm(dim=1).max().item() + seen.own_images.norm(dim=2).max().item()
        return _joined(gradient + seen.columns * _not_nothing(totals.abs() * (hold * longest))[:, None])


def _orthonormal(
    directions: Float[Tensor, "d_model channel"], weights: Float[Tensor, " channel"]
) -> Float[Tensor, "d_model channel"]:
    """Orthonormal columns near the directions; those without an eigenvalue are arbitrary and take what the others leave."""
    matters = weights > NOTHING * weights.max()
    columns = torch.empty_like(directions)
    columns[:, matters] = _polar(directions[:, matters] * _not_nothing(weights[matters])) if matters.any() else 0
    first = torch.cat([columns[:, matters], directions[:, ~matters]], 1)
    columns[:, ~matters] = torch.linalg.qr(first).Q[:, int(matters.sum()) :]
    return columns


def _not_nothing(weights: Tensor) -> Tensor:
    """Weights of which none is zero beside the largest: a direction without an eigenvalue gives way to all others."""
    return weights.clamp(min=LEAST_WEIGHT * (weights.max().item() or 1.0))


def _joined(by_head: ByHead) -> Float[Tensor, "d_model channel"]:
    return by_head.transpose(0, 1).flatten(1)


def _polar(matrix: Float[Tensor, "d_model channel"]) -> Float[Tensor, "d_model channel"]:
    """The nearest matrix of orthonormal columns, `M (M^T M)^-1/2`; by singular values where that loses digits."""
    squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
    if squares[0] <= torch.finfo(squares.dtype).eps ** 0.5 * squares[-1]:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left @ right
    columns = matrix @ (vectors * squares.rsqrt()) @ vectors.T
    return 1.5 * columns - 0.5 * (columns @ (columns.T @ columns))  # one step of Newton's takes rounding off


# --- eigenvalues that are allowed -----------------------------------------------------------------------------------


def nearest_allowed(own: Shares, total: Totals, low: float, high: float) -> Shares:
    """The `x_h` of one sign per channel with `low <= sum x <= high` nearest to `own_h`, and their sum to `total`.

    Minimises `sum_h (x_h - own_h)^2 + (sum_h x_h - total)^2`, exactly.
    """
    sides = []
    if high > 0:
        sides.append(_nearest_positive(own, total, max(low, 0.0), high))
    if low < 0:
        sides.append(-_nearest_positive(-own, -total, max(-high, 0.0), -low))
    if len(sides) == 1:
        return sides[0]
    first, second = (
        (side - own).square().sum(1, keepdim=True) + (side.sum(1, keepdim=True) - total).square() for side in sides
    )
    return torch.where(first <= second, sides[0], sides[1])


def _nearest_positive(own: Shares, total: Totals, least: float, most: float) -> Shares:
    """The same for `x >= 0`: every x is its `own` less one amount per channel, never below zero (water filling)."""
    ordered = own.sort(1, descending=True).values
    count = torch.arange(1, own.shape[1] + 1, device=own.device).view(1, -1, 1)
    sums = ordered.cumsum(1)
    # With k of them above zero the best sum is (sum of the k largest + k total) / (1 + k).
    taken = (sums + count * total) / (1 + count) - total
    active = (ordered - taken > 0).sum(1, keepdim=True)
    best = (sums - count * taken).gather(1, active.clamp(min=1) - 1)
    target = torch.where(active > 0, best, torch.zeros_like(best)).clamp(least, most)
    excess = (sums - target) / count
    active = (ordered - excess > 0).sum(1, keepdim=True).clamp(min=1)
    return (own - excess.gather(1, active - 1)).clamp(min=0)


# --- where the parametrization starts: from pretrained weights, kept as well as the form allows ---

BASES = ("orthogonal", "general")
REFINING_STEPS = 30
DOUBLE_UP_TO = 1024
"""Largest width whose start is computed in float64; above it one layer would take minutes."""

ONE_THREAD_UP_TO = 256
"""Largest width for which more threads would only wait for each other."""
LEAST_EIGENVALUE = 1e-2
"""Relative size below which an eigenvalue counts as zero when a value bias is solved for: it would become large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EigenvalueForm:
    """What the weights shall become."""

    low: float
    high: float
    basis: str = "orthogonal"
    max_condition: float | None = None

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise UnknownName("basis", self.basis, BASES)
        if self.max_condition is not None and self.basis != "general":
            reason = "only a general basis can be ill-conditioned"
            raise NotSupported("max_condition", f"with basis={self.basis!r}", reason)
        if not -math.inf < self.low < self.high < math.inf:
            raise BadValue("The interval", (self.low, self.high), "two finite numbers, the smaller one first")


def fresh_eigenbasis(
    heads: Heads, form: EigenvalueForm, like: Tensor, generator: torch.Generator | None = None
) -> Eigenbasis:
    """Orthonormal columns without preference and eigenvalues uniform in the interval, for training from scratch."""
    dtype = full_precision(like.new_empty(0)).dtype
    columns = random_columns(heads, generator, dtype)
    psi = form.low + (form.high - form.low) * torch.rand(heads.channels, generator=generator, dtype=dtype)
    return _eigenbasis(heads, form, FittedBasis(columns=columns, psi=psi), like)


def kept_eigenbasis(heads: Heads, form: EigenvalueForm, w_v: Values, w_o: Outputs) -> Eigenbasis:
    """Close to the given weights, as the head of this module says."""
    heads.require_one_basis()
    precise = torch.float64 if heads.d_model <= DOUBLE_UP_TO else torch.float32
    with torch.no_grad():
        start = nearest(heads, w_v.to(precise), w_o.to(precise), form.low, form.high)
    eigenbasis = _eigenbasis(heads, form, start, w_v)
    if form.basis == "general":
        refine(eigenbasis, w_v, w_o)
    return eigenbasis


@torch.no_grad()
def weights_of(eigenbasis: Eigenbasis, old: AttentionWeights) -> AttentionWeights:
    """The layer with the value and output weights of an eigenbasis, everything else as it was."""
    value, output = eigenbasis.weights()
    return replace(old, w_v=value.reshape(old.w_v.shape), w_o=output.reshape(old.w_o.shape))


def kept_weights(old: AttentionWeights, form: EigenvalueForm) -> AttentionWeights:
    """The layer brought into the form: its map as near as `kept_eigenbasis` finds, its constant kept by the biases."""
    eigenbasis = kept_eigenbasis(Heads.of(old), form, old.w_v, old.w_o)
    return with_constant_kept(old, weights_of(eigenbasis, old))


def _eigenbasis(heads: Heads, form: EigenvalueForm, start: FittedBasis, like: Tensor) -> Eigenbasis:
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


# --- distances ------------------------------------------------------------------------------------------------------


def refine(eigenbasis: Eigenbasis, w_v: Values, w_o: Outputs, steps: int = REFINING_STEPS) -> None:
    """Moves all parameters so that the maps of heads and layer come as near to the given ones as a local search finds.

    Where that brings nothing, or brings the layer's map alone farther away, everything stays as it was.
    """
    dtype = eigenbasis.psi.dtype
    w_v, w_o = w_v.detach().to(dtype), w_o.detach().to(dtype)
    scale = sum(_distances(w_v, w_o, torch.zeros_like(w_v), torch.zeros_like(w_o)))
    if scale == 0:
        return
    parameters = list(eigenbasis.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    search = torch.optim.LBFGS(parameters, max_iter=steps, history_size=steps, line_search_fn="strong_wolfe")

    def distances() -> tuple[Tensor, Tensor]:
        value, output = eigenbasis.weights()
        return _distances(w_v, w_o, value.view_as(w_v), output.reshape(w_o.shape))

    def loss() -> Tensor:
        search.zero_grad()
        distance = sum(distances()) / scale
        distance.backward()
        return distance

    is_better = False
    with (
        torch.enable_grad(),
        one_thread(w_o.shape[0] <= ONE_THREAD_UP_TO),
        suppress(IllConditioned),  # then back to the start, which is well conditioned
    ):
        first = [part.item() for part in distances()]
        search.step(loss)
        last = [part.item() for part in distances()]
        is_better = 0 < sum(last) < sum(first) and last[1] <= first[1]
    search.zero_grad()
    if not is_better:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


def _distances(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> tuple[Tensor, Tensor]:
    """`sum_h norm(H_h - H'_h)^2` and `norm(H - H')^2`."""
    layer = _squared_distances(*_as_one_head(w_v, w_o), *_as_one_head(new_v, new_o))
    return _squared_distances(w_v, w_o, new_v, new_o).sum(), layer.sum()


def _squared_distances(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> Float[Tensor, " head"]:
    """`norm(W_O W_V - W_O' W_V')^2` of every head, from Gram matrices of size `2 d_head`."""
    group = w_o.shape[1] // w_v.shape[0]
    left = torch.cat([w_o, -new_o], 2).transpose(0, 1)
    right = torch.cat([w_v, new_v], 1).repeat_interleave(group, 0)
    return ((left.mT @ left) * (right @ right.mT)).sum((1, 2)).clamp(min=0)


def moved(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> tuple[list[float | None], float | None]:
    """How far the map of every head and that of the layer moved, relative to its norm; `None` where that was zero."""
    w_v, w_o, new_v, new_o = (tensor.detach().double() for tensor in (w_v, w_o, new_v, new_o))
    (whole,) = _moved(*_as_one_head(w_v, w_o), *_as_one_head(new_v, new_o))
    return _moved(w_v, w_o, new_v, new_o), whole


def _moved(w_v: Values, w_o: Outputs, new_v: Values, new_o: Outputs) -> list[float | None]:
    changes = _squared_distances(w_v, w_o, new_v, new_o).tolist()
    sizes = _squared_distances(w_v, w_o, torch.zeros_like(w_v), torch.zeros_like(w_o)).tolist()
    return [(change / size) ** 0.5 if size > 0 else None for change, size in zip(changes, sizes, strict=True)]


def _as_one_head(value: Values, output: Outputs) -> tuple[Tensor, Tensor]:
    """Weights of a single head whose map is that of the whole layer."""
    return value.flatten(0, 1)[None], summed_over_groups(output, value.shape[0]).flatten(1)[:, None]


# --- biases ---------------------------------------------------------------------------------------------------------


def constant(weights: AttentionWeights) -> Float[Tensor, " d_model"] | None:
    """`W_O b_V + b_O`, the vector that attention adds to every token alike; `None` without biases. In float64."""
    if weights.b_v is None:
        return None if weights.b_o is None else weights.b_o.double()
    added = weights.w_o_shared.double().flatten(1) @ weights.b_v.double().flatten()
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
