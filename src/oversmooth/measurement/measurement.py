"""`measure`: run a live model on batches and stream the metrics of every place; who smooths, and by how much.

Metrics are computed inside the hooks and only per-sequence numbers survive a batch, so the cost in memory is that of
the forward pass. Attribution uses, per sequence, `log(HFC/LFC)` at the places of the residual stream: differences
between neighbours are exactly what each sub-block did, and they add up to the change from embedding to output.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import Batch, keep_mask, prepare, run_checked
from oversmooth.errors import NoData, UnknownName
from oversmooth.measurement.metrics import (
    DEFAULT_METRICS,
    Choice,
    Kept,
    Metric,
    Moments,
    log_hfc_lfc,
    lookup,
    measurable,
)
from oversmooth.measurement.running import open_run
from oversmooth.models.hooks.places import BRANCHES, NORMS, PLACES, STREAM, Place, observed, on_stream
from oversmooth.models.live import quiet_eval
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Stack, Target
from oversmooth.results import Attribution, DataFacts, Measurement, Missing, Part, PlaceValue, Progress, no_progress

AT = {"stream": (*STREAM, *NORMS), "norms": NORMS, "branches": BRANCHES, "all": PLACES}
"""Groups of places by name. Norms that are not on the stream are left out of `stream`."""
PART_OF = {
    "attn_sum": "attention",
    "cross_sum": "cross-attention",
    "ffn_sum": "feed-forward",
    "other_sum": "other",
    **dict.fromkeys((*NORMS, "final_norm"), "norm"),
}


def measure(
    target: Target,
    batches: Iterable[Batch] | str | None = None,
    *,
    metrics: Choice | Iterable[Choice] = DEFAULT_METRICS,
    at: str | Sequence[str] = "stream",
    prefix_tokens: str = "keep",
    max_samples: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 128,
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
) -> Measurement:
    """Metrics of every layer and sub-block of a model, averaged over sequences, and who changed them.

    `batches`: an iterable of what the model's `forward` takes (a dict of tensors, a tokenizer's output, or one tensor);
    or a text file, image folder, table or dataset name; or nothing, for built-in samples. `at` is `stream` (default),
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
    live = open_run(
        target,
        batches,
        "measure",
        batch_size=batch_size,
        max_tokens=max_tokens,
        max_samples=max_samples,
        seed=seed,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    model = live.model
    run_ = _Run(
        model=model,
        chosen=lookup(metrics),
        stacks={stack.label: stack for stack in live.stacks},
        names=_places(at),
        adds_stream_norms=at == "stream",
        drop_prefix=prefix_tokens == "drop",
    )
    is_partial = False
    with quiet_eval(model), observed(live.stacks, live.store, run_.observe, run_.wants) as restart:
        try:
            for batch in live.batches:
                remaining = None if max_samples is None else max_samples - run_.seen
                if remaining == 0:
                    break
                inputs = prepare(model, live.config, batch, remaining)
                run_.begin(inputs)
                restart()
                run_checked(model, inputs)
                run_.finish()
                progress(run_.seen, max_samples or 0)
        except KeyboardInterrupt:
            is_partial = True
    if not run_.seen:
        raise NoData(live.description, run_.skipped)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    precision = f"model {dtype}, metrics float32"
    return Measurement(
        provenance=provenance_of(live.source, live.stacks, live.hashed(), compute_dtype=precision, seed=seed),
        data=DataFacts(
            description=live.description,
            sha256=run_.hash.hexdigest(),
            sequences=run_.seen,
            tokens=run_.tokens,
            skipped=run_.skipped,
        ),
        prefix_tokens=_prefix_word(live.stacks, prefix_tokens),
        is_partial=is_partial,
        values=run_.values(),
        attributions=run_.attributions(),
        definitions=tuple((metric.name, metric.definition) for metric in run_.chosen),
        problems=tuple(run_.problems.values()),
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


# --- streaming ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    """Mean and standard error of a stream of numbers (Welford, by batches), in float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, numbers: Float[Tensor, " batch"]) -> None:
        if not len(numbers):
            return
        numbers = numbers.cpu().double()
        count, mean = len(numbers), numbers.mean().item()
        total = self.count + count
        step = mean - self.mean
        self.squares += (numbers - mean).square().sum().item() + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total

    @property
    def standard_error(self) -> float | None:
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None


@dataclass
class _Run:
    """Everything one measurement accumulates."""

    model: nn.Module
    chosen: tuple[Metric, ...]
    stacks: Mapping[str, Stack]
    names: frozenset[str]
    adds_stream_norms: bool
    drop_prefix: bool
    seen: int = 0
    tokens: int = 0
    skipped: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    problems: dict[Place, str] = field(default_factory=dict)
    _inputs: Mapping[str, Tensor] = field(default_factory=dict)
    _sums: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _keep: dict[str, tuple[Bool[Tensor, "batch token"], Bool[Tensor, " batch"]]] = field(default_factory=dict)
    _kept: dict[str, Kept | None] = field(default_factory=dict)
    """What is measured of each stack; `None` where no sequence keeps two tokens."""
    _pending: list[tuple[Place, str, Float[Tensor, " defined"]]] = field(default_factory=list)
    _stream: dict[Place, Float[Tensor, " batch"]] = field(default_factory=dict)
    _parts: dict[str, dict[Place, Running]] = field(default_factory=dict)
    _totals: dict[str, Running] = field(default_factory=dict)

    def wants(self, name: str, stack: Stack) -> bool:
        """Asked-for places, and every place of the stream, which attribution needs."""
        is_stream = on_stream(name, stack.arch.residual)
        return is_stream or (name in self.names and not self.adds_stream_norms)

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        for name, value in sorted(inputs.items()):
            self.hash.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            self.hash.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._inputs = inputs
        self._keep.clear()
        self._stream.clear()
        self._pending.clear()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        if place.stack not in self._keep:
            stack = self.stacks[place.stack]
            drop = stack.prefix_tokens if self.drop_prefix else 0
            keep = keep_mask(self.model, self._inputs, stack, h, drop)
            has_two = measurable(keep)
            self._keep[place.stack] = (keep, has_two)
            self._kept[place.stack] = Kept.of(keep[has_two]) if bool(has_two.any()) else None
        kept = self._kept[place.stack]
        if kept is None:
            return
        if len(h) > len(kept.n):
            h = h[self._keep[place.stack][1]]
        moments = Moments.of(h, kept)
        broken = int((~moments.is_finite).sum())
        if broken and place.stack not in {known.stack for known in self.problems}:
            where = f"{place.stack + ', ' if place.stack else ''}depth {place.depth}, {place.name}"
            self.problems[place] = f"NaN or infinity in {broken} of {len(h)} sequences, first seen at {where}"
        for metric in self.chosen if place.name in self.names else ():
            found = metric.on(moments)
            self._pending.append((place, metric.name, found.values[found.defined]))
        if on_stream(place.name, self.stacks[place.stack].arch.residual):
            found = log_hfc_lfc.on(moments)
            self._stream[place] = found.values.cpu().double().masked_fill(~found.defined.cpu(), torch.nan)

    def finish(self) -> None:
        """Takes the batch into the averages; one that was interrupted never gets here."""
        for place, metric, values in self._pending:
            self._sums.setdefault((place, metric), Running()).add(values)
        first = next(iter(self._keep.values()))
        self.seen += int(first[1].sum())
        self.skipped += int((~first[1]).sum())
        self.tokens += int(first[0][first[1]].sum())
        for label in self._keep:
            chain = [(place, values) for place, values in self._stream.items() if place.stack == label]
            if len(chain) < 2:
                continue
            table = torch.stack([values for _, values in chain], 1)
            complete = table[~table.isnan().any(1)]
            changes = complete.diff(dim=1)
            parts = self._parts.setdefault(label, {})
            for column, (place, _) in enumerate(chain[1:]):
                parts.setdefault(place, Running()).add(changes[:, column])
            self._totals.setdefault(label, Running()).add(complete[:, -1] - complete[:, 0])

    # --- results ---

    def values(self) -> tuple[PlaceValue, ...]:
        return tuple(self._value(place, metric, sums) for (place, metric), sums in self._sums.items())

    def _value(self, place: Place, metric: str, sums: Running) -> PlaceValue:
        missing = []
        if not sums.count:
            missing.append(Missing(field="mean", reason="no sequence has a value here"))
        if sums.count < 2:
            missing.append(Missing(field="standard_error", reason="fewer than two sequences have a value"))
        return PlaceValue(
            stack=place.stack,
            depth=place.depth,
            place=place.name,
            metric=metric,
            mean=sums.mean if sums.count else None,
            standard_error=sums.standard_error,
            sequences=sums.count,
            on_stream=on_stream(place.name, self.stacks[place.stack].arch.residual),
            missing=tuple(missing),
        )

    def attributions(self) -> tuple[Attribution, ...]:
        return tuple(
            self._attribution(label, parts) for label, parts in self._parts.items() if self._totals[label].count
        )

    def _attribution(self, label: str, sums: Mapping[Place, Running]) -> Attribution:
        parts = tuple(
            Part(
                stack=label,
                depth=place.depth,
                part=PART_OF[place.name],
                place=place.name,
                change=change.mean,
                standard_error=change.standard_error,
            )
            for place, change in sums.items()
        )
        total = self._totals[label]

        def share(part: str) -> float:
            return sum((item.change for item in parts if item.part == part), 0.0)

        return Attribution(
            stack=label,
            total=total.mean,
            standard_error=total.standard_error,
            sequences=total.count,
            attention=share("attention"),
            cross_attention=share("cross-attention"),
            feed_forward=share("feed-forward"),
            norms=share("norm"),
            other=share("other"),
            parts=parts,
        )
