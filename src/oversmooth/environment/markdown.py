"""Pieces of Markdown that cannot be taken for anything else."""

import re


def table_text(names: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def line_text(text: str) -> str:
    """On one line, and without anything that Markdown would take for a tag."""
    return " ".join(text.split()).replace("<", "&lt;")


def plain_text(text: str) -> str:
    """What others wrote, a file name say, so that Markdown shows it as it is: no link, no picture, no heading.

    >>> print(plain_text('a*b'))
    a\\*b
    """
    return re.sub(r"([\\`*_{}\[\]()#+!|~<>&:@])", r"\\\1", " ".join(text.split()))


def code_text(text: str) -> str:
    """The same as code, between more backticks than it has itself in a row."""
    line = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"
