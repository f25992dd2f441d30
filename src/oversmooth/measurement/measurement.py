"""`measure`: run a live model on batches and stream the metrics of every place; who smooths, and by how much."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Unpack

from oversmooth.data.batches import Batch
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import UnknownName
from oversmooth.measurement.metrics import DEFAULT_METRICS, Choice
from oversmooth.measurement.observer import MeasurementObserver
from oversmooth.measurement.passes import LiveModel, open_live, pass_through
from oversmooth.measurement.selection import select
from oversmooth.models.hooks.attention_maps import attention_watched
from oversmooth.models.hooks.places import BRANCHES, NORMS, PLACES, STREAM
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Declaration, Stack, Target
from oversmooth.results import DominatingToken, Measurement, Progress, no_progress

AT = {"stream": (*STREAM, *NORMS), "norms": NORMS, "branches": BRANCHES, "all": PLACES}
"""Groups of places by name. Norms that are not on the stream are left out of `stream`."""


def measure(
    target: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    metrics: Choice | Iterable[Choice] = DEFAULT_METRICS,
    at: str | Sequence[str] = "stream",
    prefix_tokens: str = "keep",
    base: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    arch: Declaration | None = None,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> Measurement:
    """Metrics of every layer and sub-block of a model, averaged over sequences, and who changed them.

    `data`: an iterable of what the model's `forward` takes (a dict of tensors, a tokenizer's output, or one tensor);
    or a text file, image folder, table or dataset name; or nothing, for built-in samples. How they are read: `max_samples`,
    `max_tokens`, `per_line`, `mean`, `std` and others of `ReadingOptions`. `at` is `stream` (default),
    `norms`, `branches`, `all`, or names of places. `metrics` are names, functions of your own, `steps` (what each sub-block
    and block does: influence and its parts), `attention` (entropy, sinks, rank), or `all`. `prefix_tokens` is `keep` or
    `drop`. Ctrl-C returns what was measured so far, marked partial. `base` is the model that an adapter is for, `dtype`
    what the model runs in and `offload` whether its weights are read block by block meanwhile. A live model's mode, hooks
    and device stay as they are.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> [point.depth for point in osm.measure(model, [torch.randn(2, 10, 32)]).curve("cosine")]
    [0, 1, 2, 3]
    """
    if prefix_tokens not in ("keep", "drop"):
        raise UnknownName("choice of prefix_tokens", prefix_tokens, ("keep", "drop"))
    how, chosen = Reading(**reading), select(metrics)
    live = open_live(
        open_source(target, base=base, dtype=dtype, offload=offload),
        data,
        "measure",
        reading=how,
        device=device,
        trust_remote_code=trust_remote_code,
        arch=arch,
    )
    observer = MeasurementObserver(
        model=live.model,
        chosen=chosen,
        stacks={stack.label: stack for stack in live.stacks},
        names=_places(at),
        adds_stream_norms=at == "stream",
        drop_prefix=prefix_tokens == "drop",
    )
    with ExitStack() as watching:
        if chosen.attention:
            observer.attention.maps_of = watching.enter_context(attention_watched(live.stacks, live.store))
        is_partial = pass_through(live, observer, how.max_samples, progress)
    return _result(
        observer, live, seed=how.seed, prefix=_prefix_word(live.stacks, prefix_tokens), is_partial=is_partial
    )


def _result(observer: MeasurementObserver, live: LiveModel, *, seed: int, prefix: str, is_partial: bool) -> Measurement:
    precision = f"model {live.runs_in()}, metrics float32"
    return Measurement(
        provenance=provenance_of(live.source, live.stacks, live.hashed(), compute_dtype=precision, seed=seed),
        data=observer.seen.facts(live.data),
        prefix_tokens=prefix,
        is_partial=is_partial,
        values=observer.values(),
        attributions=observer.chain.attributions(),
        definitions=observer.chosen.definitions(),
        problems=tuple(observer.problems.values()),
        unit_attributions=observer.unit_chain.attributions(),
        dominating=tuple(_with_word(found, live) for found in observer.largest.results()),
        heads=observer.attention.results(),
        spans=observer.spans(),
    )


def _with_word(found: DominatingToken, live: LiveModel) -> DominatingToken:
    """The token as text too, where texts went through a tokenizer."""
    tokenizer = next((part.texts.tokenizer for part in live.data.parts if part.texts is not None), None)
    spelled = getattr(tokenizer, "convert_ids_to_tokens", None)  # tokenizers of other libraries have their own ways
    return found if spelled is None or found.token_id is None else replace(found, word=str(spelled(found.token_id)))


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
