"""Results as small tables, where a notebook shows them."""

from html import escape

from oversmooth.output.numbers import format_cell
from oversmooth.results import Row


def html_table(title: str, rows: list[Row]) -> str:
    """A small HTML table for notebooks; every cell is escaped."""
    if not rows:
        return f"<p>{escape(title)}: no rows</p>"
    shown = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    body = "".join("<tr>" + "".join(f"<td>{escape(format_cell(row[n]))}</td>" for n in shown) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
