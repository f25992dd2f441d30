"""The terminal: console, Markdown, progress bars. Rich is imported when it is first used."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from oversmooth.environment.files import line_text, table_text

if TYPE_CHECKING:  # importing every result takes as long as the help
    from oversmooth.results import Provenance
    from oversmooth.results.inspection import SurveyCounts


def new_table() -> Table:
    """Light rules and tight columns: the widest table of a layer fits an 80-column terminal."""
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def show_heading(console: Console, provenance: "Provenance") -> None:
    """The target, what has to be known about it, and of hybrids how many blocks have softmax attention."""
    console.print(escape(provenance.name), style="bold", soft_wrap=True)
    if provenance.note:
        console.print(escape(provenance.note))
    for share in provenance.hybrids:
        console.print(escape(f"{share} have softmax attention and are analysed; the others are measured as 'other'"))


# --- what a verb prints, as Markdown: the same tables and sentences, for pull requests and notes ---

_ASKED: ContextVar[bool] = ContextVar("markdown is asked for", default=False)


def writes_markdown() -> bool:
    """Whether what is printed now should be Markdown."""
    return _ASKED.get()


@contextmanager
def as_markdown() -> Iterator[None]:
    """Everything that is printed inside is Markdown."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


class MarkdownConsole(Console):
    """Tables become tables of Markdown, and every other print a paragraph; colours are left out."""

    def print(self, *objects: Any, style: Any = None, **_: Any) -> None:
        for item in objects:
            for part in _parts(item, is_bold="bold" in str(style or "")):
                self.file.write(f"{part}\n\n")


def _parts(item: object, *, is_bold: bool) -> Iterator[str]:
    if not isinstance(item, Table):
        lines = [line_text(line) for line in _plain(item).splitlines() if line.strip()]
        yield from (f"**{line}**" if is_bold else line for line in lines)
        return
    if item.title:
        yield f"**{line_text(_plain(item.title))}**"
    columns = [[_plain(cell) for cell in column.cells] for column in item.columns]
    yield table_text(
        [_plain(column.header) for column in item.columns], [list(row) for row in zip(*columns, strict=True)]
    )
    if item.caption:
        yield line_text(_plain(item.caption))


def _plain(item: object) -> str:
    """Without the markup of colours."""
    return Text.from_markup(item, emoji=False).plain if isinstance(item, str) else str(item)


# --- long work: bars on stderr where a person watches, elsewhere a line now and then ---

EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""
LONG = 60.0
"""Seconds from which on work is long enough to say early how long it will take."""
FIRST_LOOK = 2.0
"""Seconds after which the first estimate is made."""


class ProgressLines:
    """What a log gets instead of a bar: an early estimate of long work, and a line every ten seconds."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic):
        self.name, self.clock = name, clock
        self.began = self.said = clock()
        self.is_estimated = False

    def __call__(self, done: int, total: int) -> None:
        now = self.clock()
        left = (now - self.began) / done * (total - done) if done and total else None
        is_due = now - self.said >= EVERY
        if left is not None and not self.is_estimated and now - self.began >= FIRST_LOOK:
            self.is_estimated = True
            is_due = is_due or now - self.began + left >= LONG
        if is_due and done != total:
            self.said = now
            self.say(f"{self.name}: {done:,}{f' of {total:,}' if total else ''}", left)

    def say(self, text: str, left: float | None) -> None:
        rest = "" if left is None else f", about {timedelta(seconds=round(left))} left"
        print(f"{text}{rest}", file=sys.stderr, flush=True)


@contextmanager
def one_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    with stages() as stage:
        yield stage(label)


@contextmanager
def stages() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """One bar per stage on stderr where a person watches; elsewhere lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:

        def stage(name: str) -> Callable[[int, int], None]:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total or None)

        yield stage


# --- how far a survey is, on the terminal: models, rate, bytes, requests and time left ---


@contextmanager
def survey_bar() -> Iterator[Callable[["SurveyCounts"], None]]:
    """A bar on stderr where a person watches; elsewhere lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _survey_lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("Models"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda counts: bar.update(task, completed=counts.done, total=counts.models, description=_line(counts))


def _survey_lines() -> Callable[["SurveyCounts"], None]:
    """A line every ten seconds."""
    said = time.monotonic()

    def tell(counts: "SurveyCounts") -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY and counts.done != counts.models:
            said = time.monotonic()
            print(f"Models: {counts.done:,} of {counts.models:,}, {_line(counts)}", file=sys.stderr, flush=True)

    return tell


def _line(counts: "SurveyCounts") -> str:
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


def say_counts(counts: "SurveyCounts", folder: str) -> str:
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
