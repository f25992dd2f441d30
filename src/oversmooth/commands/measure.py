"""`oversmooth measure`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    DataOption,
    Lengths,
    Showing,
    TargetArgument,
    example_target,
    reads_data,
    runs_model,
    show,
    shows_rows,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.errors import BadValue, Conflict
from oversmooth.output.console import one_bar

# --- `--lengths` of `measure` and `predict`: the same texts cut to several lengths ---


def require_alone(others: Mapping[str, bool]) -> None:
    """Raises where an option was given that says nothing about lengths."""
    for option, is_given in others.items():
        if is_given:
            raise Conflict(["--lengths", option])


def over_lengths(
    target: str | None,
    data: str | None,
    lengths: str,
    showing: Showing,
    **options: Any,
) -> None:
    """Runs `measure_lengths` and shows what it found."""
    from oversmooth.output.curve_pages import lengths_page
    from oversmooth.output.tables import show_lengths
    from oversmooth.prediction.lengths import measure_lengths

    with one_bar("Measuring lengths") as progress:
        result = measure_lengths(
            target or example_target(), data, lengths=_numbers(lengths), progress=progress, **options
        )
    show(result, lambda: show_lengths(result), showing, page=lambda: lengths_page(result))


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
            help=f"Comma-separated; the first three are groups.\n{' '.join(completion.VALUES['metric'])}",
            autocompletion=completion.values("metric"),
        ),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated; the first four are groups.\n{' '.join(completion.VALUES['place'])}",
            autocompletion=completion.values("place"),
        ),
    ] = "stream",
    prefix_tokens: Annotated[
        str,
        typer.Option(
            help="CLS and register tokens: keep or drop.",
            autocompletion=completion.values("prefix_tokens"),
        ),
    ] = "keep",
    pairs: Annotated[bool, typer.Option("--pairs", help="Also the spread of the cosines of pairs of tokens.")] = False,
    null: Annotated[bool, typer.Option("--null", help="Also measure the architecture with fresh weights.")] = False,
    lengths: Lengths = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Run the model and measure how alike its tokens become over depth, and which sub-block does it."""
    from oversmooth.measurement.measure import measure as measure_
    from oversmooth.measurement.metrics import DEFAULT_METRICS
    from oversmooth.output import tables

    names = tuple(metrics.split(",")) if metrics else DEFAULT_METRICS
    if lengths is not None:
        others = {"--at": at != "stream", "--prefix-tokens": prefix_tokens != "keep", "--null": null, "--pairs": pairs}
        require_alone(others)
        over_lengths(
            target,
            data,
            lengths,
            showing,
            metrics=names,
            **load,
            **reading,
        )
        return
    showing.require_page_free()
    with one_bar("Measuring, layers of sequences") as progress:
        result = measure_(
            target or example_target(),
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
