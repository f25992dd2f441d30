"""The one loop over batches: a live model with its data, and everything that went through it, counted and hashed.

`measure` and `predict` differ only in their observer, which sees hidden states while the model runs.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from oversmooth.data.batches import Batch, hash_inputs, prepare, run_checked, sequences_in
from oversmooth.data.held import Data, InMemory, held
from oversmooth.data.load import LoadedData, given_batches, load_data
from oversmooth.data.options import DataOptions
from oversmooth.errors import NoData, NotDiscovered, OtherStream, RefusedArchitecture, WrongBatch
from oversmooth.measurement.moments import measurable
from oversmooth.measurement.padding import Padding
from oversmooth.models.discovery.watch import discovered, rediscovered
from oversmooth.models.hooks.chain import Chain
from oversmooth.models.hooks.places import Place
from oversmooth.models.hooks.taps import Restart, observed
from oversmooth.models.live import SEQUENCES_AT_ONCE, is_offloaded, quiet_eval
from oversmooth.models.open import LiveModel, OpenedModel
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.module import ModuleStore
from oversmooth.results import DataFacts, Progress, StreamCheck, guarded


def open_live(
    model: OpenedModel,
    batches: Data,
    verb: str,
    reading: DataOptions,
    task: str | None = None,
) -> tuple[LiveModel, LoadedData]:
    """The module that runs, loaded where it is not yet, and its data."""
    batches = _understood(model.source, held(batches, reading.batch_size))  # refused before anything is loaded
    live = model.live(task, verb=verb)
    if is_offloaded(live.model):  # every batch reads all weights once
        reading = replace(reading, batch_size=max(reading.batch_size, SEQUENCES_AT_ONCE))
    if batches is not None and not isinstance(batches, str | InMemory):
        return live, given_batches(batches, reading)
    return live, load_data(batches, live.model, model.source, live.config, reading, once=model.once)


def _understood(source: Source, batches: Data) -> Data:
    """The batches, once the stacks are known; a module whose inputs nobody can make up is watched on the first of them."""
    try:
        source.stacks(bare=False)
    except NotDiscovered:
        if source.module is None or batches is None or isinstance(batches, str | InMemory):
            raise
        waiting = iter(batches)
        first = next(waiting, None)
        if first is None:
            raise
        discovered(source.module, source.config, inputs=prepare(source.module, source.config, first, 2))
        return chain([first], waiting)
    return batches


def _rediscovered(live: LiveModel, inputs: Mapping[str, Any], broken: OtherStream) -> LiveModel:
    """The model with the stream that running it shows, where the declaration of its family reads another one."""
    if live.source.archs or any(stack.arch.proof is not None for stack in live.stacks) or is_offloaded(live.model):
        raise broken  # what the user declared, or what was found by running it already
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    try:
        rediscovered(live.model, tensors)
    except (NotDiscovered, RefusedArchitecture) as error:
        raise broken from error
    store = ModuleStore(live.model)
    found = replace(live.source, store=store, module=live.model, config=store.config)
    return replace(live, running=found, store=store, stacks=found.stacks())


@dataclass
class Processed:
    """What went through the model so far; batches count when they are finished."""

    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    """Sequences of fewer than two tokens: nothing in them can be compared."""
    hash: Any = field(default_factory=hashlib.sha256)

    def add(self, inputs: Mapping[str, Any], keep: Bool[Tensor, "batch token"]) -> None:
        hash_inputs(self.hash, inputs)
        has_two = measurable(keep)
        self.sequences += int(has_two.sum())
        self.skipped += int((~has_two).sum())
        self.tokens += int(keep[has_two].sum())

    def facts(self, data: LoadedData) -> DataFacts:
        return data.facts(
            sha256=self.hash.hexdigest(),
            sequences=self.sequences,
            tokens=self.tokens,
            skipped=self.skipped,
        )


@runtime_checkable
class Observer(Protocol):
    """What looks at hidden states while batches pass through a model, and keeps plain numbers."""

    seen: Processed

    def wants(self, name: str, stack: Stack) -> bool:
        """Whether this place of a stack is to be observed."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """A batch is about to go through the model."""

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        """The hidden states of the batch at one place."""

    def finish(self) -> Bool[Tensor, "batch token"]:
        """Takes over what the batch gave, now that it is complete; returns which of its tokens count."""


Watcher = TypeVar("Watcher", bound=Observer)
Watching = Callable[[LiveModel], AbstractContextManager[Watcher]]
"""Makes the observer of a model, which looks on while the context lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[Watcher]):
    """What passes over all batches leave."""

    live: LiveModel
    """The model as it was read, which discovery may have changed."""
    data: LoadedData
    observer: Watcher
    stream: StreamCheck
    is_partial: bool
    """Whether Ctrl-C ended it early."""


