"""Where the parametrization starts: from pretrained weights, kept as well as the form allows, or from a random draw.

`kept_weights` is the one projection of the library: `constrain` starts from it, `edit` writes it, and the what-if
`interval` predicts with it. An orthogonal basis is what `nearest` finds. A general basis goes on from there: `refine` lowers
the same distance, `norm(H - H')^2 + sum_h norm(H_h - H'_h)^2`, over all its parameters by L-BFGS. Either way H moves: a map
with real eigenvalues of one sign is far from what pretrained layers have. How far is reported, per layer and per head.
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
from oversmooth.control.nearest import Outputs, Start, Values, nearest
from oversmooth.environment.threads import one_thread
from oversmooth.errors import BadValue, IllConditioned, NotSupported, UnknownName
from oversmooth.models.canonical import AttentionWeights, summed_over_groups

BASES = ("orthogonal", "general")
REFINING_STEPS = 30
DOUBLE_UP_TO = 1024
"""Largest width whose start is computed in float64; above it one layer would take minutes."""

ONE_THREAD_UP_TO = 256
"""Largest width for which more threads would only wait for each other."""
LEAST_EIGENVALUE = 1e-2
"""Relative size below which an eigenvalue counts as zero when a value bias is solved for: it would become large."""


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


def kept_weights(old: AttentionWeights, form: Form) -> AttentionWeights:
    """The layer brought into the form: its map as near as `kept_eigenbasis` finds, its constant kept by the biases."""
    heads = Heads(d_model=old.d_model, n_heads=old.n_heads, n_kv=old.n_kv, d_head=old.d_head)
    eigenbasis = kept_eigenbasis(heads, form, old.w_v, old.w_o)
    return with_constant_kept(old, weights_of(eigenbasis, old))


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
    nothing = torch.zeros_like(w_v), torch.zeros_like(w_o)
    change, size = _squared_distances(w_v, w_o, new_v, new_o), _squared_distances(w_v, w_o, *nothing)
    heads = [_ratio(a, b) for a, b in zip(change.tolist(), size.tolist(), strict=True)]
    old, new = _as_one_head(w_v, w_o), _as_one_head(new_v, new_o)
    none = torch.zeros_like(old[0]), torch.zeros_like(old[1])
    return heads, _ratio(_squared_distances(*old, *new).item(), _squared_distances(*old, *none).item())


def _as_one_head(value: Values, output: Outputs) -> tuple[Tensor, Tensor]:
    """Weights of a single head whose map is that of the whole layer."""
    return value.flatten(0, 1)[None], summed_over_groups(output, value.shape[0]).flatten(1)[:, None]


def _ratio(change: float, size: float) -> float | None:
    return (change / size) ** 0.5 if size > 0 else None


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
