"""The rungs of one layer on one sequence, from the theorem to the measurement; simulation.

With `A_h 1 = r_h 1` and the gains g of the token that is written, of head h and channel c,

    T(1 w^T) = 1 w^T (I + H) + sum_h r_h ((g^h - mean g^h) o (w W_V^h / s)) W_O^h

The first term is what the averaged operator does; the second has no mean over tokens. Equal gains leave it zero, and DC
invariant. It is the only term that makes differences out of nothing: no matrix with it can smooth completely.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.metrics import evaluate, log_hfc_lfc
from oversmooth.measurement.moments import Moments
from oversmooth.models.canonical import TokenGains
from oversmooth.prediction.asymptotics import (
    TOKENS_UP_TO,
    Asymptotics,
    HeadTheorem,
    asymptotics_each,
    dobrushin,
    head_theorems,
)
from oversmooth.prediction.operator import AttentionFacts, AttentionLayer, ExactBranch, LayerOperator, ValuePath, centre
from oversmooth.prediction.radii import MANY_TOKENS, TokenSpace
from oversmooth.prediction.what_if import WhatIf

# --- the leak: how much of what all tokens share is turned into differences ---


def leaked(
    path: ValuePath,
    operator: LayerOperator,
    gains: Float[Tensor, "token head channel"],
    w: Float[Tensor, " d_model"],
) -> Float[Tensor, "token d_model"]:
    """The part of `T(1 w^T)` that differs between tokens; `path` is that of the operator without its mean gains."""
    values = (path.value_rows @ w / operator.scale).unflatten(0, (path.n_kv, path.d_head))
    by_head = values.repeat_interleave(path.n_heads // path.n_kv, 0) * operator.facts.row_sums[:, None]
    written = (gains - gains.mean(0)) * by_head
    return written.flatten(1) @ path.output_rows


def leak(
    path: ValuePath,
    operator: LayerOperator,
    gains: Float[Tensor, "token head channel"] | None,
    w: Float[Tensor, " d_model"],
) -> float | None:
    """`norm(leaked) / norm(T(1 w^T))`, in [0, 1]; 0 where tokens write with equal gains, `None` where T(1 w^T) is zero."""
    if gains is None:
        return 0.0
    varying = leaked(path, operator, gains, w)
    everything = torch.linalg.matrix_norm(varying + operator.shared(w)).item()
    return torch.linalg.matrix_norm(varying).item() / everything if everything else None


# --- the ladder of explanation: from the theorem about infinite repetition to what one layer does to ---

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
    affine = linear + layer.bias(operator.facts.row_sums, exact, gains)
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
    traces = operator.facts.diagonals.sum(0) - operator.facts.row_sums
    linear = (traces * path.head_traces).sum().item()
    square = (operator.facts.varying_gram * path.head_gram).sum().item()
    ac = skip**2 + (2 * skip * factor * linear + factor**2 * square) / ((n - 1) * d)
    sums = operator.facts.row_sums
    linear, square = (sums * path.head_traces).sum().item(), (sums @ path.head_gram @ sums).item()
    dc = skip**2 + (2 * skip * factor * linear + factor**2 * square) / d
    return (math.log(ac) - math.log(dc)) / 2 if ac > 0 and dc > 0 else None


def log_ratios(x: Float[Tensor, "place token d_model"]) -> list[float | None]:
    """`r = log(HFC/LFC)` of the same tokens at several places."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    found = log_hfc_lfc.on(Moments.of(x, keep))
    pairs = zip(found.values.tolist(), found.defined.tolist(), strict=True)
    return [value if is_defined else None for value, is_defined in pairs]


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


# --- the theorem made visible: one layer iterated at fixed attention ---

