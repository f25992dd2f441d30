"""`survey`: a list of targets into a table; what a list may contain."""

import csv
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oversmooth.environment.files import held
from oversmooth.errors import (
    BadValue,
    Conflict,
    MissingDependency,
    MissingValue,
    RemoteUnavailable,
    TargetNotFound,
    UnknownName,
    UnreadableData,
    first_line,
)
from oversmooth.models.open import PICKLES, local_path
from oversmooth.models.revisions import steps_of
from oversmooth.results.inspection import SurveyCounts
from oversmooth.surveys.engines import Engine, RayEngine, RequestLimits, processes, serial
from oversmooth.surveys.rows import copied
from oversmooth.surveys.table import SurveyTable
from oversmooth.surveys.worker import Options, SurveyTarget, TargetOutcome

COLUMN_NAMES = ("target", "model", "model_id", "modelId", "id", "name")
"""Columns that are taken for the targets of a table unless one is named."""
YEARS = ("year", "created_at", "createdAt", "date")
WEIGHTS = (".safetensors", ".gguf", *PICKLES)
DEEPEST = 3
"""Folders below the one that was given in which models are looked for."""


def listed(
    given: str | Path | Sequence[str] | None,
    *,
    column: str | None = None,
    author: str | None = None,
    pipeline_tag: str | None = None,
    top: int | None = None,
) -> list[SurveyTarget]:
    """The targets, each once, in their order; `author`, `pipeline_tag` and `top` ask the hub instead of a list."""
    is_query = any(option is not None for option in (author, pipeline_tag, top))
    if given is None and not is_query:
        raise MissingValue("A list, --author, --pipeline-tag or --top")
    if given is not None and is_query:
        raise Conflict(("a list", "a query of the hub (--author, --pipeline-tag, --top)"))
    if given is None:
        found: Iterable[SurveyTarget] = _from_hub(author, pipeline_tag, top)
    elif isinstance(given, str | Path):
        found = _from_place(str(given), column)
    else:
        found = [SurveyTarget(str(target)) for target in given]
    once = list({one.target: one for one in found}.values())
    if not once:
        raise UnreadableData(str(given or "the query of the hub"), "at least one target", "none")
    return once


def _from_place(given: str, column: str | None) -> Iterable[SurveyTarget]:
    steps = steps_of(given)
    if steps:
        return [SurveyTarget(step.target) for step in steps]
    path = local_path(given)
    if path is None or not path.exists():
        tried = ["a file of targets, a .csv or .parquet table, a folder of models, hf://owner/name@first..last"]
        raise TargetNotFound(given, tried, "A single model is a list too: write its name into a text file.")
    if path.is_dir():
        return [SurveyTarget(str(model)) for model in _models_in(path, DEEPEST)]
    if path.suffix in (".csv", ".parquet"):
        return _from_table(path, column)
    return _from_text(path)


def _from_text(path: Path) -> list[SurveyTarget]:
    """One target per line; empty lines and what follows a `#` do not count."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UnreadableData(str(path), "one target per line", "bytes that are no text") from error
    bare = (line.split("#")[0].strip() for line in lines)
    return [SurveyTarget(line) for line in bare if line]


def _from_table(path: Path, column: str | None) -> Iterator[SurveyTarget]:
    rows = _csv_rows(path) if path.suffix == ".csv" else _parquet_rows(path)
    names = list(rows[0]) if rows else []
    chosen = column or next((name for name in COLUMN_NAMES if name in names), None)
    if chosen is None:
        expected = f"a column {' or '.join(COLUMN_NAMES)}, or --column"
        raise UnreadableData(str(path), expected, ", ".join(names) or "none")
    if rows and chosen not in names:
        raise UnknownName("column", chosen, names)
    year = next((name for name in YEARS if name in names), None)
    for row in rows:
        if target := str(row[chosen] or "").strip():
            yield SurveyTarget(target, _year(row[year]) if year else None)


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableData(str(path), "a CSV table", first_line(error)) from error


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "survey", "a list in Parquet") from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableData(str(path), "a Parquet table", first_line(error)) from error
    return rows


def _year(said: object) -> int | None:
    """The year in a number, a date or a text that begins with one."""
    year = getattr(said, "year", None)
    digits = str(year if year is not None else said)[:4]
    return int(digits) if digits.isdecimal() and 1900 < int(digits) < 2200 else None


def _models_in(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold a model, and single files of weights; what lies below a model belongs to it."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if entry.is_file()]
    if any(entry.name == "config.json" for entry in files) and any(entry.suffix in WEIGHTS for entry in files):
        yield folder
        return
    yield from (entry for entry in files if entry.suffix in WEIGHTS)
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _models_in(entry, depth - 1)


def _from_hub(author: str | None, pipeline_tag: str | None, top: int | None) -> list[SurveyTarget]:
    """Repositories in the order of their downloads; only those with safetensors can be read by byte ranges."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingDependency("huggingface_hub", "hf", "a query of the hub") from error
    query: dict[str, Any] = {"author": author, "pipeline_tag": pipeline_tag, "limit": top, "filter": "safetensors"}
    try:
        models = HfApi().list_models(**query, sort="downloads", expand=["createdAt"])
        return [SurveyTarget(f"hf://{model.id}", _year(model.created_at)) for model in models]
    except Exception as error:  # errors of HTTP, of names and of being offline have no common base
        raise RemoteUnavailable("the list of models of the hub", first_line(error)) from error


