"""Everything the theory says about one layer on one sequence, as plain numbers; tensors end here."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.prediction.theory.asymptotics import Asymptotics, asymptotics
from oversmooth.prediction.theory.heads import TOKENS_UP_TO, HeadTheorem, dobrushin, head_theorems
from oversmooth.prediction.theory.ladder import Ladder, climb, log_ratios
from oversmooth.prediction.theory.layer import AttentionLayer
from oversmooth.prediction.theory.operator import LayerOperator
from oversmooth.prediction.theory.simulate import SimulatedStep, simulate
from oversmooth.prediction.theory.what_if import WhatIf


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ChangedSample:
    """The ladder of a changed layer; `rungs[0]` is `None` where the sequence was not solved."""

    rungs: tuple[float | None, ...]
    solved: Asymptotics | None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LayerSample:
    """One layer on one sequence."""

    tokens: int
    is_causal: bool
    rungs: tuple[float | None, ...]
    """Rungs 0 to 5; rung 0 is `None` where the eigenvalue problems were not solved."""
    measured: float | None
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
    solve: bool,
    with_heads: bool = True,
    changes: Sequence[Changed] = (),
    simulate_steps: int = 0,
) -> tuple[LayerSample, LayerOperator]:
    """All rungs and the measurement of one layer, from the stream before and after its branch was added.

    `solve` adds the eigenvalue problems: rung 0 in every view, and the heads. Also returns the operator with
    everything folded in, for the product over depth.
    """
    ladder = climb(layer, attention, x)
    scale, spread, smallest = _scale(ladder)
    folded = _folded_operator(layer, ladder)
    acting = asymptotics(ladder.operator) if solve else None
    before, behind = log_ratios(torch.stack([x, after]))
    short = attention.shape[-1] <= TOKENS_UP_TO
    sample = LayerSample(
        tokens=attention.shape[-1],
        is_causal=ladder.operator.is_causal,
        rungs=(acting.exponent if acting else None, *ladder.rungs),
        measured=None if before is None or behind is None else behind - before,
        scale=scale,
        scale_spread=spread,
        smallest_scale=smallest,
        plain=_plain(layer, ladder, acting),
        folded=_folded(folded, ladder, acting),
        acting=acting,
        heads=tuple(head_theorems(ladder.operator)) if solve and with_heads and short else (),
        dobrushin=tuple(dobrushin(attention).tolist()) if solve and with_heads and short else (),
        changes=tuple(_changed(change, attention, x, acting, solve) for change in changes if change.layer),
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
    acting = ladder.operator
    return LayerOperator(path=layer.folded, attention=acting.attention, scale=acting.scale, skip=layer.skip)


def _plain(layer: AttentionLayer, ladder: Ladder, acting: Asymptotics | None) -> Asymptotics | None:
    if acting is None or layer.branch is layer.plain:
        return acting
    return asymptotics(LayerOperator(path=layer.plain, attention=ladder.operator.attention, skip=layer.skip))


def _folded(folded: LayerOperator | None, ladder: Ladder, acting: Asymptotics | None) -> Asymptotics | None:
    if acting is None or folded is None:
        return None
    return acting if folded is ladder.operator else asymptotics(folded)


def _changed(
    changed: Changed,
    attention: Float[Tensor, "head token token"],
    x: Float[Tensor, "token d_model"],
    acting: Asymptotics | None,
    solve: bool,
) -> ChangedSample:
    assert changed.layer is not None
    ladder = climb(changed.layer, changed.change.attention(attention), x)
    if not solve:
        return ChangedSample(rungs=(None, *ladder.rungs), solved=None)
    solved = acting if changed.change.keeps_operator else asymptotics(ladder.operator)
    assert solved is not None
    return ChangedSample(rungs=(solved.exponent, *ladder.rungs), solved=solved)
