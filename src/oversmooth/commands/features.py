"""`oversmooth measure` and `predict`: what a model does when it runs."""

from typing import Annotated, Any

import typer

from oversmooth.commands import completion
from oversmooth.commands.lengths import Lengths, LengthsPage, over_lengths, require_alone
from oversmooth.commands.options import (
    Base,
    DataOption,
    Device,
    Offload,
    RunDtype,
    TargetArgument,
    TrustRemoteCode,
    WhatIfs,
    embedded_default,
)
from oversmooth.commands.reading import reads_data
from oversmooth.commands.showing import Showing, show, shows_rows
from oversmooth.data.reading import ReadingOptions
from oversmooth.output.terminal.progress_bars import one_bar
from oversmooth.output.whole_files import require_writable


@reads_data
@shows_rows
def measure(
    target: TargetArgument = None,
    base: Base = None,
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
    lengths: Lengths = None,
    page: LengthsPage = None,
    device: Device = None,
    dtype: RunDtype = None,
    offload: Offload = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Run the model and measure how alike its tokens become over depth, and which sub-block does it."""
    from oversmooth.measurement.measurement import measure as measure_
    from oversmooth.measurement.metrics import DEFAULT_METRICS
    from oversmooth.output.terminal import tables

    require_writable(page)
    names = tuple(metrics.split(",")) if metrics else DEFAULT_METRICS
    opened: dict[str, Any] = {"base": base, "dtype": dtype, "offload": offload, "device": device}
    if lengths is not None or page is not None:
        others = {"--at": at != "stream", "--prefix-tokens": prefix_tokens != "keep"}
        require_alone(others)
        over_lengths(
            target,
            data,
            lengths,
            page,
            showing,
            metrics=names,
            **opened,
            trust_remote_code=trust_remote_code,
            **reading,
        )
        return
    with one_bar("Measuring, layers of sequences") as progress:
        result = measure_(
            target or embedded_default(),
            data,
            **opened,
            metrics=names,
            at=at if "," not in at else at.split(","),
            prefix_tokens=prefix_tokens,
            trust_remote_code=trust_remote_code,
            progress=progress,
            **reading,
        )
    show(result, lambda: tables.show_measurement(result), showing)


@reads_data
@shows_rows
def predict(
    target: TargetArgument = None,
    base: Base = None,
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
    device: Device = None,
    dtype: RunDtype = None,
    offload: Offload = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show what the theory predicts for every layer, next to what is measured there, and where they differ."""
    from oversmooth.output.terminal.prediction_tables import show_prediction
    from oversmooth.prediction.prediction import predict as predict_

    require_writable(page)
    opened: dict[str, Any] = {"base": base, "dtype": dtype, "offload": offload, "device": device}
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
            **opened,
            trust_remote_code=trust_remote_code,
            **reading,
        )
        return
    with one_bar("Predicting, layers of sequences") as progress:
        result = predict_(
            target or embedded_default(),
            data,
            **opened,
            what_ifs=what_if or (),
            simulate=simulate,
            solve=solve,
            precision=precision,
            trust_remote_code=trust_remote_code,
            progress=progress,
            **reading,
        )
    rows = result.head_rows() if heads else None
    show(result, lambda: show_prediction(result, heads=heads), showing, rows)
