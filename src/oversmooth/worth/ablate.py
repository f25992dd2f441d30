"""`ablate`: what does each attention, feed-forward and block cost to leave out, and which cheap number would have told?"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from oversmooth.data.batches import run_checked
from oversmooth.data.held import Data, reusable
from oversmooth.data.load import LoadedData, RunKeywords, opened
from oversmooth.data.options import DataOptions
from oversmooth.errors import CannotControl, NotSupported, OversmoothError, UnknownName
from oversmooth.measurement.observer import MeasurementObserver, select
from oversmooth.measurement.passes import Processed
from oversmooth.measurement.statistics import rank_correlation
from oversmooth.measurement.steps import BLOCK
from oversmooth.models.hooks.chain import Chain
from oversmooth.models.hooks.removal import PARTS, Replay
from oversmooth.models.hooks.taps import observed
from oversmooth.models.live import quiet_eval
from oversmooth.models.open import LiveModel, Target
from oversmooth.prediction.predict import predict
from oversmooth.results import Missing, Progress, guarded, no_progress
from oversmooth.results.changes import Ablation, Loss, Predictor, Removal
from oversmooth.spectra.inspect import inspect
from oversmooth.worth.task_loss import LossMeter, Question, new_judge, open_judged, questions

PLACE_OF = {"attention": ("attn_sum",), "feed-forward": ("ffn_sum",), "block": (BLOCK,)}
CHEAP = (
    "influence",
    "contribution",
    "ceiling",
    "influence_smoothing",
    "influence_shared",
    "influence_differing",
    "undone",
)
Key = tuple[str, int, str]
"""Label of the stack, position of the block, and part."""


def ablate(
    target: Target,
    data: Data = None,
    *,
    task: str | None = None,
    parts: Sequence[str] = PARTS,
    theory: bool = True,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> Ablation:
    """Removes each part of each block in turn, in one loaded model, and says what that costs beside cheap numbers.

    `parts` are some of `attention`, `feed-forward` and `block`. The loss is that of `task_loss`; of an embedding model, how
    well its own pairwise similarities are kept. Blocks before the removed part are not computed again, nor is its own where
    only its feed-forward or all of it goes: L blocks take 1.5 L + 0.5 passes. With `theory`, the tendency of the weights and
    the rungs of `predict`, which is one more pass, are among the cheap numbers. Shared layers are removed at all depths at
    once.
    """
    for part in parts:
        if part not in PARTS:
            raise UnknownName("part", part, PARTS)
    given = reusable(data)
    model, how = opened(target, options, given)
    with model.alone:
        live, loaded, task = open_judged(model, given, task, "ablate", how)
        return _ablated(live, loaded, task, parts, theory, how, progress)


def _ablated(
    live: LiveModel,
    loaded: LoadedData,
    task: str,
    parts: Sequence[str],
    theory: bool,
    how: DataOptions,
    progress: Progress,
) -> Ablation:
    run = _Run(live, task, parts)
    seen = Processed()
    kept: list[Question] = []
    with quiet_eval(live.model):
        for asked in questions(live, loaded, task, how, seen):
            kept.append(asked)
            run.batch(asked)
            guarded(progress)(seen.sequences, how.max_samples or 0)
    cheap = _cheap_numbers(live, run.observer)
    if theory:
        _add_theory(cheap, live, [asked.inputs for asked in kept])
    removals = run.removals(cheap)
    return Ablation(
        provenance=live.provenance(seed=how.seed),
        data=run.observer.seen.facts(loaded),
        task=task,
        whole=run.whole.result(run.whole),
        removals=removals,
        predictors=tuple(_predictors(removals)),
        passes=run.passes / max(len(kept), 1),
    )


def cost_of_blocks(live: LiveModel, task: str, asked: Sequence[Question]) -> dict[int, float]:
    """By how much the loss grows without each block of a model of one stack, by its position."""
    run = _Run(live, task, ("block",))
    with quiet_eval(live.model):
        for question in asked:
            run.batch(question)
    whole = run.whole.result(run.whole).loss
    return {position: judge.result(run.whole).loss - whole for (_, position, _), judge in run.judges.items()}


@dataclass
class _Run:
    """One judge of the whole model and one of each removal."""

    live: LiveModel
    task: str
    parts: Sequence[str]
    passes: float = 0.0
    reasons: dict[Key, str] = field(default_factory=dict)
    judges: dict[Key, LossMeter] = field(default_factory=dict)
    whole: LossMeter = field(init=False)
    observer: MeasurementObserver = field(init=False)
    """Measures the whole model while it runs once."""

    def __post_init__(self) -> None:
        self.whole = new_judge(self.task, self.live)
        self.keys = [
            (stack.label, position, part)
            for stack in self.live.stacks
            for position in range(len(stack.names.blocks))
            for part in self.parts
        ]
        self._stacks = {stack.label: stack for stack in self.live.stacks}
        self._replays = {label: Replay(stack, self.live.store) for label, stack in self._stacks.items()}
        self.observer = MeasurementObserver(
            model=self.live.model,
            chosen=select(("log_hfc_lfc_unit", *CHEAP)),
            stacks=self._stacks,
            names=frozenset(),
            adds_stream_norms=True,
            drop_prefix=False,
        )

    def batch(self, asked: Question) -> None:
        """The whole model once, then every removal; what comes before the removed part is not computed again."""
        # Blocks of one stack follow each other; of several stacks only one is replayed at a time.
        for number, (label, replay) in enumerate(self._replays.items()):
            with replay.recording():
                if number == 0:
                    self.whole.add(self._run_measured(asked), asked.inputs, asked.answers)
                else:
                    self._run(asked)
            self.passes += 1
            for key in (key for key in self.keys if key[0] == label and key not in self.reasons):
                self._removal(key, replay, asked)

    def _run_measured(self, asked: Question) -> Any:
        observer, live = self.observer, self.live
        with observed(live.stacks, live.store, observer.observe, observer.wants) as restart:
            observer.begin(asked.inputs)
            chain = Chain(live.model, live.stacks)
            restart(chain)
            with chain.watching():
                output = self._run(asked)
            chain.returned(output)
            chain.require(live.source.target)
            if chain.chose_other_inputs():
                return self._run_measured(asked)
            if chain.writes_into_stream:
                why = "what a block was given is kept to run the later ones again"
                raise NotSupported("ablate", "for blocks that write into their input (x += ...)", why)
            observer.seen.add(asked.inputs, observer.finish())
        return output

    def _removal(self, key: Key, replay: Replay, asked: Question) -> None:
        label, position, part = key
        try:
            with replay.without(position, part):
                output = self._run(asked)
        except CannotControl as error:
            self.reasons[key] = error.problem
            return
        count = len(self._stacks[label].names.blocks)
        self.passes += (count - position - replay.knows(position, part)) / count if replay.is_usable else 1
        self.judges.setdefault(key, new_judge(self.task, self.live)).add(output, asked.inputs, asked.answers)

    def _run(self, asked: Question) -> Any:
        return run_checked(self.live.model, self.live.config, asked.inputs)

    def removals(self, cheap: Mapping[Key, Mapping[str, float]]) -> tuple[Removal, ...]:
        whole = self.whole.result(self.whole)
        return tuple(self._result(key, whole, cheap.get(key, {})) for key in self.keys)

    def _result(self, key: Key, whole: Loss, cheap: Mapping[str, float]) -> Removal:
        label, position, part = key
        judge = self.judges.get(key)
        found = None if judge is None else judge.result(self.whole)
        reason = self.reasons.get(key, "it was not run")
        return Removal(
            stack=label,
            layer=self._stacks[label].names.blocks[position].index,
            part=part,
            increase=None if found is None else found.loss - whole.loss,
            loss=None if found is None else found.loss,
            accuracy=None if found is None else found.accuracy,
            cheap=tuple(cheap.items()),
            missing=() if found is not None else (Missing(field="increase", reason=reason),),
        )


# --- cheap numbers ----------------------------------------------------------------------------------------------------


def _cheap_numbers(live: LiveModel, observer: MeasurementObserver) -> dict[Key, dict[str, float]]:
    """Numbers about every part that need no removal."""
    found: dict[Key, dict[str, float]] = {}
    positions = _positions(live)
    for value in observer.values():
        part = next((part for part, places in PLACE_OF.items() if value.place in places), None)
        position = positions.get((value.stack, value.depth))
        if part is not None and position is not None and value.mean is not None and value.metric in CHEAP:
            found.setdefault((value.stack, position, part), {})[value.metric] = value.mean
    for attribution in observer.unit_chain.attributions(observer.stacks):
        for change in attribution.parts:
            position = positions.get((change.stack, change.depth))
            if change.part in PARTS and position is not None:
                found.setdefault((change.stack, position, change.part), {})["smoothing_change"] = change.change
    return found


def _positions(live: LiveModel) -> dict[tuple[str, int], int]:
    """Which block stands at a depth of a stack."""
    return {
        (stack.label, depth + 1): position
        for stack in live.stacks
        for position, passes in enumerate(stack.passes)
        for depth in passes
    }


def _add_theory(found: dict[Key, dict[str, float]], live: LiveModel, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Tendency and rungs of attention, where the theory applies."""
    positions = _positions(live)
    by_index = {(s.label, block.index): block.position for s in live.stacks for block in s.names.blocks}
    for layer in inspect(live.running).layers:
        position = by_index.get((layer.stack, layer.layer))
        if layer.tendency is not None and position is not None:
            found.setdefault((layer.stack, position, "attention"), {})["tendency"] = layer.tendency
    try:
        predicted = predict(live.running, inputs, solve=1, heads=False).layers
    except OversmoothError:
        return  # models that the theory does not cover have no rungs
    for one in predicted:
        position = positions.get((one.stack, one.depth))
        if position is None:
            continue
        for rung in one.rungs:
            if rung.mean is not None:
                found.setdefault((one.stack, position, "attention"), {})[f"rung {rung.rung} {rung.name}"] = rung.mean


def _predictors(removals: Sequence[Removal]) -> Iterable[Predictor]:
    """Rank correlations of every cheap number with what removal costs, part by part."""
    for part in PARTS:
        rows = [item for item in removals if item.part == part and item.increase is not None]
        for name in dict.fromkeys(name for item in rows for name, _ in item.cheap):
            pairs = [(dict(item.cheap)[name], item.increase) for item in rows if name in dict(item.cheap)]
            found = rank_correlation([a for a, _ in pairs], [b or 0.0 for _, b in pairs])
            if found is not None:
                yield Predictor(
                    part=part,
                    name=name,
                    rank_correlation=found,
                    interval=rank_interval(found, len(pairs)),
                    parts=len(pairs),
                )


def rank_interval(correlation: float, count: int) -> tuple[float, float] | None:
    """95% interval of Spearman's correlation: Fisher's transform with the error sqrt((1 + r^2/2) / (n - 3)).

    `None` for fewer than four, and for a perfect order, of which the transform knows no interval.
    """
    if count < 4 or abs(correlation) > 1 - 1e-9:
        return None
    half = 1.959964 * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    return math.tanh(math.atanh(correlation) - half), math.tanh(math.atanh(correlation) + half)
