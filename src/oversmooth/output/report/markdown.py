"""A page as Markdown, for pull requests and model cards: figures become the sentences that describe them."""

from collections.abc import Iterator

from oversmooth.output.markdown_text import line_text, table_text
from oversmooth.output.report.blocks import Bars, Block, Items, Page, Pair, Plot, Strip, Table, Words


def markdown_of(page: Page) -> str:
    """The whole page, headings from the second level on."""
    parts = [f"## {line_text(page.title)}", f"**{line_text(page.verdict)}**", line_text(page.summary)]
    parts.append("\n".join(f"- {line_text(finding.text)}" for finding in page.findings))
    parts.append("\n".join(f"- {line_text(name)}: {line_text(value)}" for name, value in page.facts))
    for section in page.sections:
        parts += [f"### {line_text(section.title)}" if section.title else "", line_text(section.lead)]
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield table_text([column.name for column in block.columns], [[c.shown for c in row] for row in block.rows])
    elif isinstance(block, Plot):
        yield f"*{line_text(block.alt)}*"
    elif isinstance(block, Pair):
        yield from (f"*{line_text(plot.alt)}*" for plot in block.plots)
    elif isinstance(block, Strip):
        yield "\n".join(
            f"- {line_text(i.title)}: {line_text(i.word)}; {line_text('; '.join(i.lines))}" for i in block.items
        )
    elif isinstance(block, Bars):
        rows = [[row.title, *(bar.shown for bar in row.bars), row.words] for row in block.rows]
        yield table_text(["", *block.columns, ""], rows)
    elif isinstance(block, Items):
        yield "\n".join(f"- {line_text(item)}" for item in block.items)
    elif isinstance(block, Words):
        yield (f"[{block.mark}] " if block.mark else "") + line_text(block.text)
