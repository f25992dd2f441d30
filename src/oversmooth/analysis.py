"""`analyze`: everything about one model; `output_drift`: the same inputs through a model and its edit.

target -> inspect                        always: weights only
       -> verify, measure, predict       where the model can be run
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.data.held import Data, reusable
from oversmooth.data.load import RunKeywords, opened
from oversmooth.data.options import ReadingOptions
from oversmooth.errors import (
    BrokenFile,
    MissingDependency,
    NoAttentionMaps,
    NoData,
    NotLive,
    OtherModel,
    OversmoothError,
    UnknownTokens,
    WrongBatch,
    user_code,
)
from oversmooth.measurement.measure import measure
from oversmooth.measurement.metrics import DEFAULT_METRICS
from oversmooth.measurement.moments import measurable
from oversmooth.measurement.pairs import between_sequences
from oversmooth.measurement.passes import Processed, open_live, pass_through
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.open import Target
from oversmooth.models.source import Stack
from oversmooth.models.verify import verify
from oversmooth.prediction.predict import predict
from oversmooth.results import Analysis, Comparison, Measurement, Missing, Progress, no_progress
from oversmooth.results.comparing import compare_words, deck_words, differences, sure_words
from oversmooth.results.measurement import OutputDrift
from oversmooth.spectra.inspect import inspect

# --- `analyze`: one model, everything that can be known about it ---

T = TypeVar("T")
WHAT_IFS = ("no_skip", "no_biases", "flip_norms", "scale:0.5", "centered")
"""The changes that a report shows beside every layer: those that cost little. An interval costs as much as the rest."""
REPORTED = (*DEFAULT_METRICS, "between", "steps", "attention")
"""What a report measures: curves over depth, whether sequences differ, what every sub-block does, how heads attend."""
Stage = Callable[[str], Progress]
"""Called with the name of each stage as it begins; returns how its progress is shown."""


def analyze(
    target: Target,
    data: Data = None,
    *,
    what_ifs: Sequence[str] | None = None,
    solve: int = 2,
    command: str = "",
    stage: Stage = lambda name: no_progress,
    **options: Unpack[RunKeywords],
) -> Analysis:
    """Inspection, verification, measurement and prediction of one model; what cannot be made is missing with a reason.

    Takes the same targets and data as `inspect` and `measure`. A model that cannot be run (a lone file, a URL, GGUF, the
    package that runs it not installed) gives the weights part. Without `what_ifs`, a common choice is shown, and its
    eigenvalue problems are solved where that costs nothing more; those asked for by name are solved all. With `solve` 0
    nothing is predicted, which takes the time of `measure`.
    """
    model, _ = opened(target, options, data)
    reading: Any = {name: value for name, value in options.items() if name in ReadingOptions.__annotations__}
    inspection = inspect(model, progress=_begun(stage, "Reading weights, layers"))
    missing = list(inspection.missing)
    try:
        model.module(verb="report")  # loaded once, run by every part
    except (NotLive, MissingDependency) as error:
        if data is not None and isinstance(error, MissingDependency):
            raise  # a measurement was asked for, and one more package would make it
        missing.append(_missing("measurement", error))
        return Analysis(inspection=inspection, command=command, missing=tuple(missing))
    verification = _tried("verification", missing, lambda: verify(model))
    given = reusable(data)  # both parts see the same batches
    noted = missing if given is None else None
    show = _begun(stage, "Measuring, layers of sequences")
    measurement = _tried(
        "measurement",
        noted,
        lambda: measure(model, given, metrics=REPORTED, pairs=True, null=True, progress=show, **reading),
    )
    prediction = None
    if solve:
        show_prediction = _begun(stage, "Predicting, layers of sequences")
        changes: Any = {"what_ifs": WHAT_IFS if what_ifs is None else what_ifs, "solve_what_ifs": what_ifs is not None}
        prediction = _tried(
            "prediction",
            missing,
            lambda: predict(model, given, solve=solve, progress=show_prediction, **changes, **reading),
        )
    else:
        missing.append(Missing(field="prediction", reason="not asked for (--solve 0)"))
    return Analysis(
        inspection=inspection,
        verification=verification,
        measurement=measurement,
        prediction=prediction,
        command=command,
        missing=tuple(missing),
    )


Compared = Target | Analysis | Measurement


def compare(first: Compared, other: Compared, data: Data = None, **options: Unpack[RunKeywords]) -> Comparison:
    """What became of tokens of one input, and of different inputs, from one model to another.

    Each is a model, which is measured, or a result that was measured on the same inputs (`osm.load(path)`).

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> found = osm.compare(model, model, [torch.randn(4, 10, 32)])
    >>> found.first.output == found.other.output
    True
    """
    given = data if data is None or isinstance(data, str) else list(data)
    a, b = (_measured(each, given, options) for each in (first, other))
    if a.data.sha256 != b.data.sha256:
        raise OtherModel("hash of the inputs", a.data.sha256[:12], b.data.sha256[:12])
    mine, theirs = a.answer, b.answer
    if mine is None or theirs is None:
        raise NoData(a.data.description, a.data.skipped)
    names = (mine.model, theirs.model)
    if names[0] == names[1]:
        names = (f"{names[0]} (1)", f"{names[1]} (2)")
    tokens, inputs = differences(mine, theirs)
    return Comparison(
        names=names,
        first=mine,
        other=theirs,
        tokens=tokens,
        inputs=inputs,
        headline=compare_words(names, mine, theirs),
        deck=deck_words(names, mine, theirs),
        sure=sure_words(mine, theirs),
    )


def _measured(given: Compared, data: Any, options: RunKeywords) -> Measurement:
    """What is compared of a model, or of a result."""
    if isinstance(given, Analysis):
        if given.measurement is None:
            raise BrokenFile(
                given.inspection.provenance.target, "a measurement", "weights only", "Analyse it with data."
            )
        return given.measurement
    return given if isinstance(given, Measurement) else measure(given, data, metrics=("cosine", "between"), **options)


def _begun(stage: Stage, name: str) -> Progress:
    with user_code("The stage callback", stage):
        return stage(name)


def _tried(part: str, missing: list[Missing] | None, make: Callable[[], T]) -> T | None:
    """The part, or `None` with the reason noted; data that the user gave must work, so then the error stands."""
    try:
        return make()
    except (NotLive, WrongBatch, UnknownTokens, NoAttentionMaps) as error:
        if missing is None:
            raise
        missing.append(_missing(part, error))
        return None


def _missing(part: str, error: OversmoothError) -> Missing:
    return Missing(field=part, reason=error.problem)


# --- `output_drift`: the same inputs through a model and its edit, and what differs where both end ---

SEQUENCES = 32
"""Sequences that are compared at most: the features of all of them are held."""

States = Sequence[Float[Tensor, "_ d_model"]]


@dataclass
class LastStates:
    """Keeps the features of the first stack at the last place that the stream passes."""

    model: nn.Module
    stack: Stack
    seen: Processed = field(default_factory=Processed)
    found: list[Float[Tensor, "_ d_model"]] = field(default_factory=list)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _last: Float[Tensor, "batch token d_model"] | None = None

    def wants(self, name: str, stack: Stack) -> bool:
        return stack.label == self.stack.label and on_stream(name, stack.arch.residual)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs, self._last = inputs, None

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        self._last = h

    def finish(self) -> Bool[Tensor, "batch token"]:
        assert self._last is not None, "a stack has at least one place"
        keep = keep_mask(self.model, self._inputs, self.stack, self._last, 0)
        for sequence in measurable(keep).nonzero()[:, 0].tolist():
            self.found.append(self._last[sequence, keep[sequence]].float().cpu())
        return keep


def output_drift(
    target: Target,
    other: Target,
    data: Data = None,
    **options: Unpack[RunKeywords],
) -> OutputDrift:
    """How far the output of `other` is from that of `target`, and how alike different sequences are in each.

    Both have to take the same inputs and to be of the same width, as a model and its edit are.
    """
    given = reusable(data)
    first, second = (_last_states(each, given, options) for each in (target, other))
    if [state.shape for state in first] != [state.shape for state in second]:
        raise WrongBatch("two models that make features of one shape from the same inputs", "others", "Give an edit.")
    return compared(first, second)


def _last_states(target: Target, data: Any, options: RunKeywords) -> States:
    model, how = opened(target, options, data)
    with model.alone:
        live, loaded = open_live(model, data, "compare", how)
        observer = LastStates(live.model, live.stacks[0])
        limit = min(how.max_samples or SEQUENCES, SEQUENCES)
        pass_through(live, loaded, lambda _: nullcontext(observer), limit, no_progress)
        return observer.found


def compared(first: States, second: States) -> OutputDrift:
    """The same from the features of both."""
    y, changed = torch.cat(list(first)).double(), torch.cat(list(second)).double()
    return OutputDrift(
        sequences=len(first),
        tokens=len(y),
        relative_distance=((changed - y).norm() / y.norm()).item(),
        cosine=F.cosine_similarity(y, changed, dim=1).mean().item(),
        similarity=similarity_of(first),
        other_similarity=similarity_of(second),
    )


def similarity_of(states: States) -> float | None:
    """Mean cosine between the mean tokens of different sequences; `None` where there is only one."""
    if len(states) < 2:
        return None
    return between_sequences([F.normalize(torch.stack([state.double().mean(0) for state in states]), dim=1)]).mean
