"""Puts the help of every verb, as it is printed, into the page that asks for it."""

import re
from typing import Any

import typer

from oversmooth.commands.help import help_of
from oversmooth.commands.verbs import app

MARKER = "<!-- commands -->"
COLUMNS = 80
BOLD = re.compile(r"\x1b\[\d+m")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARKER, _commands()) if MARKER in markdown else markdown


def _commands() -> str:
    group: Any = typer.main.get_command(app)  # typer has a click of its own, whose classes are not public
    return "\n\n".join(_section(name, command, group) for name, command in group.commands.items())


def _section(name: str, command: Any, group: Any) -> str:
    parent = group.make_context("oversmooth", [name], resilient_parsing=True)
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    text = BOLD.sub("", help_of(command, context, COLUMNS, shows_all=True))
    return f"## oversmooth {name}\n\n```text\n{text}\n```"
