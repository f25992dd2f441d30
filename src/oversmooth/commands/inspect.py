"""`oversmooth inspect`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.options import Showing, TargetArgument, embedded_default, reads_weights, show, shows_rows
from oversmooth.output.console import one_bar


@reads_weights
@shows_rows
def inspect(
    target: TargetArgument = None,
    full: Annotated[
        bool, typer.Option(help="Compute every eigenvalue of wide layers too, not just the extremes.")
    ] = False,
    extremes: Annotated[
        bool,
        typer.Option("--extremes", help="Only the extreme eigenvalues, certified by residuals, and no heads."),
    ] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Also print a table with one row per head.")] = False,
    dtype: Annotated[str, typer.Option(help="Precision of the eigenvalues: auto, float64 or float32.")] = "auto",
    *,
    load: dict[str, Any],
    showing: Showing,
) -> None:
    """Eigenvalues of the value map of every layer, from weights alone: which layers could smooth, which sharpen."""
    from oversmooth.output import tables
    from oversmooth.spectra.inspect import inspect as inspect_

    with one_bar("Reading layers") as progress:
        result = inspect_(
            target or embedded_default(),
            full=full,
            extremes=extremes,
            heads=heads or None,
            dtype=dtype,
            progress=progress,
            **load,
        )
    rows = result.head_rows() if heads else None
    show(result, lambda: tables.show_inspection(result, heads=heads), showing, rows)
