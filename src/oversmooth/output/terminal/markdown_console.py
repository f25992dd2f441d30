"""What a verb prints, as Markdown: the same tables and sentences, for pull requests and notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oversmooth.output.markdown_text import line_text, table_text

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
