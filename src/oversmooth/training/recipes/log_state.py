"""Where the log of a run stood when a checkpoint was made: a resumed run goes on as if it had never stopped."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from oversmooth.errors import CannotResume

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
