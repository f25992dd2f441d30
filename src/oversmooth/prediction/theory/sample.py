"""Everything the theory says about one layer on one sequence, as plain numbers; tensors end here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.hooks.gains import TokenGains
from oversmooth.prediction.theory.asymptotics import Asymptotics, asymptotics_each
from oversmooth.prediction.theory.heads import TOKENS_UP_TO, HeadTheorem, dobrushin, head_theorems
from oversmooth.prediction.theory.ladder import Ladder, climb, log_ratios
from oversmooth.prediction.theory.layer import AttentionLayer
from oversmooth.prediction.theory.operator import LayerOperator
from oversmooth.prediction.theory.simulate import SimulatedStep, simulate
from oversmooth.prediction.theory.token_space import MANY_TOKENS, TokenSpace
from oversmooth.prediction.theory.what_if import WhatIf


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ChangedSample:
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
    changes: tuple[ChangedSample, ...] = ()
    simulation: tuple[SimulatedStep, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Changed:
    """A what-if made ready for one layer; `layer` is `None` where it means nothing there."""

    change: WhatIf
    layer: AttentionLayer | None
    why_not: str | None

    @classmethod
    def of(cls, change: WhatIf, layer: AttentionLayer) -> "Changed":
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
    changes: Sequence[Changed] = (),
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
        is_causal=ladder.operator.is_causal,
        rungs=(acting.exponent if acting else None, *ladder.rungs),
        measured=None if before is None or behind is None else behind - before,
        leak=ladder.leak,
        has_gains=ladder.exact.gains is not None,
        scale=scale,
        scale_spread=spread,
        smallest_scale=smallest,
        plain=_plain(layer, ladder, solver),
        folded=_folded(folded, ladder, solver),
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

    acting: Asymptotics
    """The layer as it acts across the branch."""
    shifted: Mapping[WhatIf, Asymptotics]
    """Changes that only shift or scale it, from the same Krylov space."""
    space: TokenSpace | None
    """The token space of a long sequence."""
    solve_changes: bool

    @classmethod
    def of(cls, layer: AttentionLayer, ladder: Ladder, changes: Sequence[Changed], *, solve_changes: bool) -> "_Solver":
        acting = ladder.operator
        is_long = acting.tokens >= MANY_TOKENS and not acting.is_causal
        space = TokenSpace(acting.attention) if is_long else None
        plain = changes if layer.weights.beyond_plain is None else ()  # gains and latent scales change with the layer
        operators = {item.change: item.change.operator(layer, acting) for item in plain}
        apart = {change: found for change, found in operators.items() if found is not None and found is not acting}
        first, *rest = asymptotics_each([acting, *apart.values()], space)
        shifted = dict(zip(apart, rest, strict=True)) | {
            change: first for change, found in operators.items() if found is acting
        }
        return cls(acting=first, shifted=shifted, space=space, solve_changes=solve_changes)

    def solve(self, operator: LayerOperator) -> Asymptotics:
        is_same = self.space is not None and operator.attention is self.space.attention
        return asymptotics_each([operator], self.space if is_same else None)[0]

    def changed(self, change: WhatIf, operator: LayerOperator) -> Asymptotics | None:
        """What a change leads to; `None` where that is a problem of its own and was not asked for."""
        if change in self.shifted:
            return self.shifted[change]
        return self.solve(operator) if self.solve_changes else None


def _plain(layer: AttentionLayer, ladder: Ladder, solver: _Solver | None) -> Asymptotics | None:
    if solver is None:
        return None
    if layer.branch is layer.plain:
        return solver.acting
    return solver.solve(replace(ladder.operator, path=layer.plain, scale=1.0))


def _folded(folded: LayerOperator | None, ladder: Ladder, solver: _Solver | None) -> Asymptotics | None:
    if solver is None or folded is None:
        return None
    return solver.acting if folded is ladder.operator else solver.solve(folded)


def _changed(
    changed: Changed,
    ladder: Ladder,
    x: Float[Tensor, "token d_model"],
    gains: TokenGains | None,
    solver: _Solver | None,
) -> ChangedSample:
    assert changed.layer is not None
    known = ladder.operator.facts
    found = climb(changed.layer, changed.change.attention(known.attention), x, gains, known)
    solved = solver.changed(changed.change, found.operator) if solver else None
    return ChangedSample(rungs=(solved.exponent if solved else None, *found.rungs), solved=solved)
