"""How far a survey is, on the terminal: models, rate, bytes, requests and time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from oversmooth.results.survey import SurveyCounts


@contextmanager
def survey_bar() -> Iterator[Callable[[SurveyCounts], None]]:
    """A bar on stderr, only where a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("Models"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda counts: bar.update(task, completed=counts.done, total=counts.models, description=_line(counts))


def _line(counts: SurveyCounts) -> str:
    fresh = counts.done - counts.earlier
    left = counts.seconds_left
    parts = [
        f"{60 * fresh / counts.seconds:.0f}/min" if counts.seconds > 0 else "",
        size_of(counts.bytes_received),
        f"{counts.requests} requests",
        f"{counts.refused} refused" if counts.refused else "",
        f"{counts.failed} failed" if counts.failed else "",
        f"{timedelta(seconds=round(left))} left" if left is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def say_counts(counts: SurveyCounts, folder: str) -> str:
    """The end of a survey in a few lines."""
    parts = {
        "read": counts.read,
        "with the files of another": counts.copied,
        "refused": counts.refused,
        "failed": counts.failed,
        "from before": counts.earlier,
    }
    said = ", ".join(f"{number} {words}" for words, number in parts.items() if number)
    effort = f"{counts.requests} requests, {size_of(counts.bytes_received)}, {timedelta(seconds=round(counts.seconds))}"
    lines = [f"{counts.models} {'model' if counts.models == 1 else 'models'} in {folder}: {said or 'nothing to do'}."]
    lines.append(f"{effort}.")
    if counts.refused or counts.failed:
        lines.append(f"Why: the column reason of osm.read_survey({folder!r}, 'model'), and the table of an atlas.")
    if counts.failed:
        lines.append("Try again what failed: --retry-failed")
    return "\n".join(lines)


def size_of(count: int) -> str:
    """Bytes in the unit that people read."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