# --- `survey`: a list of targets into a table, with any engine ---

ENGINES = ("auto", "serial", "process", "ray")
MODELS_PER_PART = 200
SHORTEST_PART_SECONDS = 2.0
SHARE_AT_RISK = 0.02
"""A part is written once this share of the time so far has passed, whether or not another target ends meanwhile: a kill
costs little, and parts stay few."""
LOOK_SECONDS = 0.5
"""How often it is looked whether that time has passed."""
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
    spectrum: str = "extremes",
    heads: bool = False,
    precision: str = "auto",
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
    options = Options(spectrum=spectrum, heads=heads, precision=precision)
    folder = Path(out)
    with held(folder):
        table = SurveyTable.at(folder, options)
        if retry_failed:
            table.forget("failed")
        if engine == "auto":
            engine = "serial" if workers == 1 else "process"
        engines: dict[str, Engine] = {"serial": serial, "process": processes, "ray": RayEngine(address)}
        return _Run(table, options, engines[engine], workers, requests_per_second, progress).everything(wanted)


@dataclass
class _Run:
    """One run over a table: what is left to do, and what was done."""

    table: SurveyTable
    options: Options
    engine: Engine
    workers: int
    requests_per_second: float | None
    report: Report
    _failure: Exception | None = None
    """Of the thread that writes in time."""

    def everything(self, wanted: Sequence[SurveyTarget]) -> SurveyCounts:
        rows = self.table.models(("target", "status", "file_sha256"))
        finished = {row["target"] for row in rows}
        pending = [one for one in wanted if one.target not in finished]
        self.counts = SurveyCounts(models=len(wanted), earlier=len(wanted) - len(pending))
        self._start = self._written = time.monotonic()
        self._buffer: list[TargetOutcome] = []
        self._lock = threading.Lock()
        known = {row["file_sha256"] for row in rows if row["status"] == "read" and row["file_sha256"]}
        while pending:
            limits = RequestLimits(requests_per_second=self.requests_per_second, known=tuple(sorted(known)))
            waiting = self._round(pending, limits)
            known |= self._copy(waiting)
            # A content whose reader failed has no rows to copy: the next target that has it reads it.
            pending = [outcome.listed for outcome in waiting if outcome.waits_for not in known]
        return self._now()

    def _round(self, pending: Sequence[SurveyTarget], limits: RequestLimits) -> list[TargetOutcome]:
        """Runs the engine over targets and writes what it finds; the targets whose content another one reads."""
        waiting = []
        with self._written_in_time():
            for outcome in self.engine(pending, self.options, limits, self.workers):
                self._count(requests=outcome.requests, bytes_received=outcome.bytes_received)
                if outcome.waits_for is None:
                    self._keep(outcome)
                else:
                    waiting.append(outcome)
        return waiting

    @contextmanager
    def _written_in_time(self) -> Iterator[None]:
        """Inside, rows are written when it is time, however long the next target takes; at the end, all that are left."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                try:
                    self._write_if_due()
                except Exception as error:  # raised where the survey runs
                    self._failure = error
                    return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._write()

    def _copy(self, waiting: Sequence[TargetOutcome]) -> set[str]:
        """Writes the rows of targets whose content is in the table by now; the contents that were found."""
        contents = sorted({outcome.waits_for for outcome in waiting if outcome.waits_for})
        found: set[str] = set()
        for start in range(0, len(contents), COPIES_AT_ONCE):
            originals = self.table.with_content(set(contents[start : start + COPIES_AT_ONCE]))
            found |= originals.keys()
            for outcome in waiting:
                if outcome.waits_for in originals and outcome.own is not None:
                    rows = tuple(copied(originals[outcome.waits_for], outcome.own))
                    self._keep(replace(outcome, rows=rows, waits_for=None))
        self._write()
        return found

    def _keep(self, outcome: TargetOutcome) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._buffer.append(outcome)
        self._count(**{"copied" if outcome.own is not None else outcome.rows[0][1]["status"]: 1})
        self.report(self._now())
        self._write_if_due()

    def _write_if_due(self) -> None:
        now = time.monotonic()
        at_risk = max(SHORTEST_PART_SECONDS, SHARE_AT_RISK * (now - self._start))
        if len(self._buffer) >= MODELS_PER_PART or now - self._written >= at_risk:
            self._write()

    def _count(self, **more: int) -> None:
        sums = {name: getattr(self.counts, name) + number for name, number in more.items()}
        self.counts = replace(self.counts, **sums)

    def _write(self) -> None:
        with self._lock:
            if self._buffer:
                self.table.add([row for outcome in self._buffer for row in outcome.rows])
            self._buffer, self._written = [], time.monotonic()

    def _now(self) -> SurveyCounts:
        return replace(self.counts, seconds=time.monotonic() - self._start)
