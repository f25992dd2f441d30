"""`--lengths` of `measure` and `predict`: the same texts cut to several lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from oversmooth.commands.options import embedded_default
from oversmooth.commands.showing import Showing, show
from oversmooth.errors import BadValue, Conflict
from oversmooth.output.terminal.progress_bars import one_bar

Lengths = Annotated[
    str | None,
    typer.Option(help="Cut the same texts to each of these lengths in tokens, such as 16,32,64, and show curves."),
]
LengthsPage = Annotated[Path | None, typer.Option(help="With --lengths: also write the curves as a page.")]


def require_alone(others: Mapping[str, bool]) -> None:
    """Raises where an option was given that says nothing about lengths."""
    for option, is_given in others.items():
        if is_given:
            raise Conflict(["--lengths", option])


def over_lengths(
    target: str | None,
    data: str | None,
    lengths: str | None,
    page: Path | None,
    showing: Showing,
    **options: Any,
) -> None:
    """Runs `measure_lengths` and shows what it found."""
    from oversmooth.output.terminal.length_tables import show_lengths
    from oversmooth.prediction.lengths import measure_lengths

    if lengths is None:
        raise BadValue("--page", str(page), "given together with --lengths, which it shows")
    with one_bar("Measuring lengths") as progress:
        result = measure_lengths(
            target or embedded_default(), data, lengths=_numbers(lengths), progress=progress, **options
        )
    if page is not None:
        from oversmooth.output.report import write_page
        from oversmooth.output.report.lengths import lengths_page

        write_page(lengths_page(result), page)
    show(result, lambda: show_lengths(result), showing)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise BadValue("--lengths", text, "whole numbers with commas between them, such as 16,32,64") from error
