"""The one loop over batches: a live model with its data, and everything that went through it, counted and hashed.

`measure` and `predict` differ only in their observer, which sees hidden states while the model runs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import Batch, hash_inputs, prepare, run_checked, sequences_in
from oversmooth.data.given import require_there
from oversmooth.data.loading import Data, given_batches, load_data
from oversmooth.data.reading import Reading
from oversmooth.errors import Conflict, NoData, NotDiscovered
from oversmooth.measurement.moments import measurable
from oversmooth.models.discovery.known import discovered
from oversmooth.models.hooks.observing import observed
from oversmooth.models.hooks.places import Place
from oversmooth.models.live import load_model, move, quiet_eval
from oversmooth.models.offload import SEQUENCES_AT_ONCE, is_offloaded
from oversmooth.models.opening import open_source
from oversmooth.models.source import Declaration, Source, Stack, Target
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import DataFacts, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """An opened target that runs, and its data."""

    source: Source
    """What the user pointed at: target, files, and where the tokenizer is."""
    model: nn.Module
    store: ModuleStore
    config: Mapping[str, Any]
    stacks: tuple[Stack, ...]
    data: Data

    def runs_in(self) -> str:
        """The dtype of the model, and whether its weights stay in their files, in words."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return f"{dtype} (weights read block by block)" if is_offloaded(self.model) else dtype

    def hashed(self) -> ReadLog:
        """Every declared tensor read in the order of `inspect`, so that results about one model can be matched."""
        log = ReadLog(self.store)
        for stack in self.stacks:
            for position in range(len(stack.names.blocks)):
                stack.weights(position, log.read)
        return log


def open_live(
    target: Target,
    batches: Iterable[Batch] | str | None,
    verb: str,
    *,
    reading: Reading,
    device: str | None,
    trust_remote_code: bool,
    arch: Declaration | None = None,
) -> LiveModel:
    """Loads the model where it is not loaded yet, moves it where asked, and finds its data."""
    if batches is not None and reading.ids is not None:
        raise Conflict(("--data", "--ids") if isinstance(batches, str) else ("batches", "ids"))
    if isinstance(batches, str):
        require_there(batches)
    source = open_source(target, arch=arch)
    batches = _understood(source, batches)  # what is refused or contradicts itself is said before anything is loaded
    model = load_model(source, verb, trust_remote_code=trust_remote_code)
    if is_offloaded(model):
        # Every batch reads all weights once.
        reading = replace(reading, batch_size=max(reading.batch_size, SEQUENCES_AT_ONCE))
    elif device is not None:
        move(model, device)
    live = source if isinstance(source.store, ModuleStore) else open_source(model, arch=arch)
    assert isinstance(live.store, ModuleStore)
    stacks = live.stacks()
    if batches is None or isinstance(batches, str):
        data = load_data(batches, model, source, live.config, reading, trust_remote_code=trust_remote_code)
    else:
        data = given_batches(batches)
    return LiveModel(
        source=source,
        model=model,
        store=live.store,
        config=live.config,
        stacks=stacks,
        data=data,
    )


def _understood(source: Source, batches: Iterable[Batch] | str | None) -> Iterable[Batch] | str | None:
    """The batches, once the stacks are known; a module whose inputs nobody can make up is watched on the first of them."""
    try:
        source.stacks()
    except NotDiscovered:
        if source.module is None or batches is None or isinstance(batches, str):
            raise
        waiting = iter(batches)
        first = next(waiting, None)
        if first is None:
            raise
        discovered(source.module, source.config, inputs=prepare(source.module, source.config, first, 2))
        return chain([first], waiting)
    return batches


@dataclass
class Seen:
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

    def facts(self, data: Data) -> DataFacts:
        return data.facts(
            sha256=self.hash.hexdigest(),
            sequences=self.sequences,
            tokens=self.tokens,
            skipped=self.skipped,
        )


@runtime_checkable
class Observer(Protocol):
    """What looks at hidden states while batches pass through a model, and keeps plain numbers."""

    seen: Seen

    def wants(self, name: str, stack: Stack) -> bool:
        """Whether this place of a stack is to be observed."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """A batch is about to go through the model."""

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        """The hidden states of the batch at one place."""

    def finish(self) -> Bool[Tensor, "batch token"]:
        """Takes over what the batch gave, now that it is complete; returns which of its tokens count."""


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


def pass_through(live: LiveModel, observer: Observer, max_samples: int | None, progress: Progress) -> bool:
    """Runs the model on its batches under the observer's eyes; whether Ctrl-C ended it early.

    The model's mode is that of evaluation, without gradients, and is put back afterwards. A batch that was interrupted
    leaves no trace. `progress` hears of layers of sequences. Raises `NoData` where nothing could be observed.
    """
    is_partial = False
    seen = observer.seen
    bar = _Progress(progress, live.stacks)

    def observe(place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        observer.observe(place, h)
        bar.reached(place)

    with quiet_eval(live.model), observed(live.stacks, live.store, observe, observer.wants) as restart:
        try:
            for batch, is_last in _with_end(live.data.batches):
                remaining = None if max_samples is None else max_samples - seen.sequences
                if remaining == 0:
                    break
                inputs = prepare(live.model, live.config, batch, remaining)
                in_batch = sequences_in(inputs)
                bar.batch(seen.sequences, in_batch, seen.sequences + in_batch if is_last else max_samples or 0)
                observer.begin(inputs)
                restart()
                run_checked(live.model, live.config, inputs)
                seen.add(inputs, observer.finish())
        except KeyboardInterrupt:
            is_partial = True
    if not seen.sequences:
        raise NoData(live.data.description, seen.skipped)
    return is_partial
