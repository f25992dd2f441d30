"""`oversmooth prune`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    DataOption,
    LossIncrease,
    LossTask,
    NewFolder,
    Showing,
    prints_rows,
    reads_data,
    runs_model,
    show,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.output.console import one_bar


@runs_model
@reads_data
@prints_rows
def prune(
    target: Annotated[
        str,
        typer.Argument(help="Folder of a local checkpoint.", show_default=False, autocompletion=completion.targets),
    ],
    output: Annotated[Path, NewFolder(help="Folder of the new checkpoint; new or empty.")],
    blocks: Annotated[str | None, typer.Option(help="Blocks to remove, such as 9-11.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of the blocks to remove, such as 0.25.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="What --budget ranks blocks by: influence or loss.",
            autocompletion=completion.values("prune_by"),
        ),
    ] = "influence",
    max_loss_increase: LossIncrease = None,
    data: DataOption = None,
    task: LossTask = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Write a checkpoint without some of its blocks, with its loss before and after."""
    from oversmooth.output.tables import show_pruning
    from oversmooth.worth.prune import prune as prune_

    with one_bar("Running sequences") as progress:
        result = prune_(
            target,
            output,
            data,
            blocks=blocks,
            budget=budget,
            by=by,
            max_loss_increase=max_loss_increase,
            task=task,
            progress=progress,
            **load,
            **reading,
        )
    show(result, lambda: show_pruning(result), showing)
