"""`gate`: does a model, or a run that trained, keep within limits, or within reach of an earlier measurement?"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from oversmooth.data.batches import Batch
from oversmooth.data.reading import ReadingOptions
from oversmooth.errors import BadValue, BrokenFile, NothingChosen, NotSupported, OtherModel
from oversmooth.measurement.limits import (
    LOSS,
    Limit,
    breaches,
    limits_of,
    loss_increase,
    points_of,
    points_of_numbers,
)
from oversmooth.measurement.measurement import measure
from oversmooth.models.source import Target
from oversmooth.output.report.training import read_run
from oversmooth.results import Analysis, Breach, GateResult, Measurement, Progress, no_progress
from oversmooth.results.json_text import json_object
from oversmooth.results.text_files import read_text_file

COMPARED = ("cosine", "effective_rank_share")
"""What is compared with an earlier measurement: both lie in [0, 1], so that one tolerance fits them."""


def gate(
    target: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    rules: Mapping[str, object] | None = None,
    against: str | Path | Analysis | Measurement | None = None,
    tolerance: float = 0.02,
    base: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> GateResult:
    """Measures a model and says which layer and sub-block breaks which rule; `result.passed` is the answer.

    `rules` are `max_METRIC` and `min_METRIC` for any metric of `measure`, such as `{"max_cosine": 0.95}`. `against` is an
    analysis or a measurement saved earlier: no layer may be smoother than it was there by more than `tolerance`. The
    metrics.jsonl of a run is a target too: its last measurement is judged, and `max_loss_increase`. Other keywords are
    those of `measure`.
    """
    limits = limits_of(rules or {})
    if not limits and against is None:
        raise NothingChosen(["rules", "against"])
    if tolerance < 0:
        raise BadValue("tolerance", tolerance, "at least 0")
    if isinstance(target, str | Path) and str(target).endswith(".jsonl"):
        if against is not None:
            raise NotSupported("against", "for the log of a run", "a log holds no sub-blocks and no data facts")
        return _result(target, limits, None, _of_run(Path(target), limits))
    if any(limit.name == LOSS for limit in limits):
        advice = "Give the metrics.jsonl of a run as the target."
        raise NotSupported(LOSS, "for a model", "a loss belongs to a run", advice)
    before = _before(against) if against is not None else None
    metrics = dict.fromkeys(["hfc_lfc", *(limit.metric for limit in limits), *(COMPARED if before else ())])
    found = measure(
        target,
        data,
        metrics=tuple(metrics),
        base=base,
        dtype=dtype,
        offload=offload,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
        **reading,
    )
    broken = [*breaches(points_of(found), limits), *(_worse(before, found, tolerance) if before else ())]
    named = str(against) if isinstance(against, str | Path) else None
    return _result(found.provenance.target, limits, named, [_explained(breach, found) for breach in broken])


def _result(target: Target, limits: Iterable[Limit], against: str | None, broken: Iterable[Breach]) -> GateResult:
    rules = tuple((limit.name, limit.bound) for limit in limits)
    return GateResult(target=str(target), rules=rules, against=against, breaches=tuple(broken))


def _of_run(path: Path, limits: tuple[Limit, ...]) -> list[Breach]:
    """The last measurement of a run, and its losses."""
    points = read_run(path)
    measured = [point for point in points if any(name.startswith("smoothing/") for name in point)]
    last = points_of_numbers(measured[-1]) if measured else []
    broken = list(breaches(last, limits))
    for limit in limits:
        losses = [float(point["loss"]) for point in points if "loss" in point]
        if limit.name == LOSS and limit.is_broken_by(loss_increase(losses)):
            broken.append(Breach(rule=LOSS, stack="", depth=0, value=loss_increase(losses), bound=limit.bound))
        elif limit.name != LOSS and not any(point.metric == limit.metric for point in last):
            broken.append(Breach(rule=limit.name, stack="", depth=0, value=None, bound=limit.bound))
    return broken


def _before(against: str | Path | Analysis | Measurement) -> Measurement:
    """The measurement that is compared with."""
    if isinstance(against, Measurement):
        return against
    if not isinstance(against, Analysis):
        where, expected = str(against), "an analysis saved with `oversmooth report --save`"
        loaded = json_object(read_text_file(Path(against), expected), where, expected)
        if loaded.get("kind") == Measurement.kind:
            return Measurement.from_dict(loaded, where=where)
        against = Analysis.from_dict(loaded, where=where)
    if against.measurement is None:
        raise BrokenFile(against.inspection.provenance.target, "a measurement", "weights only", "Analyse it with data.")
    return against.measurement


def _worse(before: Measurement, after: Measurement, tolerance: float) -> list[Breach]:
    """Blocks that are smoother than they were by more than the tolerance."""
    _require_same(before, after)
    old = {(point.stack, point.depth, point.metric): point.value for point in points_of(before)}
    broken = []
    for point in points_of(after):
        was = old.get((point.stack, point.depth, point.metric))
        if point.metric not in COMPARED or point.value is None or was is None:
            continue
        bound = was + tolerance if point.metric == "cosine" else was - tolerance
        if point.value > bound if point.metric == "cosine" else point.value < bound:
            rule = f"against_{point.metric}"
            broken.append(Breach(rule=rule, stack=point.stack, depth=point.depth, value=point.value, bound=bound))
    return broken


def _require_same(before: Measurement, after: Measurement) -> None:
    """Another kind of model, other depths or other data cannot be compared."""

    def blocks(measurement: Measurement) -> int:
        return len({(value.stack, value.depth) for value in measurement.values})

    facts = [
        ("model type", before.provenance.model_type, after.provenance.model_type),
        ("number of blocks", blocks(before), blocks(after)),
        ("data", f"{before.data.description}", f"{after.data.description}"),
        ("hash of the inputs", before.data.sha256[:12], after.data.sha256[:12]),
    ]
    for what, was, now in facts:
        if was != now:
            raise OtherModel(what, was, now)


def _explained(breach: Breach, found: Measurement) -> Breach:
    """With the part of that block that smooths most, as headlines judge it: of tokens at unit length."""
    parts = [
        part
        for attribution in found.shown_attributions
        for part in attribution.parts
        if attribution.stack == breach.stack and part.depth == breach.depth
    ]
    worst = min(parts, key=lambda part: part.change, default=None)
    if worst is None or worst.change >= 0:
        return breach
    return replace(breach, sub_block=worst.part, sub_block_change=worst.change)
