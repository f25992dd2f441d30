"""A model that runs, with the batches it runs on: what `measure` and `predict` both begin with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.data.loading import load_data
from oversmooth.models.live import load_model, move
from oversmooth.models.opening import open_source
from oversmooth.models.source import Source, Stack, Target
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """An opened target that runs, and its data."""

    source: Source
    """What the user pointed at: target, files, and where the tokenizer is."""
    model: nn.Module
    store: ModuleStore
    config: Mapping[str, Any]
    stacks: tuple[Stack, ...]
    batches: Iterable[Batch]
    description: str
    """Of the data."""

    def hashed(self) -> ReadLog:
        """Every declared tensor read in the order of `inspect`, so that results about one model can be matched."""
        log = ReadLog(self.store)
        for stack in self.stacks:
            for position in range(len(stack.names.blocks)):
                stack.weights(position, log.read)
        return log


def open_run(
    target: Target,
    batches: Iterable[Batch] | str | None,
    verb: str,
    *,
    batch_size: int,
    max_tokens: int,
    max_samples: int | None,
    seed: int,
    device: str | None,
    trust_remote_code: bool,
) -> LiveRun:
    """Loads the model where it is not loaded yet, moves it where asked, and finds its data."""
    source = open_source(target)
    source.stacks()  # what is refused or contradicts itself is said before anything is loaded
    model = load_model(source, verb, trust_remote_code=trust_remote_code)
    if device is not None:
        move(model, device)
    live = source if isinstance(source.store, ModuleStore) else open_source(model)
    assert isinstance(live.store, ModuleStore)
    stacks = live.stacks()
    description = "batches given by the caller"
    if batches is None or isinstance(batches, str):
        loaded = load_data(
            batches,
            model,
            source,
            live.config,
            batch_size=batch_size,
            max_tokens=max_tokens,
            max_samples=max_samples,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        batches, description = loaded.batches, loaded.description
    return LiveRun(
        source=source,
        model=model,
        store=live.store,
        config=live.config,
        stacks=stacks,
        batches=batches,
        description=description,
    )
