"""`oversmooth edit`: value maps of a checkpoint changed, and what that costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    WRITTEN,
    DataOption,
    LossIncreaseOrDefault,
    LossTask,
    NewFolder,
    Showing,
    TargetArgument,
    WithLoss,
    checked_files,
    example_target,
    prints_rows,
    reads_data,
    runs_model,
    show,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.errors import BadValue, Conflict, MissingValue, NotSupported
from oversmooth.output.console import one_bar

if TYPE_CHECKING:
    from oversmooth.results import Control

EditOutput = Annotated[
    list[Path] | None,
    NewFolder(help="Of the new checkpoint; with --sweep, a file: curve.html."),
]
WRITING = ("model_type", "n_heads", "n_kv")
"""Load options that matter where the model is not run."""


@runs_model
@reads_data
@prints_rows
def edit(
    target: TargetArgument = None,
    sharpen: Annotated[bool, typer.Option("--sharpen", help="Move the eigenvalues of H into [-1, 0].")] = False,
    smooth: Annotated[bool, typer.Option("--smooth", help="Move the eigenvalues of H into [0, 1].")] = False,
    interval: Annotated[
        tuple[float, float] | None, typer.Option(help="Move the eigenvalues of H into [LOW, HIGH].")
    ] = None,
    scale_h: Annotated[float | None, typer.Option(help="Multiply H by this number.")] = None,
    flip_norm_signs: Annotated[
        bool, typer.Option("--flip-norm-signs", help="Negate the weights of the attention's norm.")
    ] = False,
    strength: Annotated[
        str | None,
        typer.Option(help="Share of the change, in (0, 1]; several with --sweep."),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try several strengths; write no checkpoint.")] = False,
    layers: Annotated[str | None, typer.Option(help="Layers to change, such as 6-11,14. Default: all.")] = None,
    stack: Annotated[str | None, typer.Option(help="Only this one: encoder, decoder, text or vision.")] = None,
    basis: Annotated[
        str, typer.Option(help="orthogonal, or general (moves H less).", autocompletion=completion.values("basis"))
    ] = "orthogonal",
    max_condition: Annotated[
        float | None, typer.Option(help="Largest condition number of a general basis.", hidden=True)
    ] = None,
    loss: WithLoss = False,
    max_loss_increase: LossIncreaseOrDefault = 0.1,
    data: DataOption = None,
    task: LossTask = None,
    output: EditOutput = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Change the value maps of a checkpoint and write an ordinary one; --sweep shows what it would cost."""
    change: dict[str, Any] = {
        "interval": _interval(sharpen, smooth, interval),
        "scale_h": scale_h,
        "flip_norm_signs": flip_norm_signs,
        "basis": basis,
        "max_condition": max_condition,
        "layers": layers,
        "stack": stack,
    }
    run: dict[str, Any] = {**load, **reading, "task": task}
    if sweep:
        shown = Showing(showing.format, checked_files(output, WRITTEN))
        _sweep(target, data, strength, change, max_loss_increase, run, shown)
        return
    if not output:
        raise MissingValue("--output FOLDER (or --sweep, which writes no checkpoint)")
    if len(output) > 1:
        raise BadValue("--output", ", ".join(map(str, output)), "one folder (or several files, with --sweep)")
    _write(target, output[0], data, strength, change, loss, load, run, showing)


def _interval(sharpen: bool, smooth: bool, interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """The one interval that was asked for, by whichever name."""
    asked = [*([(-1.0, 0.0)] if sharpen else []), *([(0.0, 1.0)] if smooth else []), *([interval] if interval else [])]
    if len(asked) > 1:
        raise Conflict(["--sharpen", "--smooth", "--interval"])
    return asked[0] if asked else None


def _write(
    target: str | None,
    out: Path,
    data: str | None,
    strength: str | None,
    change: dict[str, Any],
    loss: bool,
    load: dict[str, Any],
    run: dict[str, Any],
    showing: Showing,
) -> None:
    """The edited checkpoint; with `loss`, what the edit costs, which is measured by running the model."""
    from dataclasses import replace

    from oversmooth.control.edit import edit

    if data is not None and not loss:
        raise BadValue("--data", data, "given together with --loss, which runs the model on it")
    if not loss and (unused := [name for name, value in load.items() if value and name not in WRITING]):
        raise NotSupported(f"--{unused[0].replace('_', '-')}", "without --loss or --sweep", "the model is not run")
    strengths = _strengths(strength or "1")
    if len(strengths) > 1:
        raise BadValue("--strength", strength, "one number (several: --sweep)")
    target = target or example_target()
    with one_bar("Writing layers") as progress:
        writing = {name: load[name] for name in WRITING}
        result = edit(target, out, **change, **writing, strength=strengths[0], progress=progress)
    if loss:
        from oversmooth.worth.edit_curve import edit_curve

        with one_bar("Running the model") as progress:
            cost = edit_curve(target, data, strengths=strengths, **change, progress=progress, **run)
        result = replace(result, cost=cost)
    show(result, lambda: _show_edit(result), showing)


def _show_edit(result: "Control") -> None:
    """How far layers moved, and what that costs where it was asked for."""
    from oversmooth.output.tables import show_control, show_edit_points

    show_control(result)
    if result.cost is not None:
        show_edit_points(result.cost)


def _sweep(
    target: str | None,
    data: str | None,
    strength: str | None,
    change: dict[str, Any],
    max_loss_increase: float,
    run: dict[str, Any],
    showing: Showing,
) -> None:
    """Loss and features over the strength of an edit, and whether it is worth it; no checkpoint is written."""
    from oversmooth.output.curve_pages import edit_curve_page
    from oversmooth.output.tables import show_edit_curve
    from oversmooth.worth.edit_curve import STRENGTHS, edit_curve

    strengths = STRENGTHS if strength is None else _strengths(strength)
    with one_bar("Trying strengths") as progress:
        result = edit_curve(
            target or example_target(),
            data,
            strengths=strengths,
            **change,
            max_loss_increase=max_loss_increase,
            progress=progress,
            **run,
        )
    show(result, lambda: show_edit_curve(result), showing, page=lambda: edit_curve_page(result))


def _strengths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise BadValue(
            "--strength", text, "a number, or with --sweep several with commas, such as 0.25,0.5,1"
        ) from error
