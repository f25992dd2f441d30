"""Analyses as pages and figures; never loads a model."""

from pathlib import Path

from oversmooth.output.report.blocks import Page
from oversmooth.output.report.render import render
from oversmooth.output.whole_files import write_whole


def write_page(page: Page, path: Path) -> None:
    """Writes the page as one self-contained HTML file."""
    html = render(page)
    write_whole(path, lambda partial: partial.write_text(html, encoding="utf-8"))
