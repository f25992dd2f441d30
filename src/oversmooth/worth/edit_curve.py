"""`edit_curve`: what a change of the value maps does to features and to the loss, over its strength; is it worth it?"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor

from oversmooth.control.edit import Change, changed_tensors, changed_weights, form_of, partly, require_possible
from oversmooth.control.projection import moved
from oversmooth.control.selection import Chosen, Layers, choose, require_ordinary
from oversmooth.data.held import Data, reusable
from oversmooth.data.load import RunKeywords, opened
from oversmooth.errors import BadValue, NotSupported
from oversmooth.measurement.measure import measure
from oversmooth.measurement.passes import Processed
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.live import is_offloaded, quiet_eval
from oversmooth.models.open import LiveModel, Target
from oversmooth.results import Progress, guarded, no_progress
from oversmooth.results.changes import EditCurve, EditPoint
from oversmooth.worth.task_loss import LossMeter, Question, answer, new_judge, open_judged, questions

STRENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0)
TOLERATED = 0.1
"""Of the loss: a tenth of a nat is about 10% of perplexity."""
LEAST_MOVE = 0.01
"""Of the mean cosine; a change that moves it less is not seen in the features."""


def edit_curve(
    target: Target,
    data: Data = None,
    *,
    strengths: Sequence[float] = STRENGTHS,
    interval: tuple[float, float] | None = None,
    scale_h: float | None = None,
    flip_norm_signs: bool = False,
    basis: str = "orthogonal",
    max_condition: float | None = None,
    layers: Layers = None,
    stack: str | None = None,
    max_loss_increase: float = TOLERATED,
    task: str | None = None,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> EditCurve:
    """Loss and features of a model under a change of `edit` at several strengths, in one loaded model; nothing is written.

    The change is that of `edit`, the loss that of `task_loss`; of an embedding model, how well the similarities of the
    unchanged one are kept. `verdict` names the largest strength whose loss grows by at most `max_loss_increase` and that
    moves the mean cosine as meant, or says why the edit is not worth it.
    """
    form = form_of(interval, basis, max_condition)
    changes = [
        Change(form=form, scale=scale_h, flips_norms=flip_norm_signs, strength=strength)
        for strength in sorted(set(strengths))
    ]
    if not changes:
        raise BadValue("strengths", tuple(strengths), "at least one")
    if max_loss_increase < 0:
        raise BadValue("max_loss_increase", max_loss_increase, "at least 0")
    given = reusable(data)
    model, how = opened(target, options, given)
    with model.alone:
        live, loaded, task = open_judged(model, given, task, "edit", how)
        if is_offloaded(live.model):
            where = "for a model whose weights stay in their files"
            raise NotSupported("edit", where, "they cannot be changed there")
        run = _Run.of(live, task, changes[-1], choose(live.stacks, layers, stack))
        seen = Processed()
        run.asked = list(questions(live, loaded, task, how, seen))
        points = [run.point(None)]
        for count, change in enumerate(changes, 1):
            points.append(run.point(change))
            guarded(progress)(count, len(changes))
        provenance = live.provenance(seed=how.seed)
    best, verdict = _judged(points, changes[-1], max_loss_increase)
    return EditCurve(
        provenance=provenance,
        data=seen.facts(loaded),
        task=task,
        change_words=replace(changes[-1], strength=1.0).words,
        max_loss_increase=max_loss_increase,
        points=tuple(points),
        best=best,
        verdict=verdict,
    )


@dataclass
class _Run:
    """A live model, its questions, and the chosen layers before and after the whole change."""

    live: LiveModel
    task: str
    layers: Sequence[tuple[Chosen, AttentionWeights, AttentionWeights]]
    asked: Sequence[Question] = ()
    whole: LossMeter | None = None

    @classmethod
    def of(cls, live: LiveModel, task: str, change: Change, chosen: list[Chosen]) -> "_Run":
        def read(name: str) -> Tensor:
            return live.store.read(name).clone()  # not what the change will overwrite

        require_ordinary("edit", chosen, live.store)
        require_possible(chosen, read, change)
        whole = replace(change, strength=1.0)
        old = [(each, each.stack.weights(each.position, read)) for each in chosen]
        return cls(live, task, [(each, weights, changed_weights(weights, whole)) for each, weights in old])

    def point(self, change: Change | None) -> EditPoint:
        """Loss and features at the strength of the change; of the model as it is without one."""
        tensors, moves = self._changed(change) if change is not None else ({}, [0.0])
        judge = new_judge(self.task, self.live)
        with quiet_eval(self.live.model), self.live.store.holding(tensors) if tensors else nullcontext():
            for asked in self.asked:
                answer(self.live, judge, asked)
            measured = measure(self.live.running, [asked.inputs for asked in self.asked], metrics="cosine")
        self.whole = self.whole or judge
        loss, start = judge.result(self.whole), self.whole.result(self.whole)
        known = [move for move in moves if move is not None]
        return EditPoint(
            strength=change.strength if change is not None else 0.0,
            loss=loss,
            increase=loss.loss - start.loss,
            moved=max(known, default=None),
            cosine=measured.curve("cosine")[-1].mean,
            change=measured.unit_attributions[0].total if measured.unit_attributions else None,
        )

    def _changed(self, change: Change) -> tuple[Mapping[str, Tensor], list[float | None]]:
        tensors: dict[str, Tensor] = {}
        moves: list[float | None] = []
        for each, old, whole in self.layers:
            if change.scale is not None:
                new = changed_weights(old, change)
            else:
                new = old if whole is old else partly(old, whole, change.strength)
            tensors |= changed_tensors(each, old, new, self.live.store.read, change)
            moves.append(moved(old.w_v, old.w_o, new.w_v, new.w_o)[1])
        return tensors, moves


def _judged(points: Sequence[EditPoint], change: Change, tolerated: float) -> tuple[float | None, str]:
    """The largest strength that is worth it, and a sentence about it."""
    start, *others = points
    cheap = [point for point in others if point.increase <= tolerated]
    if not cheap:
        first = others[0]
        grows = f"the loss grows by {first.increase:.3g}, more than {tolerated:g}"
        return None, f"Not worth it: already at strength {first.strength:g} {grows}."
    best = cheap[-1]
    if best.cosine is None or start.cosine is None:
        return None, "Nothing can be said: no sequence has a mean cosine."
    move = best.cosine - start.cosine
    meant = 0 if change.form is None else -1 if change.form.high <= 0 else 1 if change.form.low >= 0 else 0
    cost = f"the loss grows by {best.increase:.3g}" if best.increase > 0 else f"the loss falls by {-best.increase:.3g}"
    not_worth = f"Not worth it: at strength {best.strength:g}"
    if abs(move) < LEAST_MOVE:
        return None, f"{not_worth} {cost}, but the mean cosine moves by {move:+.3f} only."
    if meant and math.copysign(1, move) != meant:
        return None, f"{not_worth} the mean cosine moves the wrong way, by {move:+.3f}, and {cost}."
    moves = f"the mean cosine moves from {start.cosine:.3f} to {best.cosine:.3f}"
    return best.strength, f"Up to strength {best.strength:g}: {moves}, and {cost}."
