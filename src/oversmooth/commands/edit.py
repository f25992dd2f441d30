"""`oversmooth edit` and `edit-curve`: value maps of a checkpoint changed, and what that costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    DataOption,
    Heads,
    LossTask,
    ModelType,
    Showing,
    TargetArgument,
    ValueHeads,
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

if TYPE_CHECKING:
    from oversmooth.results import Control

Sharpen = Annotated[bool, typer.Option("--sharpen", help="Move the eigenvalues of H into [-1, 0].")]
Smooth = Annotated[bool, typer.Option("--smooth", help="Move the eigenvalues of H into [0, 1].")]
Interval = Annotated[tuple[float, float] | None, typer.Option(help="Move the eigenvalues of H into [LOW, HIGH].")]
ScaleH = Annotated[float | None, typer.Option(help="Multiply H by this number.")]
FlipNormSigns = Annotated[bool, typer.Option("--flip-norm-signs", help="Negate the weights of the attention's norm.")]
ChosenLayers = Annotated[str | None, typer.Option(help="Layers to change, such as 6-11,14. Default: all.")]
ChosenStack = Annotated[str | None, typer.Option(help="Change only this stack: encoder, decoder, text or vision.")]
BasisOption = Annotated[
    str, typer.Option(help="orthogonal, or general (moves H less).", autocompletion=completion.values("basis"))
]
MaxCondition = Annotated[
    float | None, typer.Option(help="Largest condition number of a general basis. Default: no limit.")
]


def _interval(sharpen: bool, smooth: bool, interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """The one interval that was asked for, by whichever name."""
    asked = [*([(-1.0, 0.0)] if sharpen else []), *([(0.0, 1.0)] if smooth else []), *([interval] if interval else [])]
    if len(asked) > 1:
        raise Conflict(["--sharpen", "--smooth", "--interval"])
    return asked[0] if asked else None


@reads_data
@shows_rows
def edit(
    target: Annotated[
        str,
        typer.Argument(
            help="Local checkpoint: a folder or a file.", show_default=False, autocompletion=completion.targets
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to; must be new or empty.")],
    sharpen: Sharpen = False,
    smooth: Smooth = False,
    interval: Interval = None,
    scale_h: ScaleH = None,
    flip_norm_signs: FlipNormSigns = False,
    strength: Annotated[
        float, typer.Option(help="Above 0 and at most 1: how much of the change is made; see `edit-curve`.")
    ] = 1.0,
    layers: ChosenLayers = None,
    stack: ChosenStack = None,
    basis: BasisOption = "orthogonal",
    max_condition: MaxCondition = None,
    loss: Annotated[
        bool, typer.Option("--loss", help="Also run the model with and without the change: loss and features.")
    ] = False,
    data: DataOption = None,
    model_type: ModelType = None,
    n_heads: Heads = None,
    n_kv: ValueHeads = None,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Change the value maps of a checkpoint, write an ordinary checkpoint and show how far each layer moved."""
    from dataclasses import replace

    from oversmooth.control.edit import edit as edit_

    if data is not None and not loss:
        raise BadValue("--data", data, "given together with --loss, which runs the model on it")
    change: dict[str, Any] = {
        "interval": _interval(sharpen, smooth, interval),
        "scale_h": scale_h,
        "flip_norm_signs": flip_norm_signs,
        "basis": basis,
        "max_condition": max_condition,
        "layers": layers,
        "stack": stack,
    }
    with one_bar("Writing layers") as progress:
        result = edit_(
            target,
            out,
            **change,
            strength=strength,
            model_type=model_type,
            n_heads=n_heads,
            n_kv=n_kv,
            progress=progress,
        )
    if loss:
        from oversmooth.worth.edit_curve import edit_curve as edit_curve_

        with one_bar("Running the model") as progress:
            cost = edit_curve_(target, data, strengths=(strength,), **change, progress=progress, **reading)
        result = replace(result, cost=cost)
    show(result, lambda: _show_edit(result), showing)


def _show_edit(result: "Control") -> None:
    """How far layers moved, and what that costs where it was asked for."""
    from oversmooth.output.tables import show_control, show_edit_points

    show_control(result)
    if result.cost is not None:
        show_edit_points(result.cost)


@runs_model
@reads_data
@shows_rows
def edit_curve(
    target: TargetArgument = None,
    sharpen: Sharpen = False,
    smooth: Smooth = False,
    interval: Interval = None,
    scale_h: ScaleH = None,
    flip_norm_signs: FlipNormSigns = False,
    strengths: Annotated[
        str, typer.Option(help="Strengths to try, each above 0 and at most 1, with commas.")
    ] = "0.1,0.25,0.5,0.75,1",
    layers: ChosenLayers = None,
    stack: ChosenStack = None,
    basis: BasisOption = "orthogonal",
    max_condition: MaxCondition = None,
    max_loss_increase: Annotated[
        float, typer.Option(help="An edit is worth it only where the loss grows by no more.")
    ] = 0.1,
    data: DataOption = None,
    task: LossTask = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the curve as a page.")] = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show loss and features over the strength of an edit, and whether it is worth it; no checkpoint is written."""
    from oversmooth.output.tables import show_edit_curve
    from oversmooth.worth.edit_curve import edit_curve as edit_curve_

    require_writable(output)
    with one_bar("Trying strengths") as progress:
        result = edit_curve_(
            target or embedded_default(),
            data,
            strengths=_numbers(strengths),
            interval=_interval(sharpen, smooth, interval),
            scale_h=scale_h,
            flip_norm_signs=flip_norm_signs,
            basis=basis,
            max_condition=max_condition,
            layers=layers,
            stack=stack,
            max_loss_increase=max_loss_increase,
            task=task,
            progress=progress,
            **load,
            **reading,
        )
    if output is not None:
        from oversmooth.output.curve_pages import edit_curve_page
        from oversmooth.output.render import write_page

        write_page(edit_curve_page(result), output)
    show(result, lambda: show_edit_curve(result), showing)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise BadValue("--strengths", text, "numbers with commas between them, such as 0.25,0.5,1") from error
