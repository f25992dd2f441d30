"""Pieces of Markdown that cannot be taken for anything else."""


def table_text(names: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def line_text(text: str) -> str:
    """On one line, and without anything that Markdown would take for a tag."""
    return " ".join(text.split()).replace("<", "&lt;")
