"""`oversmooth predict`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.measure import over_lengths, require_alone
from oversmooth.commands.options import (
    DataOption,
    HeadRows,
    Lengths,
    Precision,
    Showing,
    Solve,
    TargetArgument,
    WhatIfs,
    example_target,
    reads_data,
    runs_model,
    show,
    shows_rows,
)
from oversmooth.data.options import ReadingOptions
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
    solve: Solve = 4,
    heads: HeadRows = False,
    precision: Precision = "auto",
    lengths: Lengths = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show what the theory predicts for every layer, next to what is measured there, and where they differ."""
    from oversmooth.output.tables import show_prediction
    from oversmooth.prediction.predict import predict as predict_

    if lengths is not None:
        others = {"--what-if": bool(what_if), "--simulate": bool(simulate), "--heads": heads}
        require_alone({**others, "--precision": precision != "auto"})
        over_lengths(
            target,
            data,
            lengths,
            showing,
            predicts=True,
            solve=solve,
            **load,
            **reading,
        )
        return
    showing.require_page_free()
    with one_bar("Predicting, layers of sequences") as progress:
        result = predict_(
            target or example_target(),
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
