"""A page as Markdown, for pull requests and model cards: figures become the sentences that describe them."""

from collections.abc import Iterator

from oversmooth.output.report.blocks import Bars, Block, Items, Page, Pair, Plot, Strip, Table, Words


def markdown_of(page: Page) -> str:
    """The whole page, headings from the second level on."""
    parts = [f"## {_line(page.title)}", f"**{_line(page.verdict)}**", _line(page.summary)]
    parts.append("\n".join(f"- {_line(finding.text)}" for finding in page.findings))
    parts.append("\n".join(f"- {_line(name)}: {_line(value)}" for name, value in page.facts))
    for section in page.sections:
        parts += [f"### {_line(section.title)}" if section.title else "", _line(section.lead)]
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield table_text([column.name for column in block.columns], [[c.shown for c in row] for row in block.rows])
    elif isinstance(block, Plot):
        yield f"*{_line(block.alt)}*"
    elif isinstance(block, Pair):
        yield from (f"*{_line(plot.alt)}*" for plot in block.plots)
    elif isinstance(block, Strip):
        yield "\n".join(f"- {_line(i.title)}: {_line(i.word)}; {_line('; '.join(i.lines))}" for i in block.items)
    elif isinstance(block, Bars):
        rows = [[row.title, *(bar.shown for bar in row.bars), row.words] for row in block.rows]
        yield table_text(["", *block.columns, ""], rows)
    elif isinstance(block, Items):
        yield "\n".join(f"- {_line(item)}" for item in block.items)
    elif isinstance(block, Words):
        yield (f"[{block.mark}] " if block.mark else "") + _line(block.text)


def table_text(names: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _line(text: str) -> str:
    """On one line, and without anything that Markdown would take for a tag."""
    return " ".join(text.split()).replace("<", "&lt;")
