"""Bars on stderr for long work, only where a person watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    with stages() as stage:
        yield stage(label)


@contextmanager
def stages() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """One bar per stage on stderr, only where a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def stage(name: str) -> Callable[[int, int], None]:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total or None)

        yield stage
