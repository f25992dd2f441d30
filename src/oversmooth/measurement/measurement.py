"""`measure`: run a live model on batches and stream the metrics of every place; who smooths, and by how much."""

from collections.abc import Iterable, Sequence
from typing import Unpack

from oversmooth.data.batches import Batch
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import UnknownName
from oversmooth.measurement.metrics import DEFAULT_METRICS, Choice, lookup
from oversmooth.measurement.observer import MeasurementObserver
from oversmooth.measurement.passes import open_live, pass_through
from oversmooth.models.hooks.places import BRANCHES, NORMS, PLACES, STREAM
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Declaration, Stack, Target
from oversmooth.results import Measurement, Progress, no_progress

AT = {"stream": (*STREAM, *NORMS), "norms": NORMS, "branches": BRANCHES, "all": PLACES}
"""Groups of places by name. Norms that are not on the stream are left out of `stream`."""


def measure(
    target: Target,
    batches: Iterable[Batch] | str | None = None,
    *,
    metrics: Choice | Iterable[Choice] = DEFAULT_METRICS,
    at: str | Sequence[str] = "stream",
    prefix_tokens: str = "keep",
    device: str | None = None,
    trust_remote_code: bool = False,
    arch: Declaration | None = None,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> Measurement:
    """Metrics of every layer and sub-block of a model, averaged over sequences, and who changed them.

    `batches`: an iterable of what the model's `forward` takes (a dict of tensors, a tokenizer's output, or one tensor);
    or a text file, image folder, table or dataset name; or nothing, for built-in samples. How they are read: `max_samples`,
    `max_tokens`, `per_line`, `mean`, `std` and others of `ReadingOptions`. `at` is `stream` (default),
    `norms`, `branches`, `all`, or names of places. `prefix_tokens` is `keep` or `drop`. Ctrl-C returns what was
    measured so far, marked partial. A live model's mode, hooks and device stay as they are.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> [point.depth for point in osm.measure(model, [torch.randn(2, 10, 32)]).curve("cosine")]
    [0, 1, 2, 3]
    """
    if prefix_tokens not in ("keep", "drop"):
        raise UnknownName("choice of prefix_tokens", prefix_tokens, ("keep", "drop"))
    how = Reading(**reading)
    live = open_live(
        target,
        batches,
        "measure",
        reading=how,
        device=device,
        trust_remote_code=trust_remote_code,
        arch=arch,
    )
    observer = MeasurementObserver(
        model=live.model,
        chosen=lookup(metrics),
        stacks={stack.label: stack for stack in live.stacks},
        names=_places(at),
        adds_stream_norms=at == "stream",
        drop_prefix=prefix_tokens == "drop",
    )
    is_partial = pass_through(live, observer, how.max_samples, progress)
    precision = f"model {live.runs_in()}, metrics float32"
    return Measurement(
        provenance=provenance_of(live.source, live.stacks, live.hashed(), compute_dtype=precision, seed=how.seed),
        data=observer.seen.facts(live.data),
        prefix_tokens=_prefix_word(live.stacks, prefix_tokens),
        is_partial=is_partial,
        values=observer.values(),
        attributions=observer.attributions(),
        definitions=tuple((metric.name, metric.definition) for metric in observer.chosen),
        problems=tuple(observer.problems.values()),
    )


def _places(at: str | Sequence[str]) -> frozenset[str]:
    if isinstance(at, str) and at in AT:
        return frozenset(AT[at])
    names = (at,) if isinstance(at, str) else tuple(at)
    for name in names:
        if name not in PLACES:
            raise UnknownName("place", name, (*AT, *PLACES))
    return frozenset(names)


def _prefix_word(stacks: Sequence[Stack], choice: str) -> str:
    has_prefix = any(stack.prefix_tokens for stack in stacks)
    return {"keep": "kept", "drop": "dropped"}[choice] if has_prefix else "none"