SHOWN = ("cosine", "cosine_abs", "hfc_lfc", "effective_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedValues:
    """The metrics after so many repetitions; `None` where a metric has no value."""

    step: int
    values: tuple[float | None, ...]
    """In the order of `SHOWN`."""


def recorded_steps(steps: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last one; 0 is the start."""
    found = [0]
    base = 1
    while base <= steps:
        found += [factor * base for factor in (1, 2, 5) if factor * base <= steps]
        base *= 10
    return sorted({*found, steps})


def simulate(operator: LayerOperator, x: Float[Tensor, "token d_model"], steps: int) -> list[RepeatedValues]:
    """T applied `steps` times to X, rescaled as a whole after every step, which no metric shown can see."""
    shown = [_step(0, x)]
    for earlier, later in pairwise(recorded_steps(steps)):
        for _ in range(later - earlier):
            x = operator.apply(x)
            x = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
        shown.append(_step(later, x))
    return shown


def _step(step: int, x: Float[Tensor, "token d_model"]) -> RepeatedValues:
    keep = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    found = evaluate(SHOWN, x[None], keep)
    values = tuple(found[name].values.item() if found[name].defined.item() else None for name in SHOWN)
    return RepeatedValues(step=step, values=values)


# --- everything the theory says about one layer on one sequence, as plain numbers; tensors end here ---


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WhatIfSample:
    """The ladder of a changed layer; `rungs[0]` is `None` where the sequence, or the change, was not solved."""

    rungs: tuple[float | None, ...]
    solved: Asymptotics | None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LayerSample:
    """One layer on one sequence."""

    tokens: int
    is_causal: bool
    rungs: tuple[float | None, ...]
    """Rungs 0 to 5, or 6 with gains; rung 0 is `None` where the eigenvalue problems were not solved."""
    measured: float | None
    leak: float | None
    has_gains: bool
    scale: float | None
    scale_spread: float | None
    smallest_scale: float | None
    plain: Asymptotics | None
    folded: Asymptotics | None
    acting: Asymptotics | None
    heads: tuple[HeadTheorem, ...] = ()
    dobrushin: tuple[float, ...] = ()
    changes: tuple[WhatIfSample, ...] = ()
    simulation: tuple[RepeatedValues, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WhatIfLayer:
    """A what-if made ready for one layer; `layer` is `None` where it means nothing there."""

    change: WhatIf
    layer: AttentionLayer | None
    why_not: str | None

    @classmethod
    def of(cls, change: WhatIf, layer: AttentionLayer) -> "WhatIfLayer":
        why_not = change.why_not(layer)
        return cls(change=change, layer=None if why_not else change.layer(layer), why_not=why_not)


def sample_layer(
    layer: AttentionLayer,
    attention: Float[Tensor, "head token token"],
    x: Float[Tensor, "token d_model"],
    after: Float[Tensor, "token d_model"],
    *,
    gains: TokenGains | None = None,
    solve: bool,
    with_heads: bool = True,
    changes: Sequence[WhatIfLayer] = (),
    solve_changes: bool = True,
    simulate_steps: int = 0,
) -> tuple[LayerSample, LayerOperator]:
    """All rungs and the measurement of one layer, from the stream before and after its branch was added.

    `solve` adds the eigenvalue problems: rung 0 in every view, and the heads; without `solve_changes`, rung 0 of a
    changed layer only where it is read from the Krylov space of the layer as it is. Also returns the operator with
    everything folded in, for the product over depth.
    """
    ladder = climb(layer, attention, x, gains)
    scale, spread, smallest = _scale(ladder)
    folded = _folded_operator(layer, ladder)
    made = [change for change in changes if change.layer]
    solver = _Solver.of(layer, ladder, made, solve_changes=solve_changes) if solve else None
    acting = solver.acting if solver else None
    before, behind = log_ratios(torch.stack([x, after]))
    short = attention.shape[-1] <= TOKENS_UP_TO
    sample = LayerSample(
        tokens=attention.shape[-1],
        is_causal=ladder.operator.facts.is_causal,
        rungs=(acting.exponent if acting else None, *ladder.rungs),
        measured=None if before is None or behind is None else behind - before,
        leak=ladder.leak,
        has_gains=ladder.exact.gains is not None,
        scale=scale,
        scale_spread=spread,
        smallest_scale=smallest,
        plain=solver.plain(layer) if solver else None,
        folded=solver.solve(folded) if solver and folded else None,
        acting=acting,
        heads=tuple(head_theorems(ladder.operator)) if solve and with_heads and short else (),
        dobrushin=tuple(dobrushin(attention).tolist()) if solve and with_heads and short else (),
        changes=tuple(_changed(change, ladder, x, gains, solver) for change in made),
        simulation=tuple(simulate(ladder.operator, x, simulate_steps)) if simulate_steps else (),
    )
    return sample, folded or ladder.operator


def _scale(ladder: Ladder) -> tuple[float | None, float | None, float | None]:
    """The common token scale, its relative spread and the smallest one, of the norm that acts before the sum."""
    scales = ladder.exact.scales if ladder.exact.scales is not None else ladder.exact.branch_scales
    if scales is None:
        return None, None, None
    spread = (scales.std(correction=0) / scales.mean()).item()
    return ladder.exact.common_scale, spread, scales.min().item()


def _folded_operator(layer: AttentionLayer, ladder: Ladder) -> LayerOperator | None:
    if layer.folded is None:
        return None
    if layer.folded is layer.branch:
        return ladder.operator
    return replace(ladder.operator, path=layer.folded.with_gains(ladder.exact.mean_gains))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Solver:
    """The eigenvalue problems of one layer on one sequence, which share what they can."""

    operator: LayerOperator
    """The layer as it acts across the branch."""
    acting: Asymptotics
    """What it leads to."""
    shifted: Mapping[WhatIf, Asymptotics]
    """Changes that only shift or scale it, from the same Krylov space."""
    space: TokenSpace | None
    """The token space of a long sequence."""
    solve_changes: bool

    @classmethod
    def of(
        cls, layer: AttentionLayer, ladder: Ladder, changes: Sequence[WhatIfLayer], *, solve_changes: bool
    ) -> "_Solver":
        acting = ladder.operator
        is_long = acting.tokens >= MANY_TOKENS and not acting.facts.is_causal
        space = TokenSpace(acting.attention) if is_long else None
        plain = changes if layer.weights.beyond_plain is None else ()  # gains and latent scales change with the layer
        operators = {item.change: item.change.operator(layer, acting) for item in plain}
        apart = {change: found for change, found in operators.items() if found is not None and found is not acting}
        first, *rest = asymptotics_each([acting, *apart.values()], space)
        shifted = dict(zip(apart, rest, strict=True))
        shifted |= {change: first for change, found in operators.items() if found is acting}
        return cls(operator=acting, acting=first, shifted=shifted, space=space, solve_changes=solve_changes)

    def solve(self, operator: LayerOperator) -> Asymptotics:
        if operator is self.operator:
            return self.acting
        is_same = self.space is not None and operator.attention is self.space.attention
        return asymptotics_each([operator], self.space if is_same else None)[0]

    def plain(self, layer: AttentionLayer) -> Asymptotics:
        """The value and output weights alone."""
        is_acting = layer.branch is layer.plain
        return self.acting if is_acting else self.solve(replace(self.operator, path=layer.plain, scale=1.0))

    def changed(self, change: WhatIf, operator: LayerOperator) -> Asymptotics | None:
        """What a change leads to; `None` where that is a problem of its own and was not asked for."""
        if change in self.shifted:
            return self.shifted[change]
        return self.solve(operator) if self.solve_changes else None


def _changed(
    changed: WhatIfLayer,
    ladder: Ladder,
    x: Float[Tensor, "token d_model"],
    gains: TokenGains | None,
    solver: _Solver | None,
) -> WhatIfSample:
    assert changed.layer is not None
    known = ladder.operator.facts
    found = climb(changed.layer, changed.change.attention(known.attention), x, gains, known)
    solved = solver.changed(changed.change, found.operator) if solver else None
    return WhatIfSample(rungs=(solved.exponent if solved else None, *found.rungs), solved=solved)
