"""The ladder of explanation: from the theorem about infinite repetition to what one layer does to real features.

m = r(X + Y) - r(X),   r = log(HFC/LFC),   X the residual stream, Y the attention branch

0 asymptotic    weights and attention, infinite repetition       log rho_ac - log rho_dc
1 typical       weights and attention, isotropic features        log g_ac - log g_dc, in closed form
2 features      + the real second moments                        gains on P X and on the token mean
3 coupling      + what differs between tokens leaking into what they share
4 biases        + 1 c^T
5 token scale   + each token's own scale in the norms: equal to m up to rounding, where nothing multiplies what is written
6 gains         + each token's own gains (gates, sinks, a norm on the mixed heads): equal to m up to rounding

Rungs 0 to 5 of a layer with gains are those of the averaged operator, in which every token has the mean gains.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.metrics import log_hfc_lfc
from oversmooth.measurement.moments import Moments
from oversmooth.models.hooks.gains import TokenGains
from oversmooth.prediction.theory.layer import AttentionLayer, ExactBranch
from oversmooth.prediction.theory.leak import leak
from oversmooth.prediction.theory.operator import AttentionFacts, LayerOperator, centre

RUNGS = ("asymptotic", "typical", "features", "coupling", "biases", "token scale", "gains")
"""The last only where there are gains of the token that is written."""
STEPS = ("repetition", "features", "coupling", "biases", "token scale", "gains")
"""What is added from one rung to the next; the first step goes from infinite repetition to a single layer."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Ladder:
    """Rungs 1 to 5 (6 with gains) of one layer on one sequence; `None` where a logarithm does not exist (a part is zero)."""

    rungs: tuple[float | None, ...]
    exact: ExactBranch
    operator: LayerOperator
    """The layer at the common token scale and gains, for rung 0."""
    leak: float | None
    """How much of what all tokens share becomes differences, because tokens write with different gains."""


def climb(
    layer: AttentionLayer,
    attention: Float[Tensor, "head token token"],
    x: Float[Tensor, "token d_model"],
    gains: TokenGains | None = None,
    known: AttentionFacts | None = None,
) -> Ladder:
    """Every rung above the first, with two passes through the branch; `known` is what was found out about attention."""
    exact = layer.exact(attention, x, gains)
    operator = replace(layer.operator(attention, exact), known=known)
    mean, varying = x.mean(0), centre(x)
    shared = operator.shared(mean)
    moved = layer.skip * varying + operator.branch(varying)
    linear = moved + shared
    affine = linear + layer.bias(operator.row_sums, exact, gains)
    steps = [x, linear, affine, layer.skip * x + exact.output]
    if exact.gains is not None:
        steps.insert(3, layer.skip * x + layer.at_mean_gains(exact, gains))
    before, *later = log_ratios(torch.stack(steps))
    features = _log_of(centre(moved).norm() / varying.norm()), _log_of(shared.norm() / mean.norm())
    return Ladder(
        rungs=(typical(operator), _difference(*features), *(_difference(value, before) for value in later)),
        exact=exact,
        operator=operator,
        leak=leak(layer.branch, operator, exact.gains, mean),
    )


def typical(operator: LayerOperator) -> float | None:
    """Rung 1, `log g_ac - log g_dc` for isotropic features, in closed form.

    With `B_h = P A_h P`: `g_ac^2 = 1 + [2 sum_h tr(B_h) tr(H_h) + sum_hk tr(B_h^T B_k) tr(H_h^T H_k)] / ((n - 1) d)`
    and `g_dc^2 = norm_F(I + H)^2 / d`, H being divided by the scale.
    """
    path, skip, factor = operator.path, operator.skip, 1.0 / operator.scale
    assert path.after_weight is None, "the ladder ends before a norm after the sum"
    n, d = operator.tokens, path.d_model
    traces = operator.diagonals.sum(0) - operator.row_sums
    linear = (traces * path.head_traces).sum().item()
    square = (operator.facts.varying_gram * path.head_gram).sum().item()
    ac = skip**2 + (2 * skip * factor * linear + factor**2 * square) / ((n - 1) * d)
    sums = operator.row_sums
    linear, square = (sums * path.head_traces).sum().item(), (sums @ path.head_gram @ sums).item()
    dc = skip**2 + (2 * skip * factor * linear + factor**2 * square) / d
    return (math.log(ac) - math.log(dc)) / 2 if ac > 0 and dc > 0 else None


def log_ratios(x: Float[Tensor, "place token d_model"]) -> list[float | None]:
    """`r = log(HFC/LFC)` of the same tokens at several places."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    found = log_hfc_lfc.on(Moments.of(x, keep))
    return [
        value if defined else None for value, defined in zip(found.values.tolist(), found.defined.tolist(), strict=True)
    ]


def _log_of(ratio: Float[Tensor, ""]) -> float | None:
    value = ratio.item()
    return math.log(value) if math.isfinite(value) and value > 0 else None


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def carrying_step(rungs: tuple[float | None, ...]) -> str | None:
    """The step between neighbouring rungs that changes most; `None` where a rung is missing."""
    if any(rung is None for rung in rungs):
        return None
    changes = [abs(b - a) for a, b in pairwise(rungs)]  # type: ignore[operator]
    return STEPS[max(range(len(changes)), key=changes.__getitem__)]


def explaining_rung(rungs: tuple[float | None, ...], measured: float) -> int | None:
    """The lowest rung from which on every rung has the sign of the measurement; `None` where not even the last has."""
    found = None
    for index in reversed(range(len(rungs))):
        rung = rungs[index]
        if rung is None or (rung < 0) != (measured < 0):
            break
        found = index
    return found
