"""`oversmooth edit`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import completion
from oversmooth.commands.options import Heads, Json, ModelType, ValueHeads
from oversmooth.errors import Conflict
from oversmooth.output.terminal.progress_bars import one_bar


def edit(
    target: Annotated[
        str,
        typer.Argument(
            help="Local checkpoint: a folder or a file.", show_default=False, autocompletion=completion.targets
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to; must be new or empty.")],
    sharpen: Annotated[bool, typer.Option("--sharpen", help="Move the eigenvalues of H into [-1, 0].")] = False,
    smooth: Annotated[bool, typer.Option("--smooth", help="Move the eigenvalues of H into [0, 1].")] = False,
    interval: Annotated[
        tuple[float, float] | None, typer.Option(help="Move the eigenvalues of H into [LOW, HIGH].")
    ] = None,
    scale_h: Annotated[float | None, typer.Option(help="Multiply H by this number.")] = None,
    flip_norm_signs: Annotated[
        bool, typer.Option("--flip-norm-signs", help="Negate the weights of the attention's norm.")
    ] = False,
    layers: Annotated[str | None, typer.Option(help="Layers to change, such as 6-11,14. Default: all.")] = None,
    stack: Annotated[str | None, typer.Option(help="Change only this stack: encoder, decoder, text or vision.")] = None,
    basis: Annotated[
        str, typer.Option(help="orthogonal, or general (moves H less).", autocompletion=completion.values("basis"))
    ] = "orthogonal",
    max_condition: Annotated[
        float | None, typer.Option(help="Largest condition number of a general basis. Default: no limit.")
    ] = None,
    json: Json = False,
    model_type: ModelType = None,
    n_heads: Heads = None,
    n_kv: ValueHeads = None,
) -> None:
    """Change the value maps of a checkpoint, write an ordinary checkpoint and show how far each layer moved."""
    from oversmooth.control.edit import edit as edit_
    from oversmooth.output.terminal import tables

    asked = [*([(-1.0, 0.0)] if sharpen else []), *([(0.0, 1.0)] if smooth else []), *([interval] if interval else [])]
    if len(asked) > 1:
        raise Conflict(["--sharpen", "--smooth", "--interval"])
    with one_bar("Writing layers") as progress:
        result = edit_(
            target,
            out,
            interval=asked[0] if asked else None,
            scale_h=scale_h,
            flip_norm_signs=flip_norm_signs,
            basis=basis,
            max_condition=max_condition,
            layers=layers,
            stack=stack,
            model_type=model_type,
            n_heads=n_heads,
            n_kv=n_kv,
            progress=progress,
        )
    if json:
        typer.echo(result.to_json(indent=2))
        return
    tables.show_control(result)
