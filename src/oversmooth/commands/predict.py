"""`oversmooth predict`."""

from typing import Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.measure import Lengths, LengthsPage, over_lengths, require_alone
from oversmooth.commands.options import (
    DataOption,
    Showing,
    TargetArgument,
    WhatIfs,
    embedded_default,
    reads_data,
    runs_model,
    show,
    shows_rows,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.environment.files import require_writable
from oversmooth.output.console import one_bar


@runs_model
@reads_data
@shows_rows
def predict(
    target: TargetArgument = None,
    data: DataOption = None,
    what_if: WhatIfs = None,
    simulate: Annotated[
        int, typer.Option(help="Iterate each layer this many times at fixed attention, on the first sequence.", min=0)
    ] = 0,
    solve: Annotated[int, typer.Option(help="Number of sequences whose eigenvalue problems are solved.", min=1)] = 4,
    heads: Annotated[bool, typer.Option("--heads", help="Also print a table with one row per head.")] = False,
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the theory: float32 or float64.", autocompletion=completion.values("precision")
        ),
    ] = "float32",
    lengths: Lengths = None,
    page: LengthsPage = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show what the theory predicts for every layer, next to what is measured there, and where they differ."""
    from oversmooth.output.tables import show_prediction
    from oversmooth.prediction.predict import predict as predict_

    require_writable(page)
    if lengths is not None or page is not None:
        others = {"--what-if": bool(what_if), "--simulate": bool(simulate), "--heads": heads}
        require_alone({**others, "--precision": precision != "float32"})
        over_lengths(
            target,
            data,
            lengths,
            page,
            showing,
            predicts=True,
            solve=solve,
            **load,
            **reading,
        )
        return
    with one_bar("Predicting, layers of sequences") as progress:
        result = predict_(
            target or embedded_default(),
            data,
            what_ifs=what_if or (),
            simulate=simulate,
            solve=solve,
            precision=precision,
            progress=progress,
            **load,
            **reading,
        )
    rows = result.head_rows() if heads else None
    show(result, lambda: show_prediction(result, heads=heads), showing, rows)
