"""`measure_lengths`: the same texts cut to several lengths; does smoothing grow with length?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from oversmooth.data.batches import prepare
from oversmooth.data.held import Data
from oversmooth.data.load import LoadedData, RunKeywords, opened
from oversmooth.errors import BadValue, NotSupported, WrongBatch
from oversmooth.measurement.measure import measure
from oversmooth.measurement.metrics import DEFAULT_METRICS, Choice
from oversmooth.measurement.passes import open_live
from oversmooth.models.inputs import TEXT
from oversmooth.models.open import LiveModel, Target
from oversmooth.prediction.predict import predict
from oversmooth.results import Measurement, Prediction, Progress, guarded, no_progress
from oversmooth.results.measurement import LengthChange, LengthCurves, LengthPrediction, LengthValue

LENGTHS = (16, 32, 64, 128)
SOLVED = 2
"""Texts whose eigenvalue problems are solved at every length."""


def measure_lengths(
    target: Target,
    data: Data = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    predicts: bool = False,
    metrics: Choice | Iterable[Choice] = DEFAULT_METRICS,
    solve: int = SOLVED,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> LengthCurves:
    """`measure`, and with `predicts` also `predict`, on the beginnings of the same texts, at several lengths in tokens.

    Only texts that have as many tokens as the longest length are used, so that every length sees the same ones; what
    comes behind a length is cut off, a closing special token included. `max_samples` counts those that are used.
    """
    chosen = _checked(lengths)
    model, asked = opened(target, options, data)
    how = replace(asked, max_tokens=chosen[-1], max_samples=None)
    with model.alone:
        live, loaded = open_live(model, data, "measure", how)
        texts = _Texts.of(live, loaded, chosen[-1], asked.max_samples)
        measured, predicted = [], []
        for number, length in enumerate(chosen, 1):
            measured.append(measure(model, texts.cut(length, how.batch_size), metrics=metrics))
            if predicts:
                predicted.append(predict(model, texts.cut(length, how.batch_size), solve=solve, heads=False))
            guarded(progress)(number, len(chosen))
        return _curves(loaded, chosen, texts, measured, predicted)


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    found = tuple(sorted(set(lengths)))
    if len(found) < 2:
        raise BadValue("lengths", tuple(lengths), "at least two different ones")
    if found[0] < 2:
        raise BadValue("lengths", found[0], "at least 2 tokens each")
    return found


@dataclass
class _Texts:
    """Texts that are long enough: what enters the model for each, token by token."""

    rows: list[Mapping[str, Tensor]]
    left_out: int

    @classmethod
    def of(cls, live: LiveModel, data: LoadedData, length: int, limit: int | None) -> "_Texts":
        rows: list[Mapping[str, Tensor]] = []
        longest, left_out = 0, 0
        for part in data.parts:
            if part.texts is not None:
                part.texts.only_beginnings = True
        for batch in data.batches:
            for row in _rows(prepare(live.model, live.config, batch)):
                tokens = int(row["attention_mask"].sum()) if "attention_mask" in row else len(row[TEXT])
                longest = max(longest, tokens)
                if tokens < length:
                    left_out += 1
                elif limit is None or len(rows) < limit:
                    rows.append(row)
            if limit is not None and len(rows) >= limit:
                break
        if not rows:
            found = f"{left_out} shorter ones, the longest of {longest}"
            raise WrongBatch(f"texts of at least {length} tokens", found, "Give longer texts, or smaller lengths.")
        return cls(rows, left_out)

    def cut(self, length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """The first tokens of every text, in batches without padding."""
        for start in range(0, len(self.rows), batch_size):
            together = self.rows[start : start + batch_size]
            yield {name: torch.stack([row[name][:length] for row in together]) for name in together[0]}


def _rows(inputs: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """One text after the other, with all that has an entry per token; padding in front is taken off."""
    if TEXT not in inputs:
        raise NotSupported("lengths", f"for inputs of the names {', '.join(inputs)}", "only texts have a length")
    shape = inputs[TEXT].shape
    mask = inputs.get("attention_mask", torch.ones_like(inputs[TEXT]))
    per_token = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.shape == shape}
    for number in range(len(mask)):
        yield {name: value[number][mask[number].bool()] for name, value in per_token.items()}


def _curves(
    loaded: LoadedData,
    lengths: Sequence[int],
    texts: _Texts,
    measured: Sequence[Measurement],
    predicted: Sequence[Prediction],
) -> LengthCurves:
    last = measured[-1]
    seen = {name: getattr(last.data, name) for name in ("sha256", "sequences", "tokens", "skipped")}
    data = loaded.facts(**seen)
    found = LengthCurves(
        provenance=last.provenance,
        data=data,
        lengths=tuple(lengths),
        texts=len(texts.rows),
        left_out=texts.left_out,
        values=tuple(value for n, each in zip(lengths, measured, strict=True) for value in _values(n, each)),
        changes=tuple(
            LengthChange(length=length, stack=a.stack, change=a.total, interval=a.interval, direction=a.direction)
            for length, each in zip(lengths, measured, strict=True)
            for a in each.unit_attributions
        ),
        predictions=tuple(item for n, each in zip(lengths, predicted, strict=False) for item in _predictions(n, each)),
        verdict="",
    )
    return replace(found, verdict=_verdict(found))


def _values(length: int, measured: Measurement) -> Iterator[LengthValue]:
    for stack in dict.fromkeys(value.stack for value in measured.values):
        for metric, _ in measured.definitions:
            for point in measured.curve(metric, stack):
                yield LengthValue(
                    length=length,
                    stack=stack,
                    depth=point.depth,
                    metric=metric,
                    mean=point.mean,
                    standard_error=point.standard_error,
                )


def _predictions(length: int, predicted: Prediction) -> Iterator[LengthPrediction]:
    for layer in predicted.layers:
        acting = layer.folded if layer.acting == "folded" and layer.folded is not None else layer.plain
        yield LengthPrediction(
            length=length,
            stack=layer.stack,
            layer=layer.layer,
            depth=layer.depth,
            regime=layer.regime,
            exponent=acting.exponent,
            measured=layer.measured,
        )


def _verdict(curves: LengthCurves) -> str:
    """Whether the same texts end smoother where they are longer; the mean cosine has no length in its formula."""
    stack = curves.values[0].stack
    first, last = (curves.last("cosine", length, stack) for length in (curves.lengths[0], curves.lengths[-1]))
    if first is None or last is None or first.mean is None or last.mean is None:
        return f"{curves.texts} texts were cut to {len(curves.lengths)} lengths."
    error = math.hypot(first.standard_error or 0.0, last.standard_error or 0.0)
    word = "smoother" if last.mean > first.mean else "sharper"
    is_clear = abs(last.mean - first.mean) > 2 * error and curves.texts > 1
    lead = f"The same {curves.texts} texts end {word} where they are longer"
    at = f"mean cosine {first.mean:.3f} at {first.length} tokens, {last.mean:.3f} at {last.length}"
    return f"{lead if is_clear else 'No clear change with length'}: {at}."
