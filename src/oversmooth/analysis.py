"""`analyze`: one model, everything that can be known about it; the only place where the parts are put together.

target -> inspect                        always: weights only
       -> verify, measure, predict       where the model can be run
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from oversmooth.data.batches import Batch
from oversmooth.data.given import require_there
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import MissingDependency, NoAttentionMaps, NotLive, OversmoothError, UnknownTokens, WrongBatch
from oversmooth.measurement.measurement import measure
from oversmooth.measurement.metrics import DEFAULT_METRICS
from oversmooth.models.live import load_model
from oversmooth.models.opening import open_source
from oversmooth.models.source import Declaration, Target
from oversmooth.models.verify import verify
from oversmooth.prediction.prediction import predict
from oversmooth.results import Analysis, Missing, Progress, no_progress
from oversmooth.spectra.inspection import inspect

T = TypeVar("T")
WHAT_IFS = ("no_skip", "no_biases", "flip_norms", "scale:0.5", "interval:-1,0", "interval:0,1", "centered")
"""The changes that a report shows beside every layer."""
REPORTED = (*DEFAULT_METRICS, "steps", "attention")
"""What a report measures: curves over depth, what every sub-block does, and how every head attends."""
Stage = Callable[[str], Progress]
"""Called with the name of each stage as it begins; returns how its progress is shown."""


def analyze(
    target: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    base: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    arch: Declaration | None = None,
    what_ifs: Sequence[str] | None = None,
    solve: int = 2,
    command: str = "",
    stage: Stage = lambda name: no_progress,
    **reading: Unpack[ReadingOptions],
) -> Analysis:
    """Inspection, verification, measurement and prediction of one model; what cannot be made is missing with a reason.

    Takes the same targets and data as `inspect` and `measure`. A model that cannot be run (a lone file, a URL, GGUF, the
    package that runs it not installed) gives the weights part. Without `what_ifs`, a common choice is shown, and its
    eigenvalue problems are solved where that costs nothing more; those asked for by name are solved all. With `solve` 0
    nothing is predicted, which takes the time of `measure`.
    """
    Reading(**reading)  # what cannot be is said before anything is read
    if isinstance(data, str):
        require_there(data)
    source = open_source(target, arch=arch, base=base, dtype=dtype, offload=offload)
    inspection = inspect(source, progress=stage("Reading weights, layers"))
    missing = list(inspection.missing)
    try:
        model = load_model(source, "report", trust_remote_code=trust_remote_code)
    except (NotLive, MissingDependency) as error:
        if data is not None and isinstance(error, MissingDependency):
            raise  # a measurement was asked for, and one more package would make it
        missing.append(_missing("measurement", error))
        return Analysis(inspection=inspection, command=command, missing=tuple(missing))
    live = replace(source, module=model)  # loaded once, run by every part
    verification = _tried("verification", missing, lambda: verify(live))
    given = data if data is None or isinstance(data, str) else list(data)  # both parts see the same batches
    options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code, **reading}
    noted = missing if given is None else None
    show = stage("Measuring, layers of sequences")
    measurement = _tried("measurement", noted, lambda: measure(live, given, metrics=REPORTED, progress=show, **options))
    prediction = None
    if solve:
        show_prediction = stage("Predicting, layers of sequences")
        changes: dict[str, Any] = {"what_ifs": WHAT_IFS if what_ifs is None else what_ifs}
        changes["solve_what_ifs"] = what_ifs is not None
        prediction = _tried(
            "prediction",
            missing,
            lambda: predict(live, given, solve=solve, progress=show_prediction, **changes, **options),
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
