"""`oversmooth measure`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    DataOption,
    Showing,
    TargetArgument,
    embedded_default,
    reads_data,
    runs_model,
    show,
    shows_rows,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.environment.files import require_writable
from oversmooth.errors import BadValue, Conflict
from oversmooth.output.console import one_bar

# --- `--lengths` of `measure` and `predict`: the same texts cut to several lengths ---

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
    from oversmooth.output.tables import show_lengths
    from oversmooth.prediction.lengths import measure_lengths

    if lengths is None:
        raise BadValue("--page", str(page), "given together with --lengths, which it shows")
    with one_bar("Measuring lengths") as progress:
        result = measure_lengths(
            target or embedded_default(), data, lengths=_numbers(lengths), progress=progress, **options
        )
    if page is not None:
        from oversmooth.output.curve_pages import lengths_page
        from oversmooth.output.render import write_page

        write_page(lengths_page(result), page)
    show(result, lambda: show_lengths(result), showing)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise BadValue("--lengths", text, "whole numbers with commas between them, such as 16,32,64") from error


@runs_model
@reads_data
@shows_rows
def measure(
    target: TargetArgument = None,
    data: DataOption = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated metrics; `steps`, `attention` and `all` stand for several.",
            autocompletion=completion.values("metric"),
        ),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            help="Where to measure: stream, norms, branches, all, or a comma-separated list of places.",
            autocompletion=completion.values("place"),
        ),
    ] = "stream",
    prefix_tokens: Annotated[
        str,
        typer.Option(
            help="What to do with CLS and register tokens: keep or drop.",
            autocompletion=completion.values("prefix_tokens"),
        ),
    ] = "keep",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also measure how the cosines of all pairs of tokens are spread.")
    ] = False,
    null: Annotated[bool, typer.Option("--null", help="Also measure the same architecture untrained.")] = False,
    lengths: Lengths = None,
    page: LengthsPage = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Run the model and measure how alike its tokens become over depth, and which sub-block does it."""
    from oversmooth.measurement.measure import measure as measure_
    from oversmooth.measurement.metrics import DEFAULT_METRICS
    from oversmooth.output import tables

    require_writable(page)
    names = tuple(metrics.split(",")) if metrics else DEFAULT_METRICS
    if lengths is not None or page is not None:
        others = {"--at": at != "stream", "--prefix-tokens": prefix_tokens != "keep", "--null": null, "--pairs": pairs}
        require_alone(others)
        over_lengths(
            target,
            data,
            lengths,
            page,
            showing,
            metrics=names,
            **load,
            **reading,
        )
        return
    with one_bar("Measuring, layers of sequences") as progress:
        result = measure_(
            target or embedded_default(),
            data,
            metrics=names,
            at=at if "," not in at else at.split(","),
            prefix_tokens=prefix_tokens,
            pairs=pairs,
            null=null,
            progress=progress,
            **load,
            **reading,
        )
    show(result, lambda: tables.show_measurement(result), showing)
