"""`oversmooth card`: a saved analysis for a model card."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import completion
from oversmooth.output.whole_files import require_writable, write_whole


def card(
    analysis: Annotated[
        str,
        typer.Argument(
            help="Analysis saved with `oversmooth report --save`.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model. Default: what was analysed.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")] = None,
) -> None:
    """Write a model card's section about smoothing: the hub's evaluation results as YAML, and Markdown."""
    from oversmooth.commands.making_pages import saved_analysis
    from oversmooth.output.report.card import card as card_

    require_writable(output)
    found = saved_analysis(Path(analysis))
    text = card_(found, name or Path(found.inspection.provenance.target).name)
    if output is None:
        typer.echo(text)
        return
    write_whole(output, lambda partial: partial.write_text(text, encoding="utf-8"))
