"""`analyze`: one model, everything that can be known about it; the only place where the parts are put together.

target -> inspect                        always: weights only
       -> verify, measure, predict       where the model can be run
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from oversmooth.batches import Batch
from oversmooth.errors import NotLive, OversmoothError, WrongBatch
from oversmooth.inspection import inspect
from oversmooth.measure import measure
from oversmooth.models.live import load_model
from oversmooth.models.source import Target, open_source
from oversmooth.models.verify import verify
from oversmooth.results import Analysis, Missing, Progress, no_progress

T = TypeVar("T")
Stage = Callable[[str], Progress]
"""Called with the name of each stage as it begins; returns how its progress is shown."""


def analyze(
    target: Target,
    batches: Iterable[Batch] | str | None = None,
    *,
    max_samples: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 128,
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
    command: str = "",
    stage: Stage = lambda name: no_progress,
) -> Analysis:
    """Inspection, verification and measurement of one model; what cannot be made is missing with its reason.

    Takes the same targets and data as `inspect` and `measure`. A model that cannot be run (a lone file, a URL, GGUF)
    gives the weights part.
    """
    source = open_source(target)
    inspection = inspect(target, progress=stage("Reading weights"))
    missing: list[Missing] = []
    try:
        model = load_model(source, "report", trust_remote_code=trust_remote_code)
    except NotLive as error:
        return Analysis(inspection=inspection, command=command, missing=(_missing("measurement", error),))
    live = replace(source, module=model)  # loaded once, run by every part
    verification = _tried("verification", missing, lambda: verify(live))
    measurement = _tried(
        "measurement",
        missing if batches is None else None,
        lambda: measure(
            live,
            batches,
            max_samples=max_samples,
            batch_size=batch_size,
            max_tokens=max_tokens,
            seed=seed,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=stage("Measuring features"),
        ),
    )
    return Analysis(
        inspection=inspection,
        verification=verification,
        measurement=measurement,
        command=command,
        missing=tuple(missing),
    )


def _tried(part: str, missing: list[Missing] | None, make: Callable[[], T]) -> T | None:
    """The part, or `None` with the reason noted; data that the user gave must work, so then the error stands."""
    try:
        return make()
    except (NotLive, WrongBatch) as error:
        if missing is None:
            raise
        missing.append(_missing(part, error))
        return None


def _missing(part: str, error: OversmoothError) -> Missing:
    return Missing(field=part, reason=str(error).splitlines()[0])
