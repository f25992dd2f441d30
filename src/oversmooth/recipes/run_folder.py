"""A run folder: manifest, log, checkpoints, and whether the run is complete."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from oversmooth.environment.files import json_object, write_text_whole
from oversmooth.environment.versions import PINS, TRAINING, commit, differences_from_pins, hardware, versions
from oversmooth.errors import BrokenFile, CannotResume, NotWritable, first_line
from oversmooth.models.stores.store import LARGEST_JSON, LocalFolder, read_small
from oversmooth.recipes.variants import FORMS
from oversmooth.results import Analysis
from oversmooth.results.runs import TrainedRun, by_step, read_run, read_trainer_state

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
log = logging.getLogger(__name__)


class Session(BaseModel):
    """One stretch of training, from a start or a resume to its end; `seconds` is missing where it was killed."""

    started: str
    from_step: int
    to_step: int | None = None
    seconds: float | None = None
    hardware: dict[str, Any]
    versions: dict[str, str]
    other_than_pinned: dict[str, str] = {}
    """Packages whose version is not that of constraints.txt, in words."""
    commit: str | None


class Manifest(BaseModel):
    """Written when a run begins and again when it ends."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    name: str
    """Of the recipe."""
    recipe: dict[str, Any]
    """Every setting, after overrides."""
    overrides: list[str]
    variant: str
    seed: int
    fraction: float
    command: str
    data: dict[str, Any]
    """Source, number of examples and hash of every split."""
    steps: int
    sessions: list[Session] = []
    finished: bool = False
    cost: dict[str, float] = {}
    """Wall time over all sessions that ended, with monitor and evaluations; seconds per step and examples per second."""
    results: dict[str, float] = {}
    read_back: dict[str, str] = {}
    """By folder of a model: how it was read back by the plain library, or why not, in words."""

    def write(self, folder: Path) -> None:
        write_text_whole(folder / MANIFEST, self.model_dump_json(indent=2) + "\n")

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed."""
        return {
            "recipe": {key: value for key, value in self.recipe.items() if key != "hardware"},
            "variant": self.variant,
            "seed": self.seed,
            "fraction": self.fraction,
            # The source may have moved, or an unreadable image in it may have been repaired: the splits must be the same.
            "data": {key: value for key, value in self.data.items() if not key.startswith("source")},
            "steps": self.steps,
        }


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run, `None` where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, ValidationError) as error:
        words = first_line(error)
        raise BrokenFile(str(path), "the manifest of a run", words, "Start again in a new folder.") from error


def first_difference(left: Any, right: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two nested values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in dict.fromkeys([*left, *right]):
            inner = f"{key}.{name}".lstrip(".")
            if found := first_difference(left.get(name), right.get(name), inner):
                return found
        return None
    return None if left == right else (key, left, right)


def new_session(from_step: int, processes: int) -> Session:
    """A session that begins now; versions other than the pinned ones are said aloud, because they can change numbers."""
    found = dict(versions(TRAINING))
    if differences := differences_from_pins(found):
        words = ", ".join(f"{package} {difference}" for package, difference in differences.items())
        log.warning("Versions other than those of %s: %s. Numbers can differ.", PINS, words)
    return Session(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        from_step=from_step,
        hardware=hardware(processes),
        versions=found,
        other_than_pinned=differences,
        commit=commit(),
    )


# --- where the log of a run stood when a checkpoint was made ---

METRICS = "metrics.jsonl"
FILE = "log_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """What the next line of the log depends on."""

    metrics_bytes: int
    """Size of metrics.jsonl; what a killed run wrote behind it is written again."""
    loss: float
    """Sum of the losses since the last line that held one; a mean over processes."""
    logged_at: int
    """The step of that line."""

    def write(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_log_state(checkpoint: Path) -> LogState:
    try:
        return LogState(**json.loads((checkpoint / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = f"{checkpoint.name} has no readable {FILE}"
        raise CannotResume(str(checkpoint.parent.parent), reason, "Train in a new folder.") from error


def size_of(metrics: Path) -> int:
    return metrics.stat().st_size if metrics.is_file() else 0


def cut_metrics(metrics: Path, size: int) -> None:
    """Removes what a killed run wrote after the checkpoint from which it continues."""
    if size_of(metrics) > size:
        os.truncate(metrics, size)


# --- the folder of a run, read as it is: finished, running or left behind by a run that was killed ---

ANALYSIS = "analysis.json"

FOLD = "data.fold="
"""Which part is tested on is drawn like a seed: folds of one variant belong together."""


def is_run_folder(path: Path) -> bool:
    """Whether a folder is that of a run, rather than of a model, which has a config and may have a manifest too."""
    return (path / MANIFEST).is_file() and not (path / "config.json").is_file()


def read_run_folder(folder: Path, *, with_analysis: bool = True) -> TrainedRun:
    """What a run was to do, what it logged so far, and what became of it."""
    manifest = read_manifest(folder)
    if manifest is None:
        advice = "Give the folder that `oversmooth train` printed."
        raise BrokenFile(str(folder), f"the folder of a run, with {MANIFEST}", "none", advice)
    form = FORMS.get(manifest.variant)
    return TrainedRun(
        where=str(folder),
        recipe=manifest.name,
        variant=manifest.variant,
        seed=manifest.seed,
        settings=tuple(override for override in manifest.overrides if not override.startswith(FOLD)),
        intends=intention(manifest.variant),
        eigenvalues=form.words if form is not None and form.scale == "plain" else "",
        steps=manifest.steps,
        is_finished=manifest.finished,
        points=read_run(folder / METRICS) if size_of(folder / METRICS) else [],
        results=manifest.results,
        analysis=read_analysis(folder / ANALYSIS) if with_analysis and (folder / ANALYSIS).is_file() else None,
    )


STATE = "trainer_state.json"
"""What a Trainer of transformers writes beside each checkpoint, and at the end where it is told to."""


def is_log(path: Path) -> bool:
    """Whether a target is the log or the folder of a training run, rather than a model."""
    if path.is_file():
        return path.suffix == ".jsonl" or path.name == STATE
    has_log = path.is_dir() and not (path / "config.json").is_file() and bool(_states(path) or _lines(path))
    return is_run_folder(path) or has_log


def read_log(path: Path) -> TrainedRun:
    """Any log: a run of a recipe, the lines of a monitor, the folder of a Trainer, whose two logs are put together."""
    if is_run_folder(path):
        return read_run_folder(path)
    lines = [path] if path.suffix == ".jsonl" else _lines(path)
    states = [path] if path.name == STATE else _states(path)
    if not lines and not states:
        expected = f"the folder of a run, with {MANIFEST}, {STATE} or the .jsonl file of a monitor"
        raise BrokenFile(str(path), expected, "none of them", "Train for a step first, or give the folder of a run.")
    state = max((read_trainer_state(file) for file in states), key=lambda state: state.step, default=None)
    points = [point for file in lines for point in read_run(file)]
    return TrainedRun(
        where=str(path),
        recipe="log",
        variant=(path.absolute().parent if path.name == STATE else path).stem,
        steps=state.steps if state else 0,
        is_finished=state is not None and 0 < state.steps <= state.step,
        points=by_step([*(state.points if state else ()), *points]),
    )


def _states(folder: Path) -> list[Path]:
    return [path for path in (folder / STATE, *sorted(folder.glob(f"{CHECKPOINT}*/{STATE}"))) if path.is_file()]


def _lines(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.is_file() and size_of(path))


def intention(variant: str) -> str:
    """What a form of H is made for, where it can have one sign only."""
    form = FORMS.get(variant)
    if form is None or form.low < 0 < form.high:
        return ""
    return "sharpening" if form.high <= 0 else "smoothing"


def read_analysis(path: Path) -> Analysis:
    """The analysis that a run has left."""
    content = read_small(LocalFolder(path.parent), path.name, LARGEST_JSON)
    return Analysis.from_dict(json_object(content, str(path), "the analysis of a run"), where=str(path))


# --- checkpoints of a run, each whole or absent ---

PARTIAL = ".partial"
WEIGHTS, AVERAGE = "model.safetensors", "average.safetensors"
CHECKPOINT = "checkpoint-"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    found = [entry.name.removeprefix(CHECKPOINT) for entry in folder.glob(f"{CHECKPOINT}*") if entry.is_dir()]
    return sorted(int(name) for name in found if name.isdigit())


@contextmanager
def whole_or_absent(
    folder: Path, step: int, *, writes: bool, keep: int, wait_for_everyone: Callable[[], None]
) -> Iterator[Path]:
    """A folder to write a checkpoint into, renamed when it is complete: a kill at any moment leaves whole ones.

    `writes` is true in one of several processes, which wait for each other; of the older checkpoints, `keep` stay.
    """
    from safetensors import SafetensorError

    partial, name = folder / PARTIAL, f"{CHECKPOINT}{step}"
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    wait_for_everyone()
    try:
        yield partial
        wait_for_everyone()
        if writes:
            _reach_the_disk(partial / name)
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(partial / name, folder / name)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(folder / f"{CHECKPOINT}{old}", ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError on a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise NotWritable(str(folder / name), first_line(error), "Free some space.") from error
    wait_for_everyone()


def _reach_the_disk(folder: Path) -> None:
    """A rename may reach the disk before the bytes do; then a power cut would leave a checkpoint of zeros."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
