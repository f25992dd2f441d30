"""`oversmooth eval`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.options import (
    DataOption,
    LossTask,
    Showing,
    TargetArgument,
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
def eval_(
    target: TargetArgument = None,
    data: DataOption = None,
    task: LossTask = None,
    original: Annotated[
        str | None, typer.Option(help="Model whose similarities an embedding model is compared with.")
    ] = None,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show the loss of a model on your data."""
    from oversmooth.output.tables import show_loss
    from oversmooth.worth.task_loss import task_loss

    showing.require_page_free()
    with one_bar("Running sequences") as progress:
        result = task_loss(
            target or example_target(),
            data,
            task=task,
            original=original,
            progress=progress,
            **load,
            **reading,
        )
    show(result, lambda: show_loss(result), showing)
