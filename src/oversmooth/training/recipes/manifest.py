"""The manifest of a run: enough to repeat it, and what it cost."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from oversmooth.environment.versions import PINS, TRAINING, commit, differences_from_pins, hardware, versions
from oversmooth.errors import BrokenFile, first_line
from oversmooth.output.whole_files import write_whole

NAME = "manifest.json"
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

    def write(self, folder: Path) -> None:
        text = self.model_dump_json(indent=2) + "\n"
        write_whole(folder / NAME, lambda partial: partial.write_text(text, encoding="utf-8"))

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
    path = folder / NAME
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
    return Session(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        from_step=from_step,
        hardware=hardware(processes),
        versions=(found := dict(versions(TRAINING))),
        other_than_pinned=warned_differences(found),
        commit=commit(),
    )


def warned_differences(found: dict[str, str]) -> dict[str, str]:
    """What differs from the pinned versions; said aloud, because it can change numbers."""
    differences = differences_from_pins(found)
    if differences:
        words = ", ".join(f"{package} {difference}" for package, difference in differences.items())
        log.warning("Versions other than those of %s: %s. Numbers can differ.", PINS, words)
    return differences
