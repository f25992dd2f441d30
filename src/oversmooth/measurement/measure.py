"""`measure`: run a live model on batches and stream the metrics of every place; who smooths, and by how much."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Unpack

import torch

from oversmooth.data.held import Data, reusable
from oversmooth.data.load import LoadedData, RunKeywords, opened
from oversmooth.errors import UnknownName
from oversmooth.measurement.metrics import DEFAULT_METRICS, Choice
from oversmooth.measurement.observer import MeasurementObserver, select
from oversmooth.measurement.pairs import PairGatherer
from oversmooth.measurement.passes import Run, open_live, pass_through
from oversmooth.measurement.untrained import measure_untrained
from oversmooth.models.hooks.attention_maps import attention_watched
from oversmooth.models.hooks.places import BRANCHES, NORMS, PLACES, STREAM
from oversmooth.models.open import LiveModel, Target
from oversmooth.models.source import Stack
from oversmooth.results import DominatingToken, Measurement, Progress, no_progress

AT = {"stream": (*STREAM, *NORMS), "norms": NORMS, "branches": BRANCHES, "all": PLACES}
"""Groups of places by name. Norms that are not on the stream are left out of `stream`."""


def measure(
    target: Target,
    data: Data = None,
    *,
    metrics: Choice | Iterable[Choice] = DEFAULT_METRICS,
    at: str | Sequence[str] = "stream",
    prefix_tokens: str = "keep",
    pairs: bool = False,
    null: bool = False,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> Measurement:
    """Metrics of every layer and sub-block of a model, averaged over sequences, and who changed them.

    `data`: an iterable of what the model's `forward` takes (a dict of tensors, a tokenizer's output, or one tensor);
    or a text file, image folder, table or dataset name; or nothing, for built-in samples. How they are read: `max_samples`,
    `max_tokens`, `per_line`, `mean`, `std` and others of `DataOptions`. `at` is `stream` (default),
    `norms`, `branches`, `all`, or names of places. `metrics` are names, functions of your own, `steps` (what each sub-block
    and block does: influence and its parts), `attention` (entropy, sinks, rank), or `all`. `prefix_tokens` is `keep` or
    `drop`. With `pairs`, also how the cosines of all pairs of tokens are spread at block outputs; with `null`, also the mean
    cosine of the same architecture untrained. Ctrl-C returns what was measured so far, marked partial. How the model is
    opened and run: `device`, `dtype`, `offload`, `base` and others of `LoadOptions`. A live model's mode, hooks and device
    stay as they are.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> [point.depth for point in osm.measure(model, [torch.randn(2, 10, 32)]).curve("cosine")]
    [0, 1, 2, 3]
    """
    if prefix_tokens not in ("keep", "drop"):
        raise UnknownName("choice of prefix_tokens", prefix_tokens, ("keep", "drop"))
    chosen, places = select(metrics), _places(at)
    model, how = opened(target, options, data)

    @contextmanager
    def watch(live: LiveModel) -> Iterator[MeasurementObserver]:
        observer = MeasurementObserver(
            model=live.model,
            chosen=chosen,
            stacks={stack.label: stack for stack in live.stacks},
            names=places,
            adds_stream_norms=at == "stream",
            drop_prefix=prefix_tokens == "drop",
            pairs=PairGatherer(how.seed) if pairs else None,
        )
        with ExitStack() as watching:
            if chosen.attention:
                observer.attention.maps_of = watching.enter_context(attention_watched(live.stacks, live.store))
            yield observer

    given = reusable(data) if null else data  # the untrained copy sees the same batches
    with model.alone:
        run = pass_through(*open_live(model, given, "measure", how), watch, how.max_samples, progress)
        found = _result(run, seed=how.seed, prefix_tokens=prefix_tokens)
        if not null:
            return found
        if found.is_partial:
            return replace(found, untrained_missing="the run was interrupted")
        facts = {"inputs_sha256": found.data.sha256, "prefix_tokens": prefix_tokens}
        curves, reason = measure_untrained(model, given, how, **facts)
        return replace(found, untrained=curves, untrained_missing=reason)


def _result(run: Run[MeasurementObserver], *, seed: int, prefix_tokens: str) -> Measurement:
    live, observer = run.live, run.observer
    metrics = "float64" if next(live.model.parameters()).dtype == torch.float64 else "float32"
    precision = f"model {live.runs_in()}, metrics {metrics}"
    return Measurement(
        provenance=live.provenance(compute_dtype=precision, seed=seed),
        data=observer.seen.facts(run.data),
        prefix_tokens=_prefix_word(live.stacks, prefix_tokens),
        is_partial=run.is_partial,
        stream=run.stream,
        values=observer.values(),
        attributions=observer.cosine_chain.attributions(observer.stacks),
        definitions=observer.chosen.definitions(),
        problems=tuple(observer.problems.values()),
        unit_attributions=observer.unit_chain.attributions(observer.stacks),
        raw_attributions=observer.raw_chain.attributions(observer.stacks),
        dominating=tuple(_with_word(found, run.data) for found in observer.largest.results()),
        heads=observer.attention.results(),
        spans=observer.spans(),
        pairs=observer.pairs.results() if observer.pairs is not None else (),
        similarities=observer.similarities(),
    )


def _with_word(found: DominatingToken, data: LoadedData) -> DominatingToken:
    """The token as text too, where texts went through a tokenizer."""
    tokenizer = next((part.texts.tokenizer for part in data.parts if part.texts is not None), None)
    spelled = getattr(tokenizer, "convert_ids_to_tokens", None)  # tokenizers of other libraries have their own ways
    return found if spelled is None or found.token_id is None else replace(found, word=str(spelled(found.token_id)))


def _places(at: str | Sequence[str]) -> frozenset[str]:
    """Places by name, where groups of places stand for theirs."""
    names = (at,) if isinstance(at, str) else tuple(at)
    for name in names:
        if name not in AT and name not in PLACES:
            raise UnknownName("place", name, (*AT, *PLACES))
    return frozenset(place for name in names for place in AT.get(name, (name,)))


def _prefix_word(stacks: Sequence[Stack], choice: str) -> str:
    has_prefix = any(stack.prefix_tokens for stack in stacks)
    return {"keep": "kept", "drop": "dropped"}[choice] if has_prefix else "none"