@dataclass
class _Progress:
    """How far a pass is, in layers of sequences: a single long sequence moves on while it runs.

    The total is known from `max_samples`, or as soon as the data have been read to their end; 0 before.
    """

    show: Progress
    stacks: tuple[Stack, ...]
    before: int = 0
    in_batch: int = 0
    total: int = 0

    def batch(self, before: int, in_batch: int, total: int) -> None:
        """A batch begins behind `before` sequences, of `total` in all."""
        self.before, self.in_batch, self.total = before, in_batch, total
        self._tell(0)

    def reached(self, place: Place) -> None:
        """The stream has reached a place; stacks run one after the other."""
        labels = [stack.label for stack in self.stacks]
        done = self.stacks[: labels.index(place.stack)]
        mine = self.stacks[labels.index(place.stack)]
        self._tell(_passes_below(done) + _passes_below([mine], place.depth))

    def _tell(self, passed: int) -> None:
        layers = _passes_below(self.stacks)
        self.show(self.before * layers + self.in_batch * passed, self.total * layers)


def _passes_below(stacks: Sequence[Stack], depth: int | None = None) -> int:
    """Passes through layers of these stacks up to a depth."""
    return sum(depth is None or number < depth for stack in stacks for numbers in stack.passes for number in numbers)


def _with_end(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Every batch, and whether it is the last: one is read ahead, and Ctrl-C there does not lose the one before it."""
    iterator = iter(batches)
    ahead = next(iterator, None)
    while ahead is not None:
        batch, stop = ahead, None
        try:
            ahead = next(iterator, None)
        except KeyboardInterrupt as error:
            stop = error
        yield batch, ahead is None
        if stop is not None:
            raise stop


@dataclass
class _Trial:
    """The model runs on changed inputs, to see what they change; nobody else looks on."""

    is_on: bool = False
    ends: dict[str, list[Tensor]] = field(default_factory=dict)

    def see(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        self.ends[place.stack] = [*self.ends.get(place.stack, ())[:1], h.clone()]

    def of(self, live: LiveModel, restart: Restart, inputs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """The features at both ends of every stack."""
        self.ends, self.is_on = {}, True
        restart()
        try:
            run_checked(live.model, live.config, inputs)
        finally:
            self.is_on = False
        return self.ends


def pass_through(
    live: LiveModel, data: LoadedData, watch: Watching[Watcher], max_samples: int | None, progress: Progress
) -> Run[Watcher]:
    """Runs the model on its batches while the observer that `watch` makes looks on.

    The model's mode is that of evaluation, without gradients, and is put back afterwards. A batch that was interrupted
    leaves no trace. `progress` is called after each layer of each sequence. On the first batch the chain identity is
    checked; where the declaration of the family reads another stream than the model's own, the model is discovered.
    Raises `OtherStream` where that does not help, and `NoData` where nothing could be observed.
    """
    batches = _with_end(data.batches)
    first = next(batches, None)
    again = [] if first is None else [first]
    try:
        return _pass(live, data, watch, chain(again, batches), max_samples, progress)
    except OtherStream as broken:
        assert first is not None, "a stream is checked on a batch"
        found = _rediscovered(live, prepare(live.model, live.config, first[0], max_samples), broken)
        return _pass(found, data, watch, chain(again, batches), max_samples, progress)


def _pass(
    live: LiveModel,
    data: LoadedData,
    watch: Watching[Watcher],
    batches: Iterable[tuple[Batch, bool]],
    max_samples: int | None,
    progress: Progress,
) -> Run[Watcher]:
    is_partial, stream = False, StreamCheck(links=0, sums=0)
    bar = _Progress(guarded(progress), live.stacks)
    with watch(live) as observer:
        seen, padding, trial = observer.seen, Padding(live.model, data.mask), _Trial()
        reached: set[str] = set()

        def observe(place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
            if trial.is_on:
                trial.see(place, h)
                return
            reached.add(place.stack)
            observer.observe(place, h)
            bar.reached(place)

        with quiet_eval(live.model), observed(live.stacks, live.store, observe, observer.wants) as restart:
            run = _Runs(live, observer, restart)
            try:
                for batch, is_last in batches:
                    remaining = None if max_samples is None else max_samples - seen.sequences
                    if remaining == 0:
                        break
                    inputs = prepare(live.model, live.config, batch, remaining)
                    inputs = padding.marked(batch, inputs, lambda other: trial.of(live, restart, other))
                    in_batch = sequences_in(inputs)
                    bar.batch(seen.sequences, in_batch, seen.sequences + in_batch if is_last else max_samples or 0)
                    reached.clear()
                    stream = run(inputs)
                    if not reached:
                        raise _reaches_no_block(live, inputs)
                    seen.add(inputs, observer.finish())
                    inputs.require_used()
            except KeyboardInterrupt:
                if not seen.sequences:
                    raise  # nothing was measured, for no fault of the data
                is_partial = True
        data.warnings += padding.warnings()
        data.notes += padding.notes()
        if not seen.sequences:
            raise NoData(data.description, seen.skipped)
    return Run(live=live, data=data, observer=observer, stream=stream, is_partial=is_partial)


def _reaches_no_block(live: LiveModel, inputs: Mapping[str, Any]) -> WrongBatch:
    """Inputs of a part of the model without attention, such as one tower of several."""
    blocks = " or ".join(stack.names.blocks[0].path or "the block" for stack in live.stacks)
    found = f"{', '.join(name or 'one tensor' for name in inputs)}, which reaches none"
    return WrongBatch(f"inputs that reach {blocks}", found, "Add the inputs of that part, or measure the part alone.")


@dataclass
class _Runs:
    """Runs of the model on one batch after another; the first is checked."""

    live: LiveModel
    observer: Observer
    restart: Restart
    stream: StreamCheck | None = None
    writes_into_stream: bool = False

    def __call__(self, inputs: Mapping[str, Any]) -> StreamCheck:
        if self.stream is None:
            self.stream = self._first(inputs)
        else:
            self._run(inputs)
        return self.stream

    def _run(self, inputs: Mapping[str, Any], chain: Chain | None = None) -> Any:
        self.observer.begin(inputs)
        self.restart(chain, copies=self.writes_into_stream)
        if chain is not None or self.writes_into_stream:  # a model that writes into the stream writes into its inputs
            inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return run_checked(self.live.model, self.live.config, inputs)

    def _first(self, inputs: Mapping[str, Any]) -> StreamCheck:
        chain = Chain(self.live.model, self.live.stacks)
        with chain.watching():
            chain.returned(self._run(inputs, chain))
        if chain.chose_other_inputs():
            return self._first(inputs)
        if chain.writes_into_stream:
            self.writes_into_stream = True
            self._run(inputs)
        return chain.require(self.live.source.target)
