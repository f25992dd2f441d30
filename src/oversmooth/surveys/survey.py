"""`survey`: a list of targets into a table, with any engine, from the beginning or from where it stopped."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oversmooth.errors import BadValue, UnknownName
from oversmooth.output.held_folders import held
from oversmooth.results.survey import SurveyCounts
from oversmooth.surveys.engines import Engine, Limits, processes, serial
from oversmooth.surveys.lists import listed
from oversmooth.surveys.ray_engine import RayEngine
from oversmooth.surveys.reading import Listed, Options, Outcome
from oversmooth.surveys.rows import copied
from oversmooth.surveys.table import SurveyTable

ENGINES = ("auto", "serial", "process", "ray")
MODELS_PER_PART = 200
SHORTEST_PART_SECONDS = 2.0
SHARE_AT_RISK = 0.02
"""A part is written once this share of the time so far has passed: a kill costs little, and parts stay few."""
COPIES_AT_ONCE = 200

Report = Callable[[SurveyCounts], None]


def _silence(counts: SurveyCounts) -> None:
    """Says nothing."""


def survey(
    targets: str | Path | Sequence[str] | None,
    out: str | Path,
    *,
    column: str | None = None,
    author: str | None = None,
    pipeline_tag: str | None = None,
    top: int | None = None,
    extremes: bool = True,
    heads: bool = False,
    dtype: str = "auto",
    engine: str = "auto",
    workers: int = 1,
    address: str | None = None,
    requests_per_second: float | None = 10.0,
    retry_failed: bool = False,
    progress: Report = _silence,
) -> SurveyCounts:
    """Inspects every target of a list into one table of Parquet files: a row per model, layer and (if asked) head.

    A folder that holds part of the table already is continued: targets with a row are not read again, and of weights that
    several targets have (on this machine, or where the server tells their hash as the hub does) the eigenvalues are computed
    once. What cannot be read is a row with the reason;
    `retry_failed` tries those again whose reason was the network or the machine. `requests_per_second` holds for all workers
    together. `read_survey` has the table as a DataFrame.
    """
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if workers < 1:
        raise BadValue("workers", workers, "at least 1")
    if requests_per_second is not None and not requests_per_second > 0:
        raise BadValue("requests_per_second", requests_per_second, "greater than 0")
    wanted = listed(targets, column=column, author=author, pipeline_tag=pipeline_tag, top=top)
    options = Options(extremes=extremes, heads=heads, dtype=dtype)
    folder = Path(out)
    with held(folder):
        table = SurveyTable.at(folder, options)
        if retry_failed:
            table.forget("failed")
        run = _Run(table, options, _engine(engine, workers, address), workers, requests_per_second, progress)
        return run.everything(wanted)


def _engine(name: str, workers: int, address: str | None) -> Engine:
    if name == "ray":
        return RayEngine(address)
    return serial if name == "serial" or (name == "auto" and workers == 1) else processes


@dataclass
class _Run:
    """One run over a table: what is left to do, and what was done."""

    table: SurveyTable
    options: Options
    engine: Engine
    workers: int
    requests_per_second: float | None
    report: Report

    def everything(self, wanted: Sequence[Listed]) -> SurveyCounts:
        rows = self.table.models(("target", "status", "file_sha256"))
        finished = {row["target"] for row in rows}
        pending = [one for one in wanted if one.target not in finished]
        self.counts = SurveyCounts(models=len(wanted), earlier=len(wanted) - len(pending))
        self._start = self._written = time.monotonic()
        self._buffer: list[Outcome] = []
        known = {row["file_sha256"] for row in rows if row["status"] == "read" and row["file_sha256"]}
        while pending:
            waiting = []
            limits = Limits(requests_per_second=self.requests_per_second, known=tuple(sorted(known)))
            for outcome in self.engine(pending, self.options, limits, self.workers):
                self._count(outcome)
                if outcome.waits_for is None:
                    self._keep(outcome)
                else:
                    waiting.append(outcome)
            self._write()
            known |= self._copy(waiting)
            # A content whose reader failed has no rows to copy: the next target that has it reads it.
            pending = [outcome.listed for outcome in waiting if outcome.waits_for not in known]
        return self._now()

    def _copy(self, waiting: Sequence[Outcome]) -> set[str]:
        """Writes the rows of targets whose content is in the table by now; the contents that were found."""
        contents = sorted({outcome.waits_for for outcome in waiting if outcome.waits_for})
        found: set[str] = set()
        for chunk in _chunks(contents, COPIES_AT_ONCE):
            originals = self.table.with_content(set(chunk))
            found |= originals.keys()
            for outcome in waiting:
                if outcome.waits_for in originals and outcome.own is not None:
                    rows = tuple(copied(originals[outcome.waits_for], outcome.own))
                    self._keep(replace(outcome, rows=rows, waits_for=None))
        self._write()
        return found

    def _keep(self, outcome: Outcome) -> None:
        self._buffer.append(outcome)
        status = "copied" if outcome.own is not None else outcome.rows[0][1]["status"]
        self.counts = replace(self.counts, **{status: getattr(self.counts, status) + 1})
        self.report(self._now())
        now = time.monotonic()
        at_risk = max(SHORTEST_PART_SECONDS, SHARE_AT_RISK * (now - self._start))
        if len(self._buffer) >= MODELS_PER_PART or now - self._written >= at_risk:
            self._write()

    def _count(self, outcome: Outcome) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            requests=counts.requests + outcome.requests,
            bytes_received=counts.bytes_received + outcome.bytes_received,
        )

    def _write(self) -> None:
        if self._buffer:
            self.table.add([row for outcome in self._buffer for row in outcome.rows])
        self._buffer, self._written = [], time.monotonic()

    def _now(self) -> SurveyCounts:
        return replace(self.counts, seconds=time.monotonic() - self._start)


def _chunks(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
